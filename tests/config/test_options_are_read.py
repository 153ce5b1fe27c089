"""No option is taken and ignored: each key of every schema is read by the code that runs, not by checks alone."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from library.config.model_types import MODEL_TYPES
from library.config.scripts import LANGUAGE_LORA, LLM, LORA, Script, fields

ROOT = Path(__file__).resolve().parents[2]


@cache
def names_read() -> frozenset[str]:
    """Return every attribute that is read outside the schemas and their checks."""
    found: set[str] = set()
    files = [ROOT / "train_lora.py", ROOT / "train_llm.py", *(ROOT / "library").rglob("*.py")]
    files += (ROOT / "networks").rglob("*.py")
    for file in files:
        if file.parent == ROOT / "library" / "config":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
    return frozenset(found)


# Read within its section, by the method that the code outside calls instead.
WITHIN = {"dp": "replicas", "microbatches": "pieces"}


@pytest.mark.parametrize("script", [LORA, LANGUAGE_LORA, LLM], ids=["image LoRA", "language LoRA", "pretraining"])
def test_every_option_is_read_somewhere(script: Script) -> None:
    read = names_read()
    by_family = (
        {key for row in MODEL_TYPES.values() for key in row.keys} if "option" in read else set()
    )  # files.Part.option
    unread = {key for key in fields(script) if key not in read | by_family and WITHIN.get(key) not in read}
    assert not unread


def test_an_option_that_nothing_reads_would_be_found() -> None:
    assert "an_option_that_nothing_reads" not in names_read()
    assert {"learning_rate", "gradient_checkpointing"} <= names_read()
