"""docs/metrics.md names every key that a run writes to metrics.jsonl, and none that no run writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import chat_runs, pretraining_runs, runs

ROOT = Path(__file__).resolve().parents[2]
# Written under more processes, on a GPU of known speed, and after a step that is not finite.
ELSEWHERE = {"<key>/<rank>", "mfu", "updates_dropped"}
HEADING = "| key | line | runs | unit | meaning |"


def documented(kind: str) -> dict[str, str]:
    """Return the keys that the page says runs of ``kind`` write, each with its line."""
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8").partition(HEADING)[2]
    rows = (re.split(r" ?\| ?", line)[1:6] for line in text.splitlines() if line.startswith("| `"))
    return {key.strip("`"): line for key, line, of, _, _ in rows if of == "all" or kind in of.split(", ")}


def written(folder: Path) -> dict[str, str]:
    """Return the keys of a run's metrics, parameter groups as the page has them, each with its line."""
    found: dict[str, str] = {}
    for values in runs.metrics(folder):
        line = "validation" if "val_loss" in values else "training"
        keys = {re.sub(r"^(lr|d|d\*lr)/.+$", r"\1/<group>", key) for key in values}
        keys = {re.sub(r"^loss/sigma_.+$", "loss/sigma_<range>", key) for key in keys}
        keys = {re.sub(r"^val_loss/sigma_.+$", "val_loss/sigma_<sigma>", key) for key in keys}
        keys = {re.sub(r"^val_rewards/.+$", "val_rewards/<name>", key) for key in keys}
        keys = {re.sub(r"^update_norm/.+$", "update_norm/<kind>", key) for key in keys}
        found |= {key: "all" if found.get(key, line) != line else line for key in keys}
    return found


@pytest.mark.parametrize("kind", ["images", "chats", "pairs", "pretraining"])
def test_the_page_has_the_keys_that_a_run_writes(kind: str, tmp_path: Path) -> None:
    prodigy = {"optimizer_type": "Prodigy", "learning_rate": 1.0, "max_train_steps": 2, "validate_every_n_steps": 1}
    output = tmp_path / "output"
    if kind == "images":
        dataset = runs.write_dataset(tmp_path / "data", text="validation_split = 0.25")
        (prompts := tmp_path / "general.txt").write_text("a bow --s 2\n")
        runs.run(runs.write_base(tmp_path / "base"), dataset, output, **prodigy, general_prompts=prompts)
    elif kind == "chats":
        place = chat_runs.write_place(tmp_path)
        chat_runs.run(place, output, validation_split=0.25, **prodigy)
    elif kind == "pairs":
        place = chat_runs.write_place(tmp_path)
        chat_runs.run(place, output, validation_split=0.25, **chat_runs.preferring(place), **prodigy)
    else:
        pretraining_runs.run(pretraining_runs.write_corpus(tmp_path), output, lr_warmup_steps=0, **prodigy)
    page = documented(kind)
    assert written(output) == {key: line for key, line in page.items() if key not in ELSEWHERE}


def test_keys_that_other_runs_write_are_named_in_the_code_as_on_the_page() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "library/training").rglob("*.py"))
    assert documented("pretraining").keys() >= ELSEWHERE
    assert all(f'"{key}"' in code for key in ELSEWHERE - {"<key>/<rank>"})
    assert 'f"{key}/{rank}"' in code
