"""What a run says of its dataset at the start, and when it refuses to start."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from library.errors import UserError
from tests.runs import run, write_dataset


def test_odd_captions_and_sizes_are_told_at_the_start(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_dataset(tmp_path, size=(48, 48))
    for name in ("1", "2"):
        (tmp_path / "images" / f"{name}.txt").write_text("the same")
    run(base, data, tmp_path / "out", max_train_steps=1)
    told = capsys.readouterr().out
    assert "note: captions: 2 images (1.png, 2.png share the caption 'the same')" in told
    assert "note: smaller than their bucket: 8 images (0.png: 48x48 is enlarged 1.33 times to fill 64x64)" in told


def test_a_strict_run_refuses_before_anything_is_cached(base: Path, tmp_path: Path) -> None:
    data = write_dataset(tmp_path)
    shutil.copy(tmp_path / "images" / "3.png", tmp_path / "images" / "copy.png")
    (tmp_path / "images" / "copy.txt").write_text("another caption")
    with pytest.raises(UserError, match=r"strict_dataset: .*the same file twice: 2 images \(3.png, copy.png") as caught:
        run(base, data, tmp_path / "out", strict_dataset=True)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.rglob("*.safetensors")) == []
