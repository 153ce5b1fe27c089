"""dev/measure_seam.py: what it trains and measures on, and how LoRAs and images are averaged."""

from __future__ import annotations

import subprocess
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from dev.measure_seam import BLANKS, LIMITS, SEEDS, dataset, key, known_side, over_loras, rows_of, train
from library.config.schema import DatasetArguments
from library.data.config import load_dataset_config


@pytest.mark.parametrize("training", [True, False])
def test_the_demos_images_are_used_with_another_blank_and_held_out_in_training_alone(
    tmp_path: Path, training: bool
) -> None:
    for blank in BLANKS:
        config = load_dataset_config(dataset(tmp_path, blank, training), DatasetArguments(dataset_config="d"), "fill")
        (found,) = config.datasets
        (subset,) = found.subsets
        assert subset.inpainting is not None
        assert (subset.inpainting.blank, subset.written_dir) == (blank, "images")
        assert subset.settings.validation_split == (0.2 if training else 0.0)
    assert len(list((tmp_path / "images").glob("*.png"))) == 16


def test_every_lora_is_trained_once_on_both_bases(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def trained(words: list[str], **_: object) -> None:
        asked.append(words)
        folder = Path(words[words.index("--output_dir") + 1])
        folder.mkdir()
        (folder / "lora.safetensors").touch()

    with mock.patch.object(subprocess, "run", trained):
        train(tmp_path)
        train(tmp_path)
    assert len(asked) == 2 * len(BLANKS) * len(SEEDS)
    assert sum("--fp8_base" in words for words in asked) == len(asked) / 2
    assert len({tuple(words) for words in asked}) == len(asked)


def test_loras_are_averaged_by_image_and_the_interval_is_over_images() -> None:
    random = np.random.default_rng(0)
    times = {name: random.lognormal(0.5, 0.3, (2, 400)) for name in LIMITS}
    results = {
        key("conditioning", "grey", "case", "itself", seed): {
            "image": seed / 10,
            "times": {name: times[name][seed].tolist() for name in LIMITS},
            "known": [(10.0 * (seed + 1), 1.0)] * 3,
        }
        for seed in range(2)
    }
    assert rows_of(results, "conditioning") == {"case": list(results)}
    image, figures = over_loras(results, list(results))
    assert image == pytest.approx(0.05)
    for name, (middle, low, high) in figures.items():
        logs = np.log(times[name]).mean(0)
        assert middle == pytest.approx(np.exp(logs.mean()))
        # of 400 images the bootstrap's percentiles are those of a normal distribution within a twentieth
        half = 1.96 * logs.std(ddof=1) / 20
        assert np.log(high / middle) == pytest.approx(half, rel=0.1)
        assert np.log(middle / low) == pytest.approx(half, rel=0.1)
    assert known_side(results, list(results)) == pytest.approx((15, 15, 15))
