"""The benchmark of starting: what it starts is a run's own data, and the second start encodes nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image

from bench.startup import InstantImages, start, write_dataset


def test_the_images_differ_and_a_second_start_encodes_none(tmp_path: Path) -> None:
    toml = write_dataset(tmp_path, 9)
    written = sorted((tmp_path / "images").glob("*.png"))
    assert len({Image.open(path).getpixel((0, 0)) for path in written}) == 9
    seen: list[torch.Size] = []

    class Counted(InstantImages):
        def encode(self, pixels: torch.Tensor) -> torch.Tensor:
            seen.append(pixels.shape)
            return super().encode(pixels)

    for _ in range(2):
        start(toml, tmp_path / "out", Counted())
    assert sum(shape[0] for shape in seen) == 9
