"""Mask files: which part of a file is the mask, whether it is a loss mask or a fill model's, and what is said of it."""

from __future__ import annotations

import io
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from library.config.schema import DatasetArguments
from library.data.config import load_dataset_config
from library.data.lint import Report, check
from library.data.mask_files import look_at_mask, read_mask
from library.data.samples import scan
from library.errors import UserError
from tests.data.folders import add_image, build, cache_all, items, make_old, write_toml
from tests.forked import run_script

ROOT = Path(__file__).resolve().parents[2]
SIDE = 64
LOSS, FILL = "conditioning_data_dir", "inpaint_mask_directory"
SHAPE = np.zeros((SIDE, SIDE), np.uint8)
SHAPE[8:40, 16:48] = 255
FULL = np.full_like(SHAPE, 255)


def written(levels: NDArray[np.uint8], how: str) -> Image.Image:
    """``levels`` as programs save masks: grey, 16-bit, an opaque or half-transparent layer, or a brush of a colour."""
    grey = Image.fromarray(levels)
    if how == "L":
        return grey
    if how == "16 bit":
        return Image.fromarray(levels.astype(np.uint16) * 257)
    if how in ("RGB", "P"):
        return grey.convert(how)
    if how.startswith("layer"):
        layer = grey.convert("RGBA")
        layer.putalpha(int(how.split()[1]))
        return layer
    brush = Image.new("RGBA", grey.size, how.split()[1])
    brush.putalpha(grey)
    return brush


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


WAYS = ["L", "16 bit", "RGB", "P", "layer 255", "layer 128", "brush white", "brush black", "brush red"]


@given(how=st.sampled_from(WAYS), seed=st.integers(0, 1000), low=st.integers(0, 200))
def test_a_mask_means_the_same_however_it_is_saved(how: str, seed: int, low: int) -> None:
    levels = np.random.default_rng(seed).integers(low, 256, (5, 7)).astype(np.uint8)
    levels[0, :2] = low, 255  # it varies
    mask, source, doubt = read_mask(png(written(levels, how)), "x")
    assert np.array_equal(np.asarray(mask), levels)
    assert (source, doubt) == ("alpha" if how.startswith("brush") else "luminance", "")


@given(colour=st.tuples(*[st.integers(0, 255)] * 3), beside_white=st.booleans())
def test_a_mask_that_counts_otherwise_than_black_and_white_says_so(
    colour: tuple[int, int, int], beside_white: bool
) -> None:
    """Of any colour on black the red that sd-scripts takes, and the white that is meant, are near, or it is said."""
    levels = np.zeros((9, 9, 3), np.uint8)
    levels[2:5, 2:5] = colour
    levels[6:, 6:] = 255 * beside_white
    with TemporaryDirectory() as folder:
        path = Path(folder, "a.png")
        Image.fromarray(levels).save(path)
        remark = look_at_mask(str(path), "conditioning_data_dir")[1]
    faint = "" if beside_white else "its brightest value is "
    assert bool(remark) == (np.ptp(colour) > 32 or (not beside_white and luminance(colour) < 223))
    assert ("coloured" in remark) == (np.ptp(colour) > 32 and (beside_white or luminance(colour) > 8))
    assert (faint in remark) == (beside_white or 8 < luminance(colour) < 223)


def luminance(colour: tuple[int, int, int]) -> int:
    """ITU-R 601-2, as Pillow's documentation has it, in its fixed-point numbers."""
    return (colour[0] * 19595 + colour[1] * 38470 + colour[2] * 7471 + 0x8000) >> 16


def dataset(folder: Path, key: str, image: Image.Image, mask: Image.Image | None) -> str:
    """A dataset of one image; returns the kind of its model."""
    add_image(folder / "img", "a.png", image.size)
    image.save(folder / "img" / "a.png")
    make_old(folder / "img" / "a.png")
    subset = f"image_dir = 'img'\n{key} = " + ("'masks'" if mask else "true")
    if mask:
        (folder / "masks").mkdir(exist_ok=True)
        mask.save(folder / "masks" / "a.png")
        make_old(folder / "masks" / "a.png")
    write_toml(folder, subset=subset)
    return "fill" if key.startswith("inpaint") else "none"


def reported(folder: Path, kind: str) -> tuple[Report, list[str]]:
    """What check_dataset finds, and what a run says as it starts, if only why it does not."""
    path = folder / "dataset.toml"
    config = load_dataset_config(path, DatasetArguments(dataset_config=str(path)), kind)  # type: ignore[arg-type]
    first = check(config, 16, lambda *_: lambda _: None)
    again = check(config, 16, lambda *_: lambda _: None)
    assert (first.findings, first.notes) == (again.findings, again.notes)  # remembered
    try:
        return first, scan(config, 0, 16).warnings
    except UserError as error:
        return first, [*first.notes, str(error).partition(": paint white")[0]]


PHOTO = Image.fromarray(np.random.default_rng(1).integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8))


def cut_out(alpha: NDArray[np.uint8]) -> Image.Image:
    image = PHOTO.convert("RGBA")
    image.putalpha(Image.fromarray(alpha))
    return image


WHOLE = "all of the image counts alike, as without a mask"
NOTHING = "nothing of the image counts in the loss"
FILLED, REFUSED = "all of the image is filled", "nothing is filled, which training refuses"


@pytest.mark.parametrize(
    ("key", "image", "mask", "text"),
    [
        (LOSS, PHOTO, written(SHAPE, "L"), ""),
        (LOSS, PHOTO, written(SHAPE, "brush white"), ""),
        (LOSS, PHOTO, written(0 * SHAPE, "L"), f"one value everywhere (luminance 0), {NOTHING}"),
        (LOSS, PHOTO, written(FULL, "L"), f"one value everywhere (luminance 255), {WHOLE}"),
        (LOSS, PHOTO, written(FULL // 2, "layer 255"), f"one value everywhere (luminance 127), {WHOLE}"),
        (LOSS, PHOTO, written(0 * SHAPE, "brush white"), f"one value everywhere (alpha 0), {NOTHING}"),
        (LOSS, PHOTO, cut_out(SHAPE), "its colours have a shape too: its alpha counts, what is opaque"),
        (LOSS, PHOTO, PHOTO, "coloured: its luminance counts, where sd-scripts takes red"),
        (LOSS, PHOTO, written(SHAPE // 3, "L"), "its brightest value is 85 of 255, which counts 33%"),
        ("alpha_mask", cut_out(SHAPE // 3), None, "its brightest value is 85 of 255, which counts 33%"),
        (FILL, PHOTO, written(SHAPE, "brush black"), ""),
        (FILL, PHOTO, written(SHAPE // 3, "L"), f"one value everywhere (luminance 0 to 85), {REFUSED}"),
        (FILL, PHOTO, written(SHAPE // 8 + 200, "L"), f"one value everywhere (luminance 200 to 231), {FILLED}"),
        ("alpha_mask", cut_out(SHAPE), None, ""),
        ("alpha_mask", PHOTO, None, f"one value everywhere (alpha 255), {WHOLE}"),
        ("alpha_mask", cut_out(0 * SHAPE), None, f"one value everywhere (alpha 0), {NOTHING}"),
        ("inpaint_alpha_mask", cut_out(SHAPE), None, ""),
        ("inpaint_alpha_mask", cut_out(FULL), None, f"one value everywhere (alpha 255), {REFUSED}"),
        ("inpaint_alpha_mask", cut_out(0 * SHAPE), None, f"one value everywhere (alpha 0), {FILLED}"),
    ],
)
def test_what_a_mask_says_is_a_finding_and_a_line_of_the_run(
    tmp_path: Path, key: str, image: Image.Image, mask: Image.Image | None, text: str
) -> None:
    report, lines = reported(tmp_path, dataset(tmp_path, key, image, mask))
    expected = f"{key}: {text}"
    assert [finding.text for finding in report.findings] == [f"a.png: {expected}"] * bool(text)
    assert [finding.is_error for finding in report.findings] == [REFUSED in text] * bool(text)
    assert [line.partition("subset 1: ")[2] for line in lines if "a.png" in line] == [f"{expected} (a.png)"] * bool(
        text
    )
    if mask is not None:
        by_alpha = mask.mode == "RGBA" and text not in (f"one value everywhere (luminance 127), {WHOLE}",)
        used = f"{int(by_alpha)} by alpha (opaque counts), {int(not by_alpha)} by luminance (white counts)"
        (said,) = report.notes
        assert said.endswith(f"{key}: 1 mask read, {used}")
        assert said in lines


def test_what_counts_may_be_cropped_away(tmp_path: Path) -> None:
    edge = np.zeros((SIDE, 4 * SIDE), np.uint8)
    edge[:, :8] = 255  # the square that is trained on is in the middle
    kind = dataset(tmp_path, LOSS, PHOTO.resize((4 * SIDE, SIDE)), Image.fromarray(edge))
    report, lines = reported(tmp_path, kind)
    assert [one.text for one in report.findings] == [f"a.png: {LOSS}: what counts is cropped away, {NOTHING}"]
    assert any(NOTHING in line for line in lines)


def test_strict_fails_on_a_mask_without_a_shape(tmp_path: Path) -> None:
    dataset(tmp_path, LOSS, PHOTO, written(FULL, "L"))
    done = run_script(ROOT / "tools/check_dataset.py", ["dataset.toml", "--strict"], tmp_path)
    assert done.returncode == 2, done.stderr
    assert "Masks that say little: 1 image" in done.stdout


@pytest.mark.parametrize("how", ["brush white", "layer 255"])
def test_the_cached_loss_mask_is_what_the_file_means(tmp_path: Path, how: str) -> None:
    """On 5327b3c8 a white brush on an empty layer was white everywhere: no mask at all."""
    dataset(tmp_path, LOSS, PHOTO, written(SHAPE, how))
    data = build(tmp_path / "dataset.toml", masked_loss=True)
    cache_all(data)
    (item,) = items(data.train)
    assert item.mask is not None
    assert np.array_equal(item.mask[0].numpy(), SHAPE[4::8, 4::8] / 255)
