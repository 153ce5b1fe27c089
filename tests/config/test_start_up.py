"""A configuration is read, and refused, without importing what only training needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from library.config.load import _parser
from library.config.scripts import LANGUAGE_LORA, LLM, LORA, Script

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "numpy", "diffusers", "transformers", "accelerate", "bitsandbytes", "peft", "PIL", "matplotlib"}
# Runs a script as a user does, and says at its end what was imported and what it took.
PROBE = """
import json, resource, runpy, sys, time
began = time.process_time()
from pydantic import BaseModel, Field
spent = time.process_time() - began
script, sys.argv = sys.argv[1], sys.argv[1:]
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as end:
    code = end.code
    taken = time.process_time() - began
    modules = sorted({name.split(".")[0] for name in sys.modules})
    print("\\n" + json.dumps({"code": code, "pydantic": spent, "all": taken, "modules": modules}))
"""


def _probe(*words: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=240
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("script", [LORA, LANGUAGE_LORA, LLM], ids=lambda script: script.training)
def test_help_names_no_default_that_is_none(script: Script[Any]) -> None:
    said = " ".join(_parser(script).format_help().split())
    assert "None" not in said
    assert "[]" not in said


@pytest.mark.parametrize("script", ["train_lora.py", "train_llm.py"])
@pytest.mark.parametrize(
    ("words", "code"),
    [(["--help"], 0), (["--netwrk_dim", "4"], 2), (["--learning_rate", "much"], 2)],
    ids=["help", "wrong key", "wrong value"],
)
def test_nothing_heavy_is_imported_before_the_configuration_is_complete(
    script: str, words: list[str], code: int
) -> None:
    found = _probe(script, *words)
    assert found["code"] == code
    assert not HEAVY & set(found["modules"])  # type: ignore[call-overload]
    # Measured: 0.1 s for pydantic, 0.3 s for all; torch alone would be 2 s. Both scale with the machine.
    assert float(found["all"]) < 10 * float(found["pydantic"])  # type: ignore[arg-type]
