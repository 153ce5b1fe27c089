"""Regularisation images painted ahead: training finds them, and a copied folder is a subset like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from library.config import load_config
from library.errors import UserError
from tests.runs import arguments, run, write_base, write_dataset
from tools.paint_regularisation import paint_regularisation


def test_training_paints_nothing_again_and_the_copy_is_a_regularisation_subset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, dataset = write_base(tmp_path / "base"), write_dataset(tmp_path / "data", images=4)
    kept = tmp_path / "kept.txt"
    kept.write_text("a ring, grey --s 2\na line --w 32 --h 64 --s 2\n")
    settings = {"preserve": "prior", "preserve_prompts": kept, "general_prompts": "none", "max_train_steps": 1}
    copied = tmp_path / "reg"
    images = paint_regularisation(load_config(arguments(base, dataset, tmp_path / "unused", **settings)), copied)
    assert not (tmp_path / "unused").exists()
    times = [image.stat().st_mtime_ns for image in images]
    assert [Image.open(path).size for path in sorted(copied.glob("*.png"))] == [(64, 64), (32, 64)]
    assert [path.read_text() for path in sorted(copied.glob("*.txt"))] == ["a ring, grey\n", "a line\n"]
    capsys.readouterr()
    run(base, dataset, tmp_path / "run", **settings)
    assert [image.stat().st_mtime_ns for image in images] == times
    assert "painting" not in capsys.readouterr().out

    dataset.write_text(dataset.read_text() + f'[[datasets.subsets]]\nimage_dir = "{copied}"\nis_reg = true\n')
    events = run(base, dataset, tmp_path / "other", preserve="prior", general_prompts="none", max_train_steps=1)
    regular = [sample.caption for sample in events.task.data.train.samples if sample.settings.is_reg]
    assert regular[0] == "a ring, grey"


def test_without_prompts_to_paint_a_line_says_what_to_set(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    config = load_config(arguments(base, write_dataset(tmp_path / "data"), tmp_path / "unused"))
    with pytest.raises(UserError, match=r'^preserve_prompts: nothing .* set preserve = "prior"'):
        paint_regularisation(config)
