"""A sample of the fault suite; ``make test-faults`` runs the whole of it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.forked import run_script

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_killed_anywhere_goes_on_to_the_same_lora() -> None:
    # in a process of its own: one that has trained before must not be forked
    environment = {"TOKENIZERS_PARALLELISM": "false"}
    words = ["--faults", "3", "--scenarios", "adamw", "pretraining"]  # images with workers, and a language model
    done = run_script(ROOT / "tests/faults/suite.py", words, ROOT, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    survived = re.search(r"^(\d+) faults survived", done.stdout, re.MULTILINE)
    assert survived is not None, done.stdout
    assert int(survived[1]) >= 4
