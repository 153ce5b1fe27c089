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
from accelerate.state import AcceleratorState

import tools.demo_llm as demo_llm
from library.checksums import read_checked_json
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
