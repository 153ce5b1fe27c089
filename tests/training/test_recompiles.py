"""Compiled blocks take every bucket: none is compiled anew for a size that comes later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from library.training.run import Run
from tests.runs import run, write_dataset

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


def test_more_buckets_compile_nothing_more(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without inductor, which would take minutes: what is compiled anew is decided before a backend sees it."""
    torch._dynamo.reset()
    counters.clear()
    graphs: list[int] = []
    after_step = Run.after_step

    def count(self: Run) -> None:
        graphs.append(counters["stats"]["unique_graphs"])
        after_step(self)

    monkeypatch.setattr(Run, "after_step", count)
    settings = {"torch_compile": True, "dynamo_backend": "eager", "max_train_epochs": 1}
    run(base, buckets(tmp_path, SIZES), tmp_path / "out", **settings)
    assert len(graphs) == len(SIZES)
    assert 0 < graphs[1] == graphs[-1]  # of two sizes as of four
