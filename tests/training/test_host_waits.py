"""The host reads nothing back from the device between logged steps: on a GPU it would wait for it each time."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from library.training.run import Run
from tests import pretraining_runs
from tests.runs import run, write_dataset
from tests.tiny import tiny_flux_pipeline

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


# 16, 32, 64 and 60 tokens; 24, as the text has, would be taken for the same number
SIZES = ((64, 64), (64, 128), (128, 128), (160, 96))


def buckets(folder: Path, sizes: tuple[tuple[int, int], ...]) -> Path:
    """Write one image of each size, each a bucket; return the dataset TOML."""
    text = '[general]\ncaption_extension = ".txt"\n'
    for width, height in sizes:
        write_dataset(folder / f"{width}x{height}", images=1, size=(width, height))
        text += f"[[datasets]]\nresolution = [{width}, {height}]\n"
        text += f'[[datasets.subsets]]\nimage_dir = "{width}x{height}/images"\n'
    (folder / "dataset.toml").write_text(text)
    return folder / "dataset.toml"


def test_more_buckets_compile_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without inductor, which would take minutes: what is compiled anew is decided before a backend sees it."""
    counters.clear()
    graphs: list[int] = []
    after_step = Run.after_step

    def count(self: Run) -> None:
        graphs.append(counters["stats"]["unique_graphs"])
        after_step(self)

    monkeypatch.setattr(Run, "after_step", count)
    settings = {"torch_compile": True, "dynamo_backend": "eager", "max_train_epochs": 1}
    base = tiny_flux_pipeline(tmp_path / "base", double_blocks=1, single_blocks=1)
    run(base, buckets(tmp_path, SIZES), tmp_path / "out", **settings)
    assert len(graphs) == len(SIZES)
    assert 0 < graphs[1] == graphs[-1]  # of two sizes as of four
