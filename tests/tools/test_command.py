"""What the tools share: help comes before torch is imported, and flags offer what the library takes."""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from library.config.run_schema import SAVE_FORMATS, SavingConfig
from library.config.schema import PrecisionConfig
from library.errors import UserError
from library.models.registry import lora_targets
from library.precision.fp8_numbers import FORMATS
from library.precision.names import FORMAT_NAMES
from library.precision.recipe import KINDS
from networks.files.layouts import PRECISIONS
from networks.merging import RANK_RULES
from networks.merging.low_rank import RankRule
from tests.runs import ROOT
from tools.command import add_model_type, choices, lora_source, tool_parser

TOOLS = sorted(path.stem for path in (ROOT / "tools").glob("[a-z]*.py") if path.stem != "command")
HEAVY = ("torch", "numpy", "transformers", "diffusers", "accelerate", "matplotlib", "PIL")
# Runs tools, each in a fork of a process that has imported what all of them import first.
HELP = """
import json, os, runpy, sys
import library.config.schema
folder, heavy, *tools = sys.argv[1:]
for tool in tools:
    for word in ("--help", "--no_such_flag"):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        sys.argv = [f"tools/{tool}.py", word]
        for descriptor, name in enumerate(("out", "err"), 1):
            os.dup2(os.open(f"{folder}/{tool}{word}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        code = None
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            code = end.code
        found = [name for name in heavy.split() if name in sys.modules]
        with open(f"{folder}/{tool}{word}.json", "w") as file:
            json.dump([code, found], file)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
"""


def test_help_and_a_mistyped_flag_are_answered_before_torch_is_imported(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    command = [sys.executable, "-c", HELP, str(tmp_path), " ".join(HEAVY), *TOOLS]
    subprocess.run(command, cwd=ROOT, check=True)
    for tool, (word, code) in product(TOOLS, (("--help", 0), ("--no_such_flag", 2))):
        with subtests.test(f"{tool} {word}"):
            said, error = ((tmp_path / f"{tool}{word}.{name}").read_text() for name in ("out", "err"))
            assert json.loads((tmp_path / f"{tool}{word}.json").read_text()) == [code, []], error
            assert "usage:" in said if code == 0 else error.startswith(("error: ", "usage: ")), error
            if code == 0:
                purpose = ast.get_docstring(ast.parse((ROOT / f"tools/{tool}.py").read_text()))
                assert purpose is not None
                assert purpose.splitlines()[0] in said


def test_tools_that_take_a_trainings_options_show_their_own_first_and_say_where_the_others_are() -> None:
    command = [sys.executable, "tools/cache_dataset.py", "--config_file", "no.toml", "--help"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  (--\w+)", text, re.MULTILINE) == []
    assert "train_lora.py --help" in text
    assert (ROOT / re.findall(r"docs/\w+\.md", text)[0]).is_file()


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
