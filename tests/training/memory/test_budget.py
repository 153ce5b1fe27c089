"""``memory = "auto"`` on devices of several sizes: the first policy that fits, and the run that it gives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import library.training.memory.dry_run as dry_run
from library.config import load_config
from library.config.schema import TrainingConfig
from library.errors import UserError
from library.training.memory.budget import MemoryEstimate
from library.training.memory.dry_run import Measured, choose
from tests.runs import arguments, lora, run
from tests.training.memory.test_dry_run import two_sizes

MIB = 2**20


class Device:
    """Stands for the dry run of a model of 20 blocks of 40 MiB: 800 MiB of weights, 1000 of activations.

    Recomputing needs 150 MiB of them, 100 of which are the blocks' inputs. Sums are done by hand below.
    """

    def __init__(self, size: int, kind: str = "cuda", compiled: bool = False) -> None:
        self.limit, self.tried = size * MIB, list[TrainingConfig]()
        self.what = "1 at 64x64"
        config = SimpleNamespace(training=TrainingConfig(), accelerate=SimpleNamespace(torch_compile=compiled))
        self.task = SimpleNamespace(accelerator=SimpleNamespace(device=torch.device(kind)), config=config)

    def policy(self, training: TrainingConfig) -> Measured:
        self.tried.append(training)
        activations = 150 + training.activation_budget_mb if training.gradient_checkpointing else 1000
        activations -= 100 * training.cpu_offload_checkpointing
        weights = 800 - 40 * training.blocks_to_swap
        memory = MemoryEstimate(weights * MIB, 0, 0, 0, 0, activations * MIB)
        swappable = 18 if self.task.accelerator.device.type == "cuda" else 0
        return Measured(memory, memory.total <= self.limit, swappable, 40 * MIB)

    refuse = dry_run.MemoryProbe.refuse


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (2000, {}),  # 1800 of 1900
        (1500, {"gradient_checkpointing": True, "activation_budget_mb": 475}),  # 0.95 * 1500 - 950
        (1010, {"gradient_checkpointing": True}),  # 9 MiB are not worth it
        (950, {"gradient_checkpointing": True, "cpu_offload_checkpointing": True}),  # 850 of 902
        (600, {"gradient_checkpointing": True, "cpu_offload_checkpointing": True, "blocks_to_swap": 10}),  # 380 over
        (150, {"gradient_checkpointing": True, "cpu_offload_checkpointing": True, "blocks_to_swap": 18}),
    ],
)
def test_the_fastest_policy_that_fits_is_taken(size: int, expected: dict[str, object]) -> None:
    device = Device(size)
    chosen, measured = choose(device)  # type: ignore[arg-type]
    found = chosen.model_dump(exclude_defaults=True)
    assert found == expected
    assert measured.memory is not None
    assert measured.memory.total <= device.limit
    assert len(device.tried) <= 6


def test_a_cpu_has_no_other_memory_and_compiled_blocks_neither_show_nor_move() -> None:
    with pytest.raises(UserError, match="needs about 950 MiB of 950 MiB; set fp8_scaled = true"):
        choose(Device(950, "cpu"))  # type: ignore[arg-type]
    chosen, _ = choose(Device(1500, compiled=True))  # type: ignore[arg-type]
    assert chosen.model_dump(exclude_defaults=True) == {"gradient_checkpointing": True}
    with pytest.raises(UserError, match="needs about 850 MiB of 600 MiB"):
        choose(Device(600, compiled=True))  # type: ignore[arg-type]


def test_a_run_chooses_by_real_steps_and_trains_the_same_lora(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"max_train_steps": 2, "network_dropout": 0.1}
    run(base, two_sizes(tmp_path), tmp_path / "plain", **settings)
    monkeypatch.setattr(dry_run, "_WORTH_KEEPING", 1)
    printed = {}
    for name, size in (("much", 2**40), ("little", 4 * MIB)):
        monkeypatch.setattr(dry_run, "available_bytes", lambda device, size=size: size)
        run(base, two_sizes(tmp_path), tmp_path / name, memory="auto", **settings)
        printed[name] = " ".join(capsys.readouterr().out.split())
        found, expected = lora(tmp_path / name), lora(tmp_path / "plain")
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert "memory: nothing recomputed; a step of 1 at 256x256 takes" in printed["much"]
    assert (
        "memory: gradient_checkpointing = true, activation_budget_mb = 1; " in printed["little"]
    )  # of 4 MiB 2.3 are taken


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"blocks_to_swap": 2}, 'blocks_to_swap: memory = "auto" chooses it'),
        ({"gradient_checkpointing": True}, 'gradient_checkpointing: memory = "auto" chooses it'),
        ({"memory_dry_run": False}, 'memory_dry_run: memory = "auto" takes its steps'),
        ({"shard": 2}, 'memory: "auto" tries the full model'),
    ],
)
def test_what_contradicts_it_is_refused(settings: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        load_config(arguments(tmp_path, tmp_path / "data.toml", tmp_path / "out", memory="auto", **settings))
