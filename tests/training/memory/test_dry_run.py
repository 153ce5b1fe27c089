"""A step counted before the run, and running out of memory for real: a process with a limit on its address space."""

from __future__ import annotations

import re
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import library.training.memory.dry_run as dry_run
import library.training.memory.policy as policy
from library.errors import UserError
from library.training.memory.policy import MemoryPlan
from tests.cuda.device import FakeDevice
from tests.processes import run_command
from tests.runs import ROOT, arguments, largest_difference, lora, run, write_dataset

# train_lora.py, with the room that is left after the first step of the run limited to so many MiB
LIMITED = """
import resource, sys
from library.training.run import Run
after_step, room = Run.after_step, int(sys.argv.pop(1))
def limit(self):
    after_step(self)
    pages = int(open("/proc/self/statm").read().split()[0])
    most = pages * resource.getpagesize() + room * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
Run.after_step = limit
from train_lora import main
main()
"""
DOES_NOT_FIT = "memory dry run: a step of 1 at 256x256 needs about .* of 1 MiB; "


def two_sizes(folder: Path, side: int = 256) -> Path:
    """Seven images of 64 x 64 and, in a dataset of its own, a large one."""
    toml = write_dataset(folder, images=7)
    write_dataset(folder / "large", images=1, size=(side, side))
    text = toml.read_text()
    more = f'[[datasets]]\nresolution = {side}\n[[datasets.subsets]]\nimage_dir = "large/images"\n'
    toml.write_text(text + more)
    return toml


@pytest.fixture
def counted(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is counted in a process that has everything imported."""
    monkeypatch.setattr(dry_run, "device_processes", device.processes)


@pytest.mark.usefixtures("counted")
def test_what_does_not_fit_is_told_and_refused_before_anything_is_cached(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, settings = two_sizes(tmp_path), {"mixed_precision": "bf16", "max_train_steps": 1}
    with monkeypatch.context() as patch:
        patch.setattr(dry_run, "available_bytes", lambda device: 2**20)  # a device of 1 MiB
        # each takes a count: test_policy has them all
        patch.setattr(dry_run, "remedies", lambda *given, **more: islice(policy.remedies(*given, **more), 2))
        with pytest.raises(UserError, match=DOES_NOT_FIT) as caught:
            run(base, data, tmp_path / "out", **settings, memory_dry_run=True)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.rglob("*.safetensors")) == []
    printed = " ".join(capsys.readouterr().out.split())
    assert "with gradient_checkpointing = true: about" in printed
    assert "memory dry run: a step of 1 at 256x256 takes " in printed
    # what the LoRA takes is known from its shapes; each tensor lies in blocks of 512 bytes
    found = re.search(r"LoRA (\d+) MiB, gradients (\d+) MiB, optimizer (\d+) MiB", printed)
    assert found is not None
    network = run(base, data, tmp_path / "out", **settings).task.network
    mib = sum(-(-p.numel() * 4 // 512) for p in network.parameters()) / 2**11
    assert [int(each) for each in found.groups()] == [round(mib), round(mib), round(2 * mib)]


def test_what_does_not_fit_whatever_is_chosen_is_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = MemoryPlan("fake device", {"step": {"weights": 2**21, "activations": 2**20}}, "1 at 256x256", (0, 0))
    monkeypatch.setattr(dry_run, "plan_memory", lambda build, config: plan)
    monkeypatch.setattr(dry_run, "available_bytes", lambda device: 2**20)
    with pytest.raises(UserError, match=DOES_NOT_FIT + "set fp8_scaled = true") as caught:
        run(base, two_sizes(tmp_path), tmp_path / "out", memory="auto")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_a_run_that_did_not_ask_goes_on_where_a_step_cannot_be_counted(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> MemoryPlan:
        raise UserError("the memory could not be counted (a fault)")

    monkeypatch.setattr(dry_run, "plan_memory", fails)
    monkeypatch.setattr(dry_run, "_is_due", lambda *_: True)
    run(base, two_sizes(tmp_path), tmp_path / "out", max_train_steps=1)
    printed = " ".join(capsys.readouterr().out.split())
    assert "memory dry run: left out (the memory could not be counted (a fault))" in printed
    assert (tmp_path / "out" / "lora.safetensors").exists()
    with pytest.raises(UserError, match="could not be counted"):
        run(base, two_sizes(tmp_path / "more"), tmp_path / "asked", max_train_steps=1, memory_dry_run=True)


@pytest.mark.usefixtures("counted")
def test_the_choice_is_made_by_counting_and_the_lora_is_the_same(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"max_train_steps": 2, "network_dropout": 0.1, "mixed_precision": "bf16"}
    data = two_sizes(tmp_path, 512)
    run(base, data, tmp_path / "plain", **settings)
    monkeypatch.setattr(policy, "_WORTH_KEEPING", 1)
    size, printed = 2**40, {}
    for name in ("much", "little"):
        monkeypatch.setattr(dry_run, "available_bytes", lambda device, size=size: size)
        run(base, data, tmp_path / name, memory="auto", **settings)
        printed[name] = " ".join(capsys.readouterr().out.split())
        found, expected = lora(tmp_path / name), lora(tmp_path / "plain")
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        takes = re.search(r"; a step of 1 at 512x512 takes (\d+) MiB", printed[name])
        assert takes is not None
        size = int(takes[1]) * 2**20  # 5 % of it are left free
    assert "memory: nothing recomputed;" in printed["much"]
    assert "memory: gradient_checkpointing = true" in printed["little"]


def test_running_out_of_memory_names_the_batch_and_what_to_change(base: Path, tmp_path: Path) -> None:
    data = two_sizes(tmp_path, 768)
    settings = {"max_train_steps": 16, "save_state": True, "seed": 1}
    # cached by another process: what the encoder gave back to this one's heap would be room that no limit sees
    run(base, data, tmp_path / "first", max_train_steps=1)
    flags = arguments(base, data, tmp_path / "out", **settings)
    done = run_command([sys.executable, "-c", LIMITED, "28", *flags], ROOT, {"MALLOC_ARENA_MAX": "1"})
    assert done.returncode == 2, done.stderr[-2000:]
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("error: out of memory in step ")
    assert "the batch of 1 at 768x768" in message
    assert "large/images/0.png" in message
    assert "set gradient_checkpointing = true" in message
    assert "Traceback" not in done.stderr
    step = int(message.split("in step ")[1].split(":")[0])
    if step > 1:
        saved = tmp_path / "out" / f"lora-step{step - 1:08d}.safetensors"
        assert saved.exists()
        run(base, data, tmp_path / "clean", max_train_steps=step - 1, seed=1)
        # On some CPUs MKL's order of summing follows where memory lies, which differs between processes: fp32 rounding.
        assert largest_difference(lora(tmp_path / "out", saved.stem), lora(tmp_path / "clean")) < 1e-5
