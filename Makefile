# Everything a newcomer types. Each target sets up what it needs: a virtual environment, then the packages.
PYTHON ?= python3.11
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
WEB    := $(VENV)/.installed-web
ZERO   := $(VENV)/.installed-zero
TRITON := $(VENV)/.installed-triton
BUNDLE := .gpu-bundle
WHEELS := $(wildcard $(BUNDLE)/*.whl)

.PHONY: help setup ui demo demo-fp8 demo-llm demo-chat test test-again test-all test-faults fuzz test-web setup-web test-cuda test-zero setup-zero test-triton setup-triton gpu-bundle bench-gpu check format docs clean

help:           ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 20

$(STAMP): requirements.txt requirements-dev.txt constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) not found; install Python 3.11 or run make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-dev.txt
	@touch $@

setup: $(STAMP) ## virtual environment and packages

$(WEB): $(STAMP) requirements-web.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-web.txt
	@touch $@

setup-web: $(WEB) ## what the page needs besides

ui: $(WEB)      ## the page: train, watch, compare, label and chat in the browser; FOLDERS="/my/images /my/models"
	$(PY) ui.py $(if $(FOLDERS),--folders $(FOLDERS)) $(if $(PORT),--port $(PORT)) $(if $(HOST),--host $(HOST))

# DeepSpeed is built against the installed torch; of its kernels none is used, and compiled.
$(ZERO): $(STAMP) requirements-zero.txt
	DS_BUILD_OPS=0 $(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -r requirements-zero.txt
	@touch $@

setup-zero: $(ZERO) ## DeepSpeed, which [parallel] zero needs besides

# --no-deps: beside a torch for CPUs, too, which is enough for the tests.
$(TRITON): $(STAMP) requirements-triton.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-triton.txt
	@touch $@

setup-triton: $(TRITON) ## Triton, which quantised_compute = "fused" needs besides

demo: $(STAMP)  ## train a LoRA on the built-in tiny FLUX: samples, curves, metrics in output/demo
	$(PY) train_lora.py --config_file configs/demo.toml

demo-fp8: $(STAMP) ## a fill LoRA trained in bf16, served in fp8: the damage, its causes, the fix; output/demo_fp8
	$(PY) tools/demo_fp8.py

demo-llm: $(STAMP) ## a small Llama from fresh weights to stories: curves, perplexity, samples; output/demo_llm
	$(PY) tools/demo_llm.py

demo-chat: $(WEB) ## a real chat model (93 MB are fetched) learns from twenty talks; the page then shows both
	$(PY) tools/demo_chat.py
	$(PY) ui.py --open $(if $(PORT),--port $(PORT))

test: $(STAMP)  ## the tests
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow" -n 2 -q --durations=20

test-again: $(STAMP) ## the tests that failed last time, one after the other
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow" --last-failed --last-failed-no-failures none -q

test-all: $(STAMP) ## the tests, the slow ones too
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -q

test-web: $(WEB) ## the page, in the Chromium of this machine
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-web-dev.txt
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -q -rs tests/web

test-cuda: $(STAMP) ## ready configurations and the report, walked on a CUDA device that computes nothing (needs g++)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m slow -n 2 -q -rs tests/cuda

test-zero: $(ZERO) ## DeepSpeed's ZeRO on two processes (a minute or two)
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -rs -k zero tests/training/parallel/test_zero_lora.py tests/training/tasks/test_preservation_runs.py

test-triton: $(TRITON) ## the Triton kernel: numbers in its interpreter, machine code for six cards (three minutes)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -q -rs tests/precision/test_triton_product.py

test-faults: $(STAMP) ## kill runs at 300 points, spoil their files, and see that nothing is lost (some fifteen minutes)
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(PY) -m tests.faults.suite --faults 300

fuzz: $(STAMP)  ## feed readers and tools thousands of broken inputs (a quarter of an hour)
	FUZZ_CASES=10000 OMP_NUM_THREADS=1 $(PY) -m pytest -q --timeout 1800 tests/fuzz

# For Python 3.12 on x86-64. What has to be carried to such a machine, these wheels and the tracked files, stays small.
gpu-bundle: $(STAMP) ## pack what bench-gpu needs on a GPU machine without a network
	rm -rf $(BUNDLE)
	$(PY) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
		--platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --dest $(BUNDLE) -r requirements-gpu.txt
	@wheels=$$(cat $(BUNDLE)/*.whl | wc -c); all=$$((wheels + $$(git ls-files -z | xargs -0 cat | wc -c))); \
	echo "bundle: $$((wheels >> 10)) KiB of 20480; with the tracked files: $$((all >> 10)) KiB of 61440"; \
	[ $$wheels -le $$((20 << 20)) ] && [ $$all -le $$((60 << 20)) ] || { echo "error: too large"; exit 2; }
	@printf '%s\n' "On that machine, with torch, transformers, accelerate and peft: make bench-gpu, or" \
		"  python3 -m pip install --no-index --no-deps --target $(BUNDLE)/site $(BUNDLE)/*.whl &&" \
		"  PYTHONPATH=$(BUNDLE)/site python3 bench/gpu.py" | tee $(BUNDLE)/README

# Where gpu-bundle's wheels are, the python3 that has torch runs it, with them beside its packages.
bench-gpu: $(if $(WHEELS),$(BUNDLE)/site,$(STAMP)) ## training steps on the GPU beside diffusers + peft (eight minutes)
	$(if $(WHEELS),PYTHONPATH=$(BUNDLE)/site python3,$(PY)) bench/gpu.py --json output/gpu.json

$(BUNDLE)/site: $(WHEELS)
	python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --upgrade --target $@ $^
	@touch $@

check: $(STAMP) ## lint, format, types, direction of imports
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy library networks
	$(VENV)/bin/lint-imports

format: $(STAMP) ## let ruff rewrite what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(STAMP)  ## write the JSON schemas, the pages of options and the drawing of the layers from the code
	$(PY) dev/write_config_docs.py
	$(PY) dev/draw_structure.py

clean:          ## remove everything a run or the set-up made
	rm -rf $(VENV) output .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
