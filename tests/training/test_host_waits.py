"""The host reads nothing back from the device between logged steps: on a GPU it would wait for it each time."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import pretraining_runs
from tests.runs import run, write_dataset

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default}


class Reads(TorchDispatchMode):
    """Counts, by the line that asked, what makes the host wait: ``item``, ``if tensor``, ``nonzero``.

    Reading batches does not count: their tensors are made on the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            frames = [f for f in traceback.extract_stack() if f.filename != __file__ and "_dynamo" not in f.filename]
            frames = [f for f in frames if not f.filename.endswith("_compile.py")]
            if not any("/library/data/" in f.filename or "torch/utils/data" in f.filename for f in frames):
                self.lines[" < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[:-4:-1])] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_checkpointing": True, "activation_budget_mb": 1, "ema_decay": 0.9, "gradient_accumulation_steps": 2},
        {"fp8_scaled": True, "mixed_precision": "bf16", "network_dropout": 0.1},
    ],
    ids=["AdamW", "policies", "fp8"],
)
def test_more_steps_ask_no_more_often(base: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    """Within an epoch: at its end it is asked once whether all steps were finite."""

    def train(folder: Path, steps: int) -> None:
        given = {"max_train_steps": steps, "log_every_n_steps": 100, "save_every_n_epochs": 9, **settings}
        run(base, write_dataset(tmp_path), folder, **given)

    more = asked_by_more_steps(tmp_path, train)
    assert not more, more


@pytest.mark.parametrize("settings", [{}, {"ema_decay": 0.9, "tokens_per_batch": 256}, {"full_bf16": True}])
def test_more_steps_of_pretraining_ask_no_more_often(corpus: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    """With AdamW, whose kernels leave out a step that is not finite by themselves."""

    def train(folder: Path, steps: int) -> None:
        given = {"max_train_steps": steps, "log_every_n_steps": 100, "lr_warmup_steps": 0, **settings}
        pretraining_runs.run(corpus, folder, **given)

    more = asked_by_more_steps(tmp_path, train)
    assert not more, more


def asked_by_more_steps(folder: Path, train: Callable[[Path, int], None]) -> Counter[str]:
    """Return the lines that ask more often in three steps than in one."""
    found = {}
    for steps in (1, 3):
        with Reads() as reads:
            train(folder / str(steps), steps)
        found[steps] = reads.lines
    assert sum(found[1].values()) > 0  # the end is logged and saved
    return found[3] - found[1]
