"""Which settings are chosen and proposed for cards of several sizes; sums are done by hand."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from library.config import load_config
from library.config.schema import TrainConfig
from library.errors import UserError
from library.training.memory.policy import MemoryPlan, advice, choose, remedies
from tests.forked import run_script
from tests.runs import arguments, lora, run, same, write_dataset

MIB = 2**20


def config_of(folder: Path, **settings: object) -> TrainConfig:
    return load_config(
        arguments(
            folder, folder / "data.toml", folder / "out", **{"model_type": "flux", "mixed_precision": "auto"} | settings
        )
    )


class Model:
    """20 blocks of 40 MiB, of which 18 can be swapped: 800 MiB of weights, half of them in fp8; 1000 of activations.

    Recomputing needs 150 MiB of activations, 100 of which are the blocks' inputs. The encoder of texts has 900 MiB.
    """

    def __init__(self) -> None:
        self.counted = 0

    def count(self, config: TrainConfig) -> MemoryPlan:
        self.counted += 1
        training, precision = config.training, config.precision
        if training.cpu_offload_checkpointing and not training.gradient_checkpointing:
            raise UserError("cpu_offload_checkpointing: nothing is recomputed")
        activations = 150 + training.activation_budget_mb if training.gradient_checkpointing else 1000
        activations -= 100 * training.cpu_offload_checkpointing
        weights = (800 - 40 * training.blocks_to_swap) // (2 if precision.fp8_scaled else 1)
        encoders = 500 if precision.fp8_text_encoder else 900
        phases = {
            "encoding captions": {"encoders": encoders * MIB},
            "step": {"weights": weights * MIB, "activations": activations * MIB},
        }
        return MemoryPlan("card", phases, "1 at 64x64", (18, 40 * MIB))


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (1800, {}),
        (1425, {"gradient_checkpointing": True, "activation_budget_mb": 475}),  # 1425 - 950
        (960, {"gradient_checkpointing": True}),  # 10 MiB are not worth it
        (902, {"gradient_checkpointing": True, "cpu_offload_checkpointing": True}),  # 850
        (470, {"gradient_checkpointing": True, "cpu_offload_checkpointing": True, "blocks_to_swap": 10}),  # 380 over
        (130, {"gradient_checkpointing": True, "cpu_offload_checkpointing": True, "blocks_to_swap": 18}),
    ],
)
def test_the_fastest_settings_that_fit_are_chosen(room: int, expected: dict[str, object], tmp_path: Path) -> None:
    config, model = config_of(tmp_path), Model()
    chosen = choose(config, room * MIB, model.count)
    before, after = config.training.model_dump(), chosen.config.training.model_dump()
    assert {key: value for key, value in after.items() if value != before[key]} == expected
    assert not chosen.plan.over(room * MIB, ("step",))
    assert model.counted <= 6
    assert list(chosen.lines) == list(expected)


def test_a_cpu_has_no_other_memory(tmp_path: Path) -> None:
    assert choose(config_of(tmp_path), 900 * MIB, Model().count, on_cpu=True).plan.over(900 * MIB)


def test_what_is_proposed_takes_something_off_a_phase_that_does_not_fit(tmp_path: Path) -> None:
    """Where the step alone is too much, nothing is done to the text encoder; where captions are, that comes first."""
    config, model = config_of(tmp_path), Model()
    plan = model.count(config)
    (enough,) = remedies(config, plan, 960 * MIB, model.count)
    assert list(enough.lines.values()) == ["gradient_checkpointing = true"]
    every = [list(each.lines.values())[-1] for each in remedies(config, plan, 240 * MIB, model.count)]
    assert every == [
        "fp8_text_encoder = true", "gradient_checkpointing = true", "cpu_offload_checkpointing = true",
        "fp8_scaled = true", "blocks_to_swap = 6", "blocks_to_swap = 9", "blocks_to_swap = 10", "blocks_to_swap = 11",
    ]  # fmt: skip


def test_sixteen_bits_come_first_where_there_are_thirty_two(tmp_path: Path) -> None:
    """A17: weights and activations in half the bytes, whatever else is to be had."""
    model = Model()

    def count(config: TrainConfig) -> MemoryPlan:
        plan, twice = model.count(config), 1 + (config.training.mixed_precision == "no")
        return replace(plan, phases={name: {k: twice * v for k, v in p.items()} for name, p in plan.phases.items()})

    config = config_of(tmp_path, mixed_precision="no")
    first = next(remedies(config, count(config), 1800 * MIB, count))
    assert list(first.lines.values()) == ['mixed_precision = "bf16"']
    assert not first.plan.over(1800 * MIB)
    auto = config_of(tmp_path)
    assert all("mixed_precision" not in each.lines for each in remedies(auto, count(auto), 300 * MIB, count))


def test_running_out_of_memory_names_what_is_not_set_yet(tmp_path: Path) -> None:
    assert advice(config_of(tmp_path)).startswith(
        "set gradient_checkpointing = true, or lower batch_size (train_batch_size) or resolution"
    )
    less = advice(config_of(tmp_path, gradient_checkpointing=True, blocks_to_swap=2))
    assert "set gradient_checkpointing" not in less
    assert less.endswith("raise blocks_to_swap from 2")
    assert "swap" not in advice(config_of(tmp_path), on_cpu=True)


WAYS = {
    "kept": {"activation_budget_mb": 1},
    "on the host": {"cpu_offload_checkpointing": True},
    "together": {"activation_budget_mb": 1, "cpu_offload_checkpointing": True},
    "over fp8": {"activation_budget_mb": 1, "cpu_offload_checkpointing": True, "fp8_scaled": True},
}


@pytest.fixture(scope="module")
def plain(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, torch.Tensor]]:
    """What is trained without recomputation; and that on an fp8 base."""
    folder = tmp_path_factory.mktemp("plain")
    found = {}
    for fp8 in (False, True):
        run(base, write_dataset(folder), folder / str(fp8), max_train_steps=3, network_dropout=0.2, fp8_scaled=fp8)
        found[fp8] = lora(folder / str(fp8))
    return found


@pytest.mark.parametrize("way", WAYS)
def test_the_lora_is_the_same(way: str, base: Path, plain: dict[bool, dict], tmp_path: Path) -> None:
    settings = {"gradient_checkpointing": True, "max_train_steps": 3, "network_dropout": 0.2, **WAYS[way]}
    run(base, write_dataset(tmp_path), tmp_path / "out", **settings)
    assert same(lora(tmp_path / "out"), plain["fp8_scaled" in settings])


_STEPS = """
import resource, torch
torch.set_num_threads(1)
from library.training.memory.budget import keep_freed_memory

def step():
    return sum(torch.ones(size << 18).sum().item() for size in (48, 3, 40, 64))  # MiB

def faults():
    step(), step()
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun

print(faults())
keep_freed_memory()
print(faults())
"""


def faults(folder: Path, **environment: str) -> list[int]:
    """Return the page faults of five steps that allocate 155 MiB each, before and after what a run does."""
    (folder / "steps.py").write_text(_STEPS)
    done = run_script(folder / "steps.py", [], folder, environment)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux")
def test_freed_memory_is_taken_again_without_page_faults_unless_the_user_has_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    without, kept = faults(tmp_path)
    if without < 1000:
        pytest.skip("this malloc keeps what is freed by itself")
    assert kept < without / 20
    assert faults(tmp_path, MALLOC_MMAP_THRESHOLD_="1000000")[1] > without / 2
