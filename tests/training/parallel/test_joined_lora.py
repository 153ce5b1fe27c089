"""One LoRA on joined layers (split_qkv=False) under each layout and on bases in fp8, against one plain process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layouts import GRADIENTS, train_one
from tests.runs import arguments, largest_difference, lora, run, write_dataset
from tests.worker_group import run_in_group

JOINED = {"network_args": ["split_qkv=False"], "save_format": "kohya", "train_batch_size": 1}
LAYOUTS: dict[str, dict[str, object]] = {
    "ddp": {},
    "shard": {"shard": 2},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
}
ALONE: dict[str, dict[str, object]] = {
    "checkpointing": {"gradient_checkpointing": True},
    "compiled": {"torch_compile": True, "dynamo_backend": "eager"},
}

pytestmark = pytest.mark.slow  # with LoRAs that are not joined each layout has a file here


@pytest.fixture(scope="module")
def runs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of length one from B = 0, whose gradient is then B."""
    folder = tmp_path_factory.mktemp("joined")
    images = write_dataset(folder / "images")
    settings = GRADIENTS | JOINED
    run(base, images, folder / "one", **settings, gradient_accumulation_steps=2)
    for name, options in ALONE.items():
        run(base, images, folder / name, **settings, **options, gradient_accumulation_steps=2)
    jobs = []
    for name, options in LAYOUTS.items():
        steps = 2 if {"tp", "pp"} & options.keys() else 1
        flags = arguments(base, images, folder / name, **settings, **options, gradient_accumulation_steps=steps)
        jobs.append((name, train_one, (flags,)))
    assert run_in_group(jobs, folder) == dict.fromkeys(LAYOUTS, "")
    return folder


@pytest.mark.parametrize("name", [*LAYOUTS, *ALONE])
def test_every_layout_trains_the_same_joined_lora(runs: Path, name: str) -> None:
    one = lora(runs / "one")
    assert max(float(tensor.abs().max()) for key, tensor in one.items() if "lora_up" in key) > 0
    assert largest_difference(lora(runs / name), one) < 2e-4  # halves are averaged, or summed over parts, in fp32
