"""tools/plan_memory.py: what it counts of the built-in model, what it keeps, what it refuses."""

from __future__ import annotations

import json
import shutil
import struct
from functools import partial
from pathlib import Path

import pytest
import torch

from library.config import load_config
from library.errors import UserError
from library.training.memory import dry_run
from library.training.memory.dry_run import plan_memory
from library.training.memory.policy import remedies
from library.training.tasks.image_lora import ImageLora
from tests.cuda.device import FakeDevice
from tests.forked import run_script
from tests.runs import ROOT, arguments, call, write_dataset
from tests.tiny import tiny_flux_pipeline
from tools import plan_memory as tool

DEMO = ["--config_file", str(ROOT / "configs/demo.toml"), "--mixed_precision", "bf16"]


@pytest.fixture
def counted(device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The flags of a run on a model of one double and one single block, each of whose tensors fills 512 bytes."""
    monkeypatch.setattr(dry_run, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(dry_run, "device_processes", device.processes)
    sizes = {"heads": 4, "head_dim": 64, "double_blocks": 1, "single_blocks": 1}
    model = tiny_flux_pipeline(tmp_path / "flux", dtype=torch.bfloat16, **sizes)
    return arguments(model, write_dataset(tmp_path / "data"), tmp_path / "output", mixed_precision="bf16")


def test_weights_and_moments_are_those_of_the_files(counted: list[str], tmp_path: Path) -> None:
    """Of the run, its phases; weights as many as the header has, the LoRA's moments twice its weights."""
    (tmp_path / "run.toml").write_text('[sampling]\nsample_prompts = ["a disc --w 64 --h 64"]\n')
    call(tool, tmp_path / "run.toml", *counted, "--save_to", tmp_path / "plan.json")
    found = json.loads((tmp_path / "plan.json").read_text())
    phases = found["phases"]
    assert list(phases) == ["encoding images", "encoding captions", "loading", "first step", "step", "sampling"]
    file = next((tmp_path / "flux/transformer").glob("*.safetensors"))
    with open(file, "rb") as opened:
        header = json.loads(opened.read(struct.unpack("<Q", opened.read(8))[0]))
    numbers = sum(
        entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"
    )
    assert phases["step"]["weights"] == pytest.approx(numbers, rel=0.05)  # each tensor in blocks of 512 bytes
    assert phases["step"]["optimizer"] == pytest.approx(2 * phases["step"]["LoRA"], rel=0.05)
    assert found["peak"] >= max(sum(parts.values()) for parts in phases.values())


def test_what_was_counted_is_kept_for_runs_that_differ_in_the_rate_alone(counted: list[str], tmp_path: Path) -> None:
    traced = plan_memory(ImageLora, load_config(counted))
    (kept,) = (tmp_path / "plans").iterdir()
    written = kept.stat().st_mtime_ns
    other = ["--learning_rate", "3e-5", "--seed", "5", "--output_name", "other"]
    assert plan_memory(ImageLora, load_config([*counted, *other])) == traced
    assert [each.stat().st_mtime_ns for each in (tmp_path / "plans").iterdir()] == [written]
    assert plan_memory(ImageLora, load_config([*counted, "--network_dim", "32"])).step["LoRA"] > traced.step["LoRA"]

    kept.write_bytes(kept.read_bytes().replace(b"1", b"2"))
    assert plan_memory(ImageLora, load_config(counted)) == traced, "damaged ones are counted again"


def test_without_a_card_and_a_compiler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match="no C\\+\\+ compiler for the fake CUDA device; install g\\+\\+"):
        plan_memory(ImageLora, load_config(DEMO))


@pytest.mark.slow
def test_what_makes_a_run_fit_is_named(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "device_processes", device.processes)
    monkeypatch.chdir(ROOT)
    config = load_config(DEMO)
    plan = plan_memory(ImageLora, config)
    held = {phase: sum(parts.values()) for phase, parts in plan.phases.items()}
    room = (held["encoding captions"] + held["step"]) // 2
    (enough,) = remedies(config, plan, room, partial(plan_memory, ImageLora))
    assert list(enough.lines.values()) == ["gradient_checkpointing = true"]
    assert enough.config.training.gradient_checkpointing
    assert enough.plan.peak <= room


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["configs/llm/llama_lora.toml"], "trains a language model, which is not counted; give an image LoRA's file"),
        (["configs/demo.toml", "--shard", "2"], "split among GPUs; count it without a layout"),
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
