"""Several resolutions of one image in one run: as if the table stood there once for each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from library.config.schema import DatasetArguments
from library.data.config import DatasetConfig, load_dataset_config
from library.data.dataset import TrainingData
from library.data.lint import check
from library.errors import UserError
from library.training.checkpoint.metadata import dataset_facts
from tests.data.folders import add_image, build, cache_all, items

SUBSET = "[[datasets.subsets]]\nimage_dir = 'img'\nnum_repeats = 2\n"
REGULAR = "[[datasets.subsets]]\nimage_dir = 'reg'\nis_reg = true\nclass_tokens = 'disc'\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "d.toml"
    path.write_text(f"[general]\ncaption_extension = '.txt'\nenable_bucket = true\nbucket_reso_steps = 16\n{text}")
    return path


def load(toml: Path, *pairs: str) -> DatasetConfig:
    return load_dataset_config(toml, DatasetArguments(dataset_config=str(toml), dataset_args=list(pairs)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(6):
        add_image(tmp_path / "img", f"{number}.png", (64 + 16 * number, 96), caption=f"image {number}", seed=number)
        add_image(tmp_path / "reg", f"{number}.png", caption=None, seed=50 + number)
    return tmp_path


def seen(data: TrainingData) -> list[tuple[object, ...]]:
    samples = [*data.train.samples, *(data.validation.samples if data.validation else [])]
    return [(s.group.dataset, s.image.path, s.fit, s.repeats, s.identity, s.held_out) for s in samples]


def test_it_is_the_table_written_once_for_each_resolution(folder: Path) -> None:
    inside = f"validation_split = 0.34\nbatch_size = 2\n{SUBSET}{REGULAR}"
    one = build(write(folder, f"[[datasets]]\nresolutions = [[64, 64], [96, 64], [128, 128]]\n{inside}"), seed=3)
    sizes = ("64", "[96, 64]", "128")
    copied = build(write(folder, "".join(f"[[datasets]]\nresolution = {size}\n{inside}" for size in sizes)), seed=3)
    assert [dataset.resolution for dataset in one.config.datasets] == [(64, 64), (96, 64), (128, 128)]
    assert seen(one) == seen(copied)
    assert list(one.batch_sampler()) == list(copied.batch_sampler())
    cache_all(one)
    shapes = {tuple(item.latents.shape) for item in items(one.train)}
    assert {8 * 8, 8 * 12, 16 * 16} <= {shape[1] * shape[2] for shape in shapes}


@pytest.mark.parametrize("seed", range(5))
def test_an_image_is_held_out_at_every_resolution_or_at_none(folder: Path, seed: int) -> None:
    toml = write(folder, f"[[datasets]]\nresolutions = [64, 96, 128]\nvalidation_split = 0.34\n{SUBSET}")
    data = build(toml, seed=seed)
    assert data.validation is not None
    trained = {sample.image.path for sample in data.train.samples}
    held_out = [sample.image.path for sample in data.validation.samples]
    assert not trained & set(held_out)
    assert sorted(held_out) == sorted([*set(held_out)] * 3)
    assert any("2 images held out" in line for line in data.describe())


def test_they_are_inherited_and_the_nearest_of_both_keys_counts(folder: Path) -> None:
    def sizes(toml: Path, *pairs: str) -> list[tuple[int, int]]:
        return [dataset.resolution for dataset in load(toml, *pairs).datasets]

    several = [(64, 64), (128, 128)]
    general = write(folder, f"resolutions = [64, 128]\n[[datasets]]\n{SUBSET}[[datasets]]\nresolution = 96\n{SUBSET}")
    assert sizes(general) == [*several, (96, 96)]
    assert [dataset.number for dataset in load(general).datasets] == [1, 1, 2]
    bare = write(folder, f"[[datasets]]\n{SUBSET}")
    assert sizes(bare, "resolutions=64, 128x96") == [(64, 64), (128, 96)]
    assert sizes(write(folder, f"[[datasets]]\nresolutions = [64, 128]\n{SUBSET}"), "resolution=512") == several
    assert sizes(write(folder, f"[[datasets]]\nresolution = 64\n{SUBSET}"), "resolutions=96,128") == [(64, 64)]


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ("resolution = 64\nresolutions = [64]", "dataset 1: resolution and resolutions both say at which size"),
        ("resolutions = [64, 96, 64]", ": resolutions: 64x64 stands there twice; keep one"),
        ("resolutions = []", "resolutions = []: should be a list, each entry a number of pixels or [width, height]"),
        ("resolutions = 64", "resolutions = 64: should be a list, each entry a number of pixels or [width, height]"),
        ("resolutions = ['64']", "resolutions = ['64']: should be a list, each entry a number of pixels"),
    ],
)
def test_a_mistake_in_them_is_one_line(folder: Path, dataset: str, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load(write(folder, f"[[datasets]]\n{dataset}\n{SUBSET}"))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_resolution_that_does_not_suit_the_buckets_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match="resolution 64x64 is smaller than bucket_reso_steps 96"):
        build(write(folder, f"[[datasets]]\nresolutions = [128, 64]\nbucket_reso_steps = 96\n{SUBSET}"))


def test_control_images_follow_the_resolution_unless_they_have_their_own(folder: Path) -> None:
    subset = SUBSET + "control_directory = 'img'\n"
    toml = write(folder, f"[[datasets]]\nresolutions = [64, 128]\n{subset}")
    for sample in build(toml, conditioning="references").train.samples:
        assert sample.control_images[0].fit.encoded == sample.fit.bucket
    toml = write(folder, f"[[datasets]]\nresolutions = [64, 128]\ncontrol_resolution = 32\n{subset}")
    for sample in build(toml, conditioning="references").train.samples:
        width, height = sample.control_images[0].fit.encoded
        assert width * height <= 48 * 48


def test_what_is_said_of_an_image_is_said_once(folder: Path) -> None:
    add_image(folder / "img", "bare.png", caption=None, seed=20)
    (folder / "img" / "bare.txt").write_text(" ")
    toml = write(folder, f"trigger_word = 'zorbo'\n[[datasets]]\nresolutions = [64, 96, 128]\n{SUBSET}")
    once = check(load(toml), 16, lambda *_: lambda _: None)
    assert once.images == 7
    assert [finding.kind for finding in once.findings if finding.kind == "setup"] == ["setup"]  # the empty file
    (folder / "img" / "bare.txt").unlink()
    data = build(toml)
    assert sum("no .txt file" in warning for warning in data.warnings) == 1
    described = data.describe()
    headings = [line.partition(",")[0] for line in described if line.startswith("dataset")]
    assert headings == ["dataset 1: 64x64", "dataset 1: 96x96", "dataset 1: 128x128"]
    assert sum(line.count("7 images x 2") for line in described) == 3


def test_an_image_too_small_for_some_of_them_is_told_with_what_it_fills(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "small.png", (100, 100), caption="a")
    toml = write(tmp_path, f"[[datasets]]\nresolutions = [64, 128, 160]\n{SUBSET}")
    report = check(load(toml), 16, lambda *_: lambda _: None)
    assert [finding.text for finding in report.findings] == [
        "small.png: 100x100 is enlarged 1.28 times to fill 128x128, 1.60 times to fill 160x160; it fills 64x64 "
        "(bucket_no_upscale enlarges none)"
    ]
    toml = write(tmp_path, f"bucket_no_upscale = true\n[[datasets]]\nresolutions = [64, 128, 160]\n{SUBSET}")
    assert check(load(toml), 16, lambda *_: lambda _: None).findings == []
    assert [sample.fit.bucket for sample in build(toml).train.samples] == [(64, 64), (96, 96), (96, 96)]


def test_the_file_lists_a_dataset_for_each(folder: Path) -> None:
    data = build(write(folder, f"[[datasets]]\nresolutions = [64, 128]\n{SUBSET}"))
    facts = dataset_facts(data, 1)
    assert [one["resolution"] for one in json.loads(str(facts["datasets"]))] == [[64, 64], [128, 128]]
    assert facts["num_train_images"] == 2 * 6 * 2
