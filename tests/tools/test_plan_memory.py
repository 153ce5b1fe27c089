"""tools/plan_memory.py: what it counts of the built-in model, what it says without a compiler, what it refuses."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path

import pytest
from library.training.memory.plan import RESERVE, fits, plan_memory, remedies

from library.config import load_config
from library.errors import UserError
from library.training.memory import plan as plans
from library.training.memory.budget import GIB
from library.training.memory.fake_cuda import library_path
from tests.forked import run_script
from tests.runs import ROOT

DEMO = ["--config_file", str(ROOT / "configs/demo.toml"), "--mixed_precision", "bf16"]


def test_weights_and_moments_are_those_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the run, its phases; weights as many as the header has, the LoRA's moments twice its weights."""
    try:
        library_path()
    except UserError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(ROOT)
    done = run_script(
        ROOT / "tools/plan_memory.py",
        ["configs/demo.toml", "--mixed_precision", "bf16", "--picture", str(tmp_path / "plan.png"),
         "--save_to", str(tmp_path / "plan.json"), "--tensors"],
        ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    phases = found["phases"]
    assert list(phases) == ["encoding images", "encoding captions", "loading", "first step", "step", "sampling"]
    file = next((ROOT / "assets/tiny-flux/transformer").glob("*.safetensors"))
    with open(file, "rb") as opened:
        header = json.loads(opened.read(struct.unpack("<Q", opened.read(8))[0]))
    numbers = sum(
        entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"
    )
    assert phases["step"]["weights"] == pytest.approx(numbers, rel=0.05)  # each tensor in blocks of 512 bytes
    assert phases["step"]["optimizer"] == pytest.approx(2 * phases["step"]["LoRA"], rel=0.05)
    assert found["peak"] >= max(sum(parts.values()) for parts in phases.values())
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "lora.py" in done.stdout  # the tensors at the peak, and where they were made


def test_without_a_compiler_formulas_answer_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise UserError("no C++ compiler")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(plans, "library_path", none)
    plan = plan_memory(load_config(DEMO))
    assert plan.source == "formulas"
    assert plan.notes[0] == "no C++ compiler"
    assert 2**20 < plan.peak < GIB
    assert fits(plan, 2 * GIB)
    assert not fits(plan, GIB)


def test_what_is_proposed_takes_something_off_a_phase_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the step alone is too much, nothing is done to the text encoder; where captions are, that comes first."""
    try:
        library_path()
    except UserError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(ROOT)
    config = load_config(DEMO)
    held = {phase: sum(parts.values()) for phase, parts in plan_memory(config).phases().items()}
    between = RESERVE + (held["encoding captions"] + held["step"]) // 2
    (enough,) = remedies(config, between)
    assert list(enough.lines.values()) == ["gradient_checkpointing = true"]
    assert enough.config.training.gradient_checkpointing
    assert fits(enough.plan, between)
    (first,) = itertools.islice(remedies(config, RESERVE + held["encoding captions"] - 2**20), 1)
    assert list(first.lines.values()) == ["fp8_text_encoder = true"]
    assert sum(first.plan.phases()["encoding captions"].values()) < held["encoding captions"]
    assert sum(first.plan.phases()["step"].values()) == held["step"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["configs/llm/llama_lora.toml"], "trains a language model; ask tools/plan_parallel.py"),
        (["configs/demo.toml", "--shard", "2"], "split among GPUs; ask tools/plan_parallel.py"),
        (["configs/demo.toml", "--network_dimm", "4"], "did you mean 'network_dim'?"),
        (["nowhere.toml"], "no such file"),
        (["configs/demo.toml", "--gpu_memory", "-3"], "--gpu_memory"),
    ],
)
def test_what_it_cannot_count_is_refused_in_a_line(words: list[str], said: str) -> None:
    done = run_script(ROOT / "tools/plan_memory.py", words, ROOT)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
