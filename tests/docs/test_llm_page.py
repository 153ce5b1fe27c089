"""The commands of docs/llm.md in their order, made short; and the ready configs of train_llm.py."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from contextlib import chdir
from pathlib import Path
from unittest import mock

import pytest
from accelerate.state import AcceleratorState

from library.config.load import load_for, names_language_model
from library.config.scripts import LANGUAGE_LORA, LLM
from library.models.llm.spec import PRESETS
from tests.curves import without_curves
from tests.llm.talkers import write_chat_model
from tests.tools.test_gguf_tools import in_gguf

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/llm.md").read_text(encoding="utf-8")
SMALL = "--max_train_steps 3 --width 48 --heads 4 --layers 2 --context 32 --lr_warmup_steps 1 --sample_tokens 4"
SHORT = {
    "tools/prepare_text.py": "--validation_share 0.2",
    "train_llm.py": f"{SMALL} --save_every_n_steps 2 --save_state",
    "instruction tuning": "--max_train_steps 3 --max_length 32 --sample_prompts hi --sample_tokens 4",
    "tools/generate.py": "--max_new_tokens 4",
    "train_lora.py": "--max_length 32 --sample_prompts hi --sample_tokens 4 --mixed_precision no --max_train_epochs 4",
}


def test_the_commands_lead_from_texts_to_a_model_that_writes(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "my_texts").mkdir()
    for i in range(30):
        (tmp_path / "my_texts" / f"{i}.txt").write_text(f"Once upon a time there were {i} cats. " * 6)
    question = {"ctx": "Once upon a time", "endings": ["there were 3 cats.", "cats."], "label": 0}
    (tmp_path / "hellaswag_val.jsonl").write_text(json.dumps(question))
    said = [{"instruction": f"How many cats? {i}", "output": f"{i} cats."} for i in range(30)]
    (tmp_path / "my_conversations.jsonl").write_text("\n".join(map(json.dumps, said)))
    commands = re.findall(r"^\.venv/bin/python (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 13
    in_gguf(write_chat_model(tmp_path / "talker", width=64), tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
    for command in commands:
        script, *rest = shlex.split(command.replace("8192", "300"))
        AcceleratorState._reset_state(reset_partial_state=True)
        kind = "instruction tuning" if script == "train_llm.py" and "--train_data" in rest else script
        argv = [script, *rest, *SHORT.get(kind, "").split()]
        with chdir(tmp_path), mock.patch.object(sys, "argv", argv), without_curves():  # plot_lr.py draws them
            runpy.run_path(str(ROOT / script), run_name="__main__")
    assert (tmp_path / "output/llama_tiny/llama_tiny/model.safetensors").stat().st_size > 0
    assert (tmp_path / "output/llama_tiny/llama_tiny-step00000002-state/position.json").is_file()
    assert (tmp_path / "output/llama_tiny/lr.svg").is_file()
    assert (tmp_path / "output/llama_lora/assistant/adapter_config.json").is_file()
    assert (tmp_path / "output/llama_chat/assistant-best/generation_config.json").is_file()
    assert (tmp_path / "output/my_assistant/model.safetensors").is_file()
    for name in ("SmolLM2-135M-Instruct", "extended"):
        assert (tmp_path / "models" / name / "chat_template.jinja").is_file()
    assert json.loads((tmp_path / "scores.json").read_text())["perplexity"]["data/my_texts"]["tokens"] > 0


@pytest.mark.parametrize("config", sorted((ROOT / "configs/llm").glob("*.toml")), ids=lambda path: path.stem)
def test_every_ready_config_is_valid(config: Path) -> None:
    words = ["--config_file", str(config)]
    if names_language_model(words):
        assert load_for(LANGUAGE_LORA, words).chat.train_data
    else:
        read = load_for(LLM, words)
        assert read.model.init_from is not None or read.model.preset in PRESETS
    schema_line = config.read_text(encoding="utf-8").splitlines()[0]
    assert (config.parent / schema_line.removeprefix("#:schema ")).is_file()


def test_the_schema_and_the_options_page_are_up_to_date() -> None:
    from dev.write_config_docs import json_schema, options_page

    for path, text in (
        ("configs/llm/train_llm.schema.json", json_schema(LLM)),
        ("docs/llm_options.md", options_page(LLM)),
        ("configs/llm/train_lora.schema.json", json_schema(LANGUAGE_LORA)),
        ("docs/llm_lora_options.md", options_page(LANGUAGE_LORA)),
    ):
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path}: run make docs"
