"""What is wrong with masks and control images is said in one line, before anything is encoded where that can be."""

# ruff: noqa: E501  (messages are written out)

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from library.config.model_types import ConditionKind
from library.errors import UserError
from tests.data.folders import AverageEncoder, add_image, build, silent, write_toml


def refused(folder: Path, conditioning: ConditionKind, subset: str = "", dataset: str = "", general: str = "") -> str:
    toml = write_toml(folder, dataset, f"image_dir = 'img'\n{subset}", general)
    with pytest.raises(UserError) as caught:
        build(toml, conditioning=conditioning).cache_latents(AverageEncoder(), 1, silent)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(folder), "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two images, and empty folders beside them."""
    for name in ("a.png", "b.png"):
        add_image(tmp_path / "img", name)
    for name in ("masks", "control"):
        (tmp_path / name).mkdir()
    return tmp_path


TEXT_ONLY = "this model generates images from text alone; remove it, or choose"


@pytest.mark.parametrize(
    ("conditioning", "subset", "message"),
    [
        ("none", "inpaint_masks = ['halves']", f"'inpaint_masks' is not taken: {TEXT_ONLY} a fill model"),
        ("none", "inpaint_alpha_mask = true", f"'inpaint_alpha_mask' is not taken: {TEXT_ONLY} a fill model"),
        ("none", "inpaint_mask_variants = 2", f"'inpaint_mask_variants' is not taken: {TEXT_ONLY} a fill model"),
        ("none", "inpaint_mask_directory = 'masks'", f"'inpaint_mask_directory' is not taken: {TEXT_ONLY} a fill model"),
        ("none", "control_directory = 'control'", f"'control_directory' is not taken: {TEXT_ONLY} an edit model"),
        ("fill", "control_directory = 'control'", "'control_directory' is not taken: this model fills a region of an image; use inpaint_mask_directory, inpaint_alpha_mask or inpaint_masks"),
        ("references", "inpaint_masks = ['halves']", "'inpaint_masks' is not taken: this model edits reference images; use control_directory"),
        ("fill", "inpaint_masks = ['half']", "inpaint_masks = ['half']: should be 'rectangles', 'borders', 'strokes' or 'halves'; correct the value"),
        ("fill", "inpaint_mask_variants = -1", "inpaint_mask_variants = -1: should be greater than or equal to 1; correct the value"),
    ],
)  # fmt: skip
def test_keys_that_the_model_does_not_take_are_refused_with_their_line(
    folder: Path, conditioning: ConditionKind, subset: str, message: str
) -> None:
    assert refused(folder, conditioning, subset) == f"/dataset.toml: subset 1: {message}"


@pytest.mark.parametrize("key", ["control_resolution = 64", "no_resize_control = true"])
def test_control_sizes_belong_to_edit_models(folder: Path, key: str) -> None:
    name = key.partition(" ")[0]
    expected = f"/dataset.toml: dataset 1: '{name}' is not taken: {TEXT_ONLY} an edit model"
    assert refused(folder, "none", dataset=key) == expected


@pytest.mark.parametrize(
    ("conditioning", "subset", "message"),
    [
        ("fill", "inpaint_masks = ['halves']\ninpaint_alpha_mask = true", "inpaint_alpha_mask and inpaint_masks each say which region to fill; keep one of them"),
        ("fill", "inpaint_mask_directory = 'masks'\ninpaint_alpha_mask = true", "inpaint_mask_directory and inpaint_alpha_mask each say which region to fill; keep one of them"),
        ("fill", "inpaint_masks = []", "inpaint_masks = []: names no kind; name some of rectangles, borders, strokes, halves, or remove it"),
        ("fill", "inpaint_mask_directory = 'masks'\ninpaint_mask_variants = 2", "inpaint_mask_variants has no effect with inpaint_mask_directory; remove it"),
        ("fill", "alpha_mask = true\ninpaint_alpha_mask = true", "alpha_mask and inpaint_alpha_mask both read the transparency; keep one of them"),
        ("fill", "random_crop = true", "random_crop: a crop can miss the region to fill; remove it"),
        ("references", "random_crop = true\ncontrol_directory = 'control'", "random_crop: control images are not cropped along; remove it"),
        ("fill", "inpaint_mask_directory = 'mask'", "inpaint_mask_directory 'mask' does not exist; did you mean 'masks'?"),
        ("fill", "inpaint_mask_directory = 'masks'", "no mask in inpaint_mask_directory /masks for 2 of 2 images (a.png, b.png); add an image of the same name, white where to fill"),
        ("references", "", "no control image for 2 of 2 images (a.png, b.png); an edit model needs one for each: add one of the same name, or control_path keys"),
        ("references", "control_directory = 'control'", "no control image in control_directory /control for 2 of 2 images (a.png, b.png); an edit model needs one for each: add one of the same name, or control_path keys"),
    ],
)  # fmt: skip
def test_contradictions_and_missing_files_are_refused(
    folder: Path, conditioning: ConditionKind, subset: str, message: str
) -> None:
    assert refused(folder, conditioning, subset) == f"/dataset.toml: subset 1: {message}"


def test_control_images_are_numbered_from_0_without_gaps_or_not_at_all(folder: Path) -> None:
    add_image(folder / "control", "b.png", caption=None)
    for name in ("a_0.png", "a_2.png"):
        add_image(folder / "control", name, caption=None)
    where = "/dataset.toml: subset 1: control_directory /control holds"
    assert refused(folder, "references", "control_directory = 'control'") == (
        f"{where} no a_1 but higher numbers; count from 0"
    )
    add_image(folder / "control", "a.png", caption=None)
    assert refused(folder, "references", "control_directory = 'control'") == (
        f"{where} a.png and a_0.png; number all of an image's or none"
    )


def test_two_control_images_of_one_number_are_refused(folder: Path) -> None:
    for name in ("a_0.png", "a_00.png", "b.png"):
        add_image(folder / "control", name, caption=None)
    assert refused(folder, "references", "control_directory = 'control'") == (
        "/dataset.toml: subset 1: control_directory /control holds a_0.png and a_00.png, of one number; remove one"
    )


@pytest.mark.parametrize(
    ("conditioning", "key"),
    [("none", "conditioning_data_dir"), ("fill", "inpaint_mask_directory"), ("references", "control_directory")],
)
def test_of_two_files_that_could_be_meant_none_is_taken(folder: Path, conditioning: ConditionKind, key: str) -> None:
    for name in ("a.png", "b.jpg", "b.png", "spare.png", "spare.jpg"):
        Image.new("L", (64, 64), 255).save(folder / "masks" / name)
    said = refused(folder, conditioning, f"{key} = 'masks'")
    assert said == f"/dataset.toml: subset 1: {key} /masks holds b.jpg and b.png, of one name; remove one"
    (folder / "masks" / "b.jpg").rename(folder / "masks" / "b.tga")
    toml = write_toml(folder, subset=f"image_dir = 'img'\n{key} = 'masks'")
    notes = build(toml, masked_loss=conditioning == "none", conditioning=conditioning).warnings
    left_out = f"in {folder}/masks 1 file left out: b.tga (not read; save pictures as PNG or JPEG)"
    assert f"{toml}: subset 1: {left_out}" in notes


def test_a_record_that_names_two_files_is_refused(folder: Path) -> None:
    add_image(folder / "img", "a.jpg")
    (folder / "m.json").write_text('{"a": {"caption": "x"}}')
    said = refused(folder, "none", "metadata_file = 'm.json'")
    assert said == "/m.json: 'a': /img holds a.jpg and a.png, of one name; write which, with its ending"


def test_masks_and_control_images_of_no_image_are_told(folder: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        add_image(folder / "control", name, caption=None)
        Image.new("L", (64, 64), 255).save(folder / "masks" / name)
    subset = "image_dir = 'img'\ncontrol_directory = 'control'"
    (line,) = build(write_toml(folder, subset=subset), conditioning="references").warnings
    assert line.replace(str(folder), "") == (
        "/dataset.toml: subset 1: 1 control images in /control belong to no image, left out (c.png)"
    )
    subset = "image_dir = 'img'\ninpaint_mask_directory = 'masks'"
    line, *_ = build(write_toml(folder, subset=subset), conditioning="fill").warnings
    assert (
        line.replace(str(folder), "")
        == "/dataset.toml: subset 1: 1 masks in /masks belong to no image, left out (c.png)"
    )


def test_an_image_called_like_anothers_numbered_control_image_keeps_its_own(folder: Path) -> None:
    add_image(folder / "img", "a_1.png")
    for name in ("a.png", "a_1.png", "b.png"):
        add_image(folder / "control", name, caption=None)
    data = build(
        write_toml(folder, subset="image_dir = 'img'\ncontrol_directory = 'control'"), conditioning="references"
    )
    names = [[Path(control.file.path).name for control in sample.control_images] for sample in data.train.samples]
    assert names == [["a.png"], ["a_1.png"], ["b.png"]]


def test_a_mask_must_have_its_images_proportions_and_something_white(folder: Path) -> None:
    keys = "inpaint_mask_directory = 'masks'"
    Image.new("L", (64, 64), 100).save(folder / "masks" / "a.png")
    Image.new("L", (64, 32), 255).save(folder / "masks" / "b.png")
    assert refused(folder, "fill", keys) == (
        "/masks/b.png: mask of 64x32 for an image of 64x64; save it in the image's proportions"
    )
    Image.new("L", (32, 32), 255).save(folder / "masks" / "b.png")
    assert refused(folder, "fill", keys) == (
        "/dataset.toml: subset 1: inpaint_mask_directory: one value everywhere (luminance 100), nothing is filled, which "
        "training refuses (a.png): paint white what is to be filled, with inpaint_alpha_mask erase it; or remove the image"
    )


def test_an_opaque_image_has_nothing_to_fill(folder: Path) -> None:
    assert refused(folder, "fill", "inpaint_alpha_mask = true") == (
        "/dataset.toml: subset 1: inpaint_alpha_mask: one value everywhere (alpha 255), nothing is filled, which training "
        "refuses (a.png, b.png): paint white what is to be filled, with inpaint_alpha_mask erase it; or remove the image"
    )


def test_a_control_image_smaller_than_a_patch_is_named(folder: Path) -> None:
    add_image(folder / "control", "a.png", caption=None)
    add_image(folder / "control", "b.png", (64, 15), caption=None)
    assert refused(folder, "references", "control_directory = 'control'", dataset="no_resize_control = true") == (
        "/control/b.png: 64x15 is smaller than a patch of 16; remove no_resize_control"
    )


@pytest.mark.parametrize(
    ("entry", "conditioning", "message"),
    [
        ({"control_path": "c.png"}, "fill", "'control_path' is not taken: this model fills a region of an image; use inpaint_mask_directory, inpaint_alpha_mask or inpaint_masks"),
        ({"control_path_12": "c.png"}, "none", f"'control_path_12' is not taken: {TEXT_ONLY} an edit model"),
        ({"control_path": 3}, "references", "'control_path' is not a string; write the image's path in quotes"),
        ({"control_path": "img/b.png", "control_path_0": "img/b.png"}, "references", "'control_path_0' repeats what another key sets; keep one"),
        ({"control_path_1": "img/b.png"}, "references", "no 'control_path_0' but higher numbers; count from 0"),
        ({"control_path": "img/c.png"}, "references", "control image 'img/c.png' does not exist; did you mean 'b.png'?"),
        ({"control_path": "../c.png"}, "references", "control image '../c.png' lies outside ; write its absolute path"),
    ],
)  # fmt: skip
def test_mistakes_in_json_lines_are_named_with_their_line(
    folder: Path, entry: dict[str, object], conditioning: ConditionKind, message: str
) -> None:
    (folder / "m.jsonl").write_text(json.dumps({"image_path": "a.png", "caption": "x"} | entry))
    assert refused(folder, conditioning, "metadata_file = 'm.jsonl'") == f"/m.jsonl:1: {message}"


def test_musubi_tuners_names_of_single_models_are_read(folder: Path) -> None:
    for name in ("a.png", "b.png"):
        add_image(folder / "control", name, (128, 64), caption=None)
    toml = folder / "dataset.toml"
    toml.write_text(
        "[general]\nresolution = [64, 64]\ncaption_extension = '.txt'\n[[datasets]]\nimage_directory = 'img'\n"
        "control_directory = 'control'\nqwen_image_edit_control_resolution = [96, 96]\n"
        "qwen_image_edit_no_resize_control = true\n"
    )
    data = build(toml, conditioning="references")
    assert np.unique([control.fit.encoded for s in data.train.samples for control in s.control_images]).tolist() == [
        64,
        128,
    ]
    assert (data.control_sizing.resolution, data.control_sizing.keep) == ((96, 96), True)
