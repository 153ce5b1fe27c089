"""Aspect-ratio buckets, against their definition, known sizes and cases worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from library.data.buckets import Bucketing, bucket_sizes
from library.data.config import Dataset, DatasetSettings
from library.errors import UserError


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
    fit = bucketing(512, enable_bucket=True).fit((1200, 800), random_crop=False, name="")
    assert (fit.bucket, fit.resized, fit.offset, fit.encoded) == ((640, 384), (640, 427), (0, 21), (640, 384))


def test_an_image_of_a_buckets_own_size_stays_as_it_is() -> None:
    fit = bucketing(512, enable_bucket=True).fit((576, 448), random_crop=False, name="")
    assert fit.resized == fit.bucket == (576, 448)


def test_without_buckets_everything_has_the_size_of_resolution() -> None:
    fit = bucketing((512, 256)).fit((300, 300), random_crop=False, name="")
    assert (fit.bucket, fit.resized, fit.offset) == ((512, 256), (512, 512), (0, 128))


def test_no_upscale_keeps_small_images_and_shrinks_large_ones() -> None:
    buckets = bucketing(512, enable_bucket=True, bucket_no_upscale=True)
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
    fit = bucketing(512, enable_bucket=True).fit((1200, 800), random_crop=True, name="")
    assert (fit.encoded, fit.offset, fit.bucket) == ((640, 416), (0, 5), (640, 384))


def test_limits_are_kohyas_or_wider_where_resolution_needs_it() -> None:
    assert (256, 1024) in bucketing(512, enable_bucket=True).sizes
    small = bucketing(96, enable_bucket=True, bucket_reso_steps=16).sizes
    assert min(min(size) for size in small) == 48
    large = bucketing(1536, enable_bucket=True).sizes
    assert max(max(size) for size in large) == 3072
    given_limits = bucketing(512, enable_bucket=True, min_bucket_reso=300, max_bucket_reso=700).sizes
    # rounded outwards to whole steps, as sd-scripts does
    assert (min(min(size) for size in given_limits), max(max(size) for size in given_limits)) == (256, 704)


def test_settings_without_a_usable_bucket_are_refused() -> None:
    patch = "is not a multiple of 16, the model's patch; use"
    for resolution, keys, expected in (
        (520, None, f"resolution 520 {patch} 512"),
        (512, {"bucket_reso_steps": 40}, f"bucket_reso_steps 40 {patch} 32"),
        (512, {"bucket_reso_steps": 3}, f"bucket_reso_steps 3 {patch} 16"),
        (48, {}, "resolution 48x48 is smaller than bucket_reso_steps 64; set bucket_reso_steps = 16"),
        (512, {"min_bucket_reso": 640}, "min_bucket_reso 640 is larger than resolution 512x512; use at most 512"),
        (512, {"max_bucket_reso": 256}, "max_bucket_reso 256 is smaller than resolution 512x512; use at least 512"),
    ):
        with pytest.raises(UserError) as caught:
            bucketing(resolution, **({} if keys is None else {"enable_bucket": True} | keys))
        assert str(caught.value) == f"d.toml: {expected}"


def test_an_image_too_small_to_be_used_without_upscaling_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        bucketing(512, enable_bucket=True, bucket_no_upscale=True).fit((500, 40), False, "thin.png")
    assert str(caught.value) == (
        "thin.png: 500x40 gives a side below bucket_reso_steps 64; remove the image or set bucket_no_upscale = false"
    )
