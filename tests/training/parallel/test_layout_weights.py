"""What the planner says that each process holds, against what two processes do hold under every layout."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor

from library.config import load_config
from library.config.schema import ParallelConfig
from library.training.memory.budget import tensor_bytes
from library.training.memory.estimator import StepOptions, estimate, model_memory, shape_of
from library.training.optim.factory import unwrapped
from tests.runs import arguments, write_base, write_dataset
from tests.worker_group import run_in_group
from train_lora import train

LAYOUTS: dict[str, dict[str, int]] = {"copies": {"dp": 2}, "shard": {"shard": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train_and_weigh(flags: list[str], folder: Path) -> None:
    """Train, and write what this process holds."""
    run = train(load_config(flags)).task
    trained = run.network.parameters()
    ids = {id(p) for p in trained}
    frozen = [local(p) for p in run.transformer.parameters() if id(p) not in ids and not p.is_meta]
    states = unwrapped(run.optimizer).state.values()
    held = {
        "weights": tensor_bytes(frozen),
        "lora": tensor_bytes([local(p) for p in trained]),
        "optimizer": tensor_bytes([value for state in states for key, value in state.items() if key != "step"]),
    }
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(held))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each of two processes holds under each layout."""
    folder = tmp_path_factory.mktemp("weights")
    base = write_base(folder / "base")
    images = write_dataset(folder / "images", text="batch_size = 2")
    jobs = []
    for name, layout in LAYOUTS.items():
        (folder / name).mkdir()
        settings: dict[str, object] = {"max_train_steps": 1, "mixed_precision": "bf16"}
        flags = arguments(base, images, folder / name / "out", **settings, **layout)
        jobs.append((name, train_and_weigh, (flags, folder / name)))
    assert run_in_group(jobs, folder) == dict.fromkeys(LAYOUTS, "")
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_fullest_process_holds_what_was_planned(name: str, place: Path) -> None:
    held = [json.loads((place / name / f"{rank}.json").read_text()) for rank in range(2)]
    layout = ParallelConfig(**{"dp": 1} | LAYOUTS[name])
    planned = estimate(model_memory(shape_of(str(place / "base")), 16, 24, 4), layout, StepOptions(batch=2))
    for key in ("weights", "lora", "optimizer"):
        ratio = getattr(planned, key) / max(one[key] for one in held)
        # norm and projection behind the blocks are on the last stage alone; the plan counts them on each
        most = 1.1 if (name, key) == ("pp", "weights") else 1.02
        assert 0.98 < ratio < most, key
