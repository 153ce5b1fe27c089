"""What the tools share: help comes before torch is imported, and flags offer what the library takes."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from library.config.schema import SavingConfig
from library.errors import UserError
from library.models.registry import lora_targets
from networks.files.adapters import PRECISIONS, SAVE_FORMATS
from tests.runs import ROOT
from tools.command import add_model_type, choices, lora_source

LIGHT = (
    "cache_dataset",
    "convert_lora",
    "demo_fp8",
    "ema_lora",
    "extract_lora",
    "lr_range_test",
    "plot_lr",
    "refit_lora",
)
HELP = """
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize("tool", LIGHT)
def test_help_is_given_before_torch_is_imported(tool: str) -> None:
    command = [sys.executable, "-c", HELP, f"tools/{tool}.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
    assert done.stderr.split()[-1] == "False"


def test_flags_offer_what_the_library_takes() -> None:
    parser = argparse.ArgumentParser()
    add_model_type(parser, "")
    (flag,) = (action for action in parser._actions if action.dest == "model_type")
    assert set(flag.choices or ()) == set(lora_targets())
    assert choices(SavingConfig, "save_format") == list(SAVE_FORMATS)
    assert choices(SavingConfig, "save_precision") == list(PRECISIONS)


def test_a_strength_that_is_no_number_is_told() -> None:
    with pytest.raises(UserError, match=r"--lora a.safetensors:strong: 'strong' is not a number; write"):
        lora_source("a.safetensors:strong")
