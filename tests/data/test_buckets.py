"""Aspect-ratio buckets, against their definition, known sizes and cases worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from library.config.schema import DatasetArguments
from library.data.buckets import Bucketing, bucket_sizes
from library.data.config import Dataset, DatasetConfig, DatasetSettings, load_dataset_config
from library.data.dataset import TrainingData
from library.data.lint import check
from library.errors import UserError
from library.training.checkpoint.metadata import dataset_facts
from tests.data.folders import add_image, build, cache_all, items

KOHYA = {"enable_bucket": True, "bucket_reso_steps": 64}  # what makes a dataset sd-scripts', with its default


def bucketing(resolution: int | tuple[int, int], unit: int = 16, **settings: object) -> Bucketing:
    sides = resolution if isinstance(resolution, tuple) else (resolution, resolution)
    return Bucketing(Dataset("d.toml", DatasetSettings(**settings), sides, None, ()), unit)


def test_sizes_at_1024_contain_those_recommended_for_sdxl() -> None:
    # the sizes near 1024^2 that guides to SDXL (Podell et al. 2023, section 2.3) recommend
    recommended = [(1024, 1024), (896, 1152), (832, 1216), (768, 1344)]
    sizes = bucket_sizes((1024, 1024), 256, 2048, 64)
    for width, height in recommended:
        assert (width, height) in sizes
        assert (height, width) in sizes


@given(
    steps=st.sampled_from([16, 32, 64]),
    sides=st.tuples(st.integers(8, 40), st.integers(8, 40)),
    low=st.integers(1, 6),
    extra=st.integers(0, 40),
)
def test_sizes_are_the_tallest_of_each_width_within_area_and_limits(
    steps: int, sides: tuple[int, int], low: int, extra: int
) -> None:
    width, height = sides[0] * 16, sides[1] * 16
    lowest, highest = low * steps, (low + extra) * steps
    found = set(bucket_sizes((width, height), lowest, highest, steps))
    allowed = [side for side in range(steps, highest + 1, steps) if side >= lowest]
    tallest = {
        (w, max(h for h in allowed if w * h <= width * height))
        for w in allowed
        if any(w * h <= width * height for h in allowed)
    }
    square = int((width * height) ** 0.5) // steps * steps
    assert found == tallest | {(h, w) for w, h in tallest} | {(square, square)}


def test_an_image_is_resized_to_cover_the_bucket_of_nearest_aspect_and_cropped_in_the_middle() -> None:
    # 512^2 in steps of 64 offers 576x448 (1.286) and 640x384 (1.667); 1200x800 (1.5) is nearer to the second:
    # scale 640 / 1200, so 640 x 427, of which 43 rows overhang.
    fit = bucketing(512, **KOHYA).fit((1200, 800), random_crop=False, name="")
    assert (fit.bucket, fit.resized, fit.offset, fit.encoded) == ((640, 384), (640, 427), (0, 21), (640, 384))


def test_an_image_of_a_buckets_own_size_stays_as_it_is() -> None:
    fit = bucketing(512, **KOHYA).fit((576, 448), random_crop=False, name="")
    assert fit.resized == fit.bucket == (576, 448)


def test_without_buckets_everything_has_the_size_of_resolution() -> None:
    fit = bucketing((512, 256)).fit((300, 300), random_crop=False, name="")
    assert (fit.bucket, fit.resized, fit.offset) == ((512, 256), (512, 512), (0, 128))


def test_no_upscale_keeps_small_images_and_shrinks_large_ones() -> None:
    buckets = bucketing(512, **KOHYA, bucket_no_upscale=True)
    small = buckets.fit((300, 200), random_crop=False, name="")
    assert (small.resized, small.bucket, small.offset) == ((300, 200), (256, 192), (22, 4))
    # 2000x1000 to the area 512^2 is 724.1 x 362.0. Width in whole steps: 704, height then 352 -> 320, ratio 2.2;
    # height in whole steps: 320, width then 640, ratio 2.0: exact, so 640 x 320.
    large = buckets.fit((2000, 1000), random_crop=False, name="")
    assert (large.resized, large.bucket) == ((640, 320), (640, 320))


@given(
    size=st.tuples(st.integers(70, 4000), st.integers(70, 4000)),
    no_upscale=st.booleans(),
    random_crop=st.booleans(),
    steps=st.sampled_from([16, 48, 64]),
)
def test_every_fit_lies_within_the_resized_image_in_whole_patches(
    size: tuple[int, int], no_upscale: bool, random_crop: bool, steps: int
) -> None:
    buckets = bucketing(512, enable_bucket=True, bucket_no_upscale=no_upscale, bucket_reso_steps=steps)
    try:
        fit = buckets.fit(size, random_crop, "x")
    except UserError:
        assert no_upscale  # a strip too narrow for one step
        return
    for axis in range(2):
        assert fit.bucket[axis] % steps == 0
        assert fit.encoded[axis] % 16 == 0
        assert fit.offset[axis] >= 0
        assert fit.offset[axis] + fit.encoded[axis] <= fit.resized[axis]
        assert fit.bucket[axis] <= fit.encoded[axis]
    assert random_crop or fit.encoded == fit.bucket
    # Sides are rounded to whole pixels before they are cut to steps, as sd-scripts does: half a pixel each at most.
    assert (fit.bucket[0] - 0.5) * (fit.bucket[1] - 0.5) <= 512 * 512
    if no_upscale:
        assert fit.resized[0] <= size[0]
        assert fit.resized[1] <= size[1]


def test_random_crop_encodes_the_whole_image_in_whole_patches() -> None:
    fit = bucketing(512, **KOHYA).fit((1200, 800), random_crop=True, name="")
    assert (fit.encoded, fit.offset, fit.bucket) == ((640, 416), (0, 5), (640, 384))


def test_limits_are_kohyas_or_wider_where_resolution_needs_it() -> None:
    assert (256, 1024) in bucketing(512, **KOHYA).sizes
    small = bucketing(96, enable_bucket=True, bucket_reso_steps=16).sizes
    assert min(min(size) for size in small) == 48
    large = bucketing(1536, **KOHYA).sizes
    assert max(max(size) for size in large) == 3072
    given_limits = bucketing(512, **KOHYA, min_bucket_reso=300, max_bucket_reso=700).sizes
    # rounded outwards to whole steps, as sd-scripts does
    assert (min(min(size) for size in given_limits), max(max(size) for size in given_limits)) == (256, 704)


def test_settings_without_a_usable_bucket_are_refused() -> None:
    patch = "is not a multiple of 16, the model's patch; use"
    for resolution, keys, expected in (
        (520, None, f"resolution 520 {patch} 512"),
        (512, {"bucket_reso_steps": 40}, f"bucket_reso_steps 40 {patch} 32"),
        (512, {"bucket_reso_steps": 3}, f"bucket_reso_steps 3 {patch} 16"),
        (48, KOHYA, "resolution 48x48 is smaller than bucket_reso_steps 64; set bucket_reso_steps = 16"),
        (8, {"bucket_reso_steps": 16}, "resolution 8x8 is smaller than a patch of the model, 16 pixels; raise it"),
        (8, {}, "resolution 8x8 is smaller than a patch of the model, 16 pixels; raise it"),
        (512, {"min_bucket_reso": 640}, "min_bucket_reso 640 is larger than resolution 512x512; use at most 512"),
        (512, {"max_bucket_reso": 256}, "max_bucket_reso 256 is smaller than resolution 512x512; use at least 512"),
    ):
        with pytest.raises(UserError) as caught:
            bucketing(resolution, **({} if keys is None else {"enable_bucket": True} | keys))
        assert str(caught.value) == f"d.toml: {expected}"


def test_an_image_too_small_to_be_used_without_upscaling_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        bucketing(512, **KOHYA, bucket_no_upscale=True).fit((500, 40), False, "thin.png")
    assert str(caught.value) == (
        "thin.png: 500x40 gives a side below 64 pixels; remove the image or set bucket_no_upscale = false"
    )


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
        ("resolutions = []", "no resolution; write e.g. resolution = 1024 below [[datasets]]"),
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
