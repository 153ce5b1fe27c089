"""What the tools share: help comes before torch is imported, and flags offer what the library takes."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from library.conditions import ConditionKind
from library.config.schema import PrecisionConfig, SavingConfig
from library.errors import UserError
from library.models.registry import lora_targets
from library.precision.fp8_numbers import FORMATS
from library.precision.names import FORMAT_NAMES
from library.precision.recipe import KINDS
from networks.files.layouts import PRECISIONS, SAVE_FORMATS
from networks.merging import RANK_RULES
from networks.merging.low_rank import RankRule
from tests.runs import ROOT
from tools import check_dataset
from tools.command import add_model_type, choices, lora_source, tool_parser

TOOLS = sorted(path.stem for path in (ROOT / "tools").glob("[a-z]*.py") if path.stem != "command")
HEAVY = ("torch", "numpy", "transformers", "diffusers", "accelerate", "matplotlib", "PIL")
HELP = """
import runpy, sys
heavy, *sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print([name for name in heavy.split() if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize("tool", TOOLS)
def test_help_and_a_mistyped_flag_are_answered_before_torch_is_imported(tool: str) -> None:
    for words, code in ((["--help"], 0), (["--no_such_flag"], 2)):
        command = [sys.executable, "-c", HELP, " ".join(HEAVY), f"tools/{tool}.py", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert "usage:" in done.stdout if code == 0 else done.stderr.startswith(("error: ", "usage: ")), done.stderr
        assert done.stderr.splitlines()[-1] == "[]"
        assert "Traceback" not in done.stderr
        if code == 0:
            purpose = ast.get_docstring(ast.parse((ROOT / f"tools/{tool}.py").read_text()))
            assert purpose is not None
            assert purpose.splitlines()[0] in done.stdout


def test_tools_that_take_a_trainings_options_show_their_own_first_and_say_where_the_others_are() -> None:
    command = [sys.executable, "tools/paint_regularisation.py", "--config_file", "no.toml", "--help"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  (--\w+)", said, re.MULTILINE) == ["--save_to"]
    assert "train_lora.py --help" in said
    assert (ROOT / re.findall(r"docs/\w+\.md", said)[0]).is_file()


@pytest.mark.parametrize("tool", ["precision_report", "quantize_model"])
def test_numbers_that_no_model_takes_are_refused(tool: str) -> None:
    command = [sys.executable, f"tools/{tool}.py", "--guidance_scale", "1e30"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, "'1e30' is no finite number of at least 0, at most 1000" in done.stderr) == (2, True)


def test_flags_offer_what_the_library_takes() -> None:
    parser = argparse.ArgumentParser()
    add_model_type(parser, "")
    (flag,) = (action for action in parser._actions if action.dest == "model_type")
    assert set(flag.choices or ()) == set(lora_targets())
    assert choices(SavingConfig, "save_format") == list(SAVE_FORMATS)
    assert choices(SavingConfig, "save_precision") == list(PRECISIONS)
    assert tuple(choices(PrecisionConfig, "fp8_exclude")) == tuple(KINDS)
    assert tuple(fp8.name for fp8 in FORMATS) == FORMAT_NAMES
    assert get_args(RankRule) == RANK_RULES
    (flag,) = (action for action in check_dataset.parser()._actions if action.dest == "conditioning")
    assert tuple(flag.choices or ()) == get_args(ConditionKind)


def test_a_strength_that_is_no_number_is_told() -> None:
    with pytest.raises(UserError, match=r"--lora a.safetensors:strong: 'strong' is not a number; write"):
        lora_source("a.safetensors:strong")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--top=--", "command line: argument --top: expected a value, not '--'; see --help"),
        ("--save_to=", "command line: argument --save_to: the path is empty; write one, or leave the flag out"),
    ],
)
def test_a_flag_with_nothing_behind_it_is_told(word: str, message: str) -> None:
    parser = tool_parser("")
    parser.add_argument("--top", type=int)
    parser.add_argument("--save_to", type=Path)
    with pytest.raises(UserError) as caught:
        parser.parse_args([word])
    assert str(caught.value).startswith(message)
