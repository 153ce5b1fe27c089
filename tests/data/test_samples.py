"""Which images are found, held out, repeated and described how."""

# ruff: noqa: E501  (messages are written out)

from __future__ import annotations

import json
import os
import random
from itertools import combinations
from pathlib import Path

import pytest
import torch
from PIL import Image

from library.data.samples import Sample
from library.errors import UserError
from tests.data.folders import add_image, build, cache_all, items, make_image, write_toml


def fill(folder: Path, count: int, **options: object) -> None:
    for i in range(count):
        add_image(folder, f"{i:02d}.png", seed=i, caption=f"number {i}", **options)  # type: ignore[arg-type]


def names(samples: list[Sample]) -> list[str]:
    return [Path(sample.image.path).name for sample in samples]


def refused(folder: Path, toml: Path, **arguments: object) -> str:
    with pytest.raises(UserError) as caught:
        build(toml, **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(folder), "")


def test_images_of_every_suffix_are_found_with_their_captions(tmp_path: Path) -> None:
    every = ["a.png", "b.JPG", "c.jpeg", "d.webp", "e.bmp", "f.avif", "h.tif", "i.TIFF", "j.gif"]
    for name in every:
        add_image(tmp_path / "img", name, caption=f"caption of {name}")
    data = build(write_toml(tmp_path))
    assert names(data.train.samples) == every
    assert [sample.caption for sample in data.train.samples][1] == "caption of b.JPG"


def test_what_is_left_out_is_named_with_its_reason_and_what_systems_leave_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "img"
    add_image(folder, "a.png")
    for name in (
        "a.TXT",
        "a.Caption",
        "notes.docx",
        "clip.mp4",
        "photo.HEIC",
        "b.txt",
        ".DS_Store",
        "Thumbs.db",
        "a.npz",
        "._a.png",
    ):
        (folder / name).write_bytes(b"x")
    (folder / "gone.png").symlink_to(tmp_path / "nowhere.png")
    data = build(write_toml(tmp_path))
    assert names(data.train.samples) == ["a.png"]
    assert [line.replace(str(tmp_path), "") for line in data.warnings] == [
        "/dataset.toml: subset 1: 7 files left out: a.Caption, a.TXT (captions that are not read; caption_extension "
        "says which are); b.txt (captions without an image); clip.mp4, notes.docx, photo.HEIC (not read; save pictures as PNG or JPEG); gone.png (pipes, devices, or links that lead nowhere)"
    ]


NO_FILE = {
    "link": lambda path: path.symlink_to(path.parent / "unmounted"),
    "loop": lambda path: path.symlink_to(path.name),
    "folder": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
}


LISTED = "metadata_file = 'data.jsonl'\nimage_dir = 'img'"
BESIDE = {  # what is there by name and no file -> how the dataset names it
    "img/b.txt": "image_dir = 'img'\nclass_tokens = 'x'",
    "img/b.TXT": "image_dir = 'img'\nclass_tokens = 'x'",
    "masks/b.png": "image_dir = 'img'\nconditioning_data_dir = 'masks'",
    "controls/b.png": "image_dir = 'img'\ncontrol_directory = 'controls'",
    "controls/b_1.png": "image_dir = 'img'\ncontrol_directory = 'controls'",
    "img/c.png": LISTED,
    "controls/c.png": LISTED,
}


@pytest.mark.parametrize("kind", NO_FILE)
@pytest.mark.parametrize("bad", BESIDE)
def test_what_belongs_to_an_image_by_its_name_is_read_or_refused(bad: str, kind: str, tmp_path: Path) -> None:
    if (bad, kind) == ("controls/b_1.png", "folder"):
        pytest.skip("folders of control images are read with recursive")
    for name in ("a.png", "b.png"):
        add_image(tmp_path / "img", name, caption=None if bad.lower() == "img/b.txt" and name[0] == "b" else "a cat")
        for folder in ("masks", "controls"):
            add_image(tmp_path / folder, "b_0.png" if "_1" in bad and name == "b.png" else name, caption=None)
    image, control = ("c.png", "a.png") if bad == "img/c.png" else ("a.png", "c.png")
    (tmp_path / "data.jsonl").write_text(
        json.dumps({"image_path": image, "caption": "x", "control_path": f"controls/{control}"})
    )
    (tmp_path / bad).unlink(missing_ok=True)
    NO_FILE[kind](tmp_path / bad)
    needs = "references" if "control" in bad or "data.jsonl" in BESIDE[bad] else "none"
    said = refused(tmp_path, write_toml(tmp_path, subset=BESIDE[bad]), conditioning=needs)
    assert bad[-5:] in said or "b.png" in said
    assert kind != "link" or said.count("/unmounted") == 1


def test_animations_and_pages_are_noted(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    frames = [make_image(64, 64, seed=seed) for seed in range(4)]
    frames[0].save(tmp_path / "img" / "b.gif", save_all=True, append_images=frames[1:])
    (tmp_path / "img" / "b.txt").write_text("x")
    (note,) = build(write_toml(tmp_path)).warnings
    assert note.endswith("several frames or pages in 1 of 2 images (b.gif: 4); the first of each is trained on")
    assert build(write_toml(tmp_path)).warnings == [note]  # remembered, too


def test_folders_inside_are_read_if_asked_for_and_noted_if_not(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "cat.png", caption="first", seed=1)
    add_image(tmp_path / "img" / "paris", "cat.png", caption="second", seed=2)
    add_image(tmp_path / "img" / "rome" / "night", "cat.png", caption="third", seed=3)
    (tmp_path / "img" / "rome" / "round").symlink_to(tmp_path / "img")  # a loop
    flat = build(write_toml(tmp_path))
    assert flat.captions() == ["first"]
    assert flat.warnings[0].replace(str(tmp_path), "") == (
        "/dataset.toml: subset 1: 2 images in folders inside /img left out (paris/cat.png, rome/night/cat.png); "
        "set recursive = true to train on them"
    )
    data = build(write_toml(tmp_path, subset="image_dir = 'img'\nrecursive = true"))
    assert data.captions() == ["first", "second", "third"]
    assert len({sample.identity for sample in data.train.samples}) == 3
    cache_all(data)
    images = [item.latents for item in items(data.train)]
    assert not any(torch.equal(one, other) for one, other in combinations(images, 2))


def test_a_folder_inside_that_cannot_be_read_is_passed_over_where_it_was_not_asked_for(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "cat.png", caption="first")
    inside = os.open(tmp_path / "img", os.O_RDONLY)
    for _ in range(20):  # whose path is too long for the system
        os.mkdir("x" * 250, dir_fd=inside)
        deeper = os.open("x" * 250, os.O_RDONLY, dir_fd=inside)
        os.close(inside)
        inside = deeper
    os.close(inside)
    assert build(write_toml(tmp_path)).captions() == ["first"]
    assert "cannot be read" in refused(tmp_path, write_toml(tmp_path, subset="image_dir = 'img'\nrecursive = true"))


def test_masks_of_folders_inside_lie_in_the_same_folders(tmp_path: Path) -> None:
    for place, seed in (("a", 1), ("b", 2)):
        add_image(tmp_path / "img" / place, "7.png", seed=seed)
        add_image(tmp_path / "img" / "masks" / place, "7.png", seed=seed + 5, caption=None)
    subset = "image_dir = 'img'\nrecursive = true\nconditioning_data_dir = 'img/masks'"
    data = build(write_toml(tmp_path, subset=subset), masked_loss=True)
    masks = [str(sample.mask.path).replace(str(tmp_path), "") for sample in data.train.samples if sample.mask]
    assert masks == ["/img/masks/a/7.png", "/img/masks/b/7.png"]


def test_control_images_of_folders_inside_lie_in_the_same_folders(tmp_path: Path) -> None:
    for place in ("a", "b"):
        add_image(tmp_path / "img" / place, "7.png")
        add_image(tmp_path / "from" / place, "7_0.png", caption=None)
        add_image(tmp_path / "from" / place, "7_1.png", caption=None)
    subset = "image_dir = 'img'\nrecursive = true\ncontrol_directory = 'from'"
    data = build(write_toml(tmp_path, subset=subset), conditioning="references")
    paths = [[c.file.path.removeprefix(str(tmp_path)) for c in s.control_images] for s in data.train.samples]
    assert paths == [[f"/from/{p}/7_0.png", f"/from/{p}/7_1.png"] for p in ("a", "b")]


def test_only_the_first_line_counts_unless_wildcards_are_on(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png", caption="first\n\nsecond\n")
    assert build(write_toml(tmp_path)).captions() == ["first"]
    assert set(build(write_toml(tmp_path, general="enable_wildcard = true")).captions()) == {"first", "second"}


def test_class_tokens_stand_in_for_missing_captions(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png", caption=None)
    add_image(tmp_path / "img", "b.png", caption="own")
    data = build(write_toml(tmp_path, general="class_tokens = 'a dog'"))
    assert data.captions() == ["a dog", "own"]
    assert data.warnings == []


def test_some_missing_captions_are_noted(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png", caption=None)
    add_image(tmp_path / "img", "b.png", caption="own")
    data = build(write_toml(tmp_path))
    assert data.captions() == ["", "own"]
    (note,) = data.warnings
    assert note.replace(str(tmp_path), "") == (
        "/dataset.toml: subset 1: no .txt file for 1 of 2 images (a.png), trained with an empty caption; "
        "write captions or set class_tokens"
    )
    assert f"note: {note}" in data.describe()


def test_captions_that_are_all_missing_or_empty_are_refused(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png", caption=None)
    toml = write_toml(tmp_path)
    assert refused(tmp_path, toml) == (
        "/dataset.toml: subset 1: no .txt file for any of 1 image; write captions, or set class_tokens to one "
        'caption for all ("" for none)'
    )
    (tmp_path / "img" / "a.caption").write_text("x")
    assert refused(tmp_path, toml).endswith("no .txt file for any of 1 image; set caption_extension = '.caption'")
    (tmp_path / "img" / "a.txt").write_text("\n")
    assert refused(tmp_path, toml) == "/img/a.txt: empty caption; write one, or delete the file to use class_tokens"


def test_an_empty_folder_is_refused_and_folders_inside_are_hinted_at(tmp_path: Path) -> None:
    (tmp_path / "img").mkdir()
    toml = write_toml(tmp_path)
    assert refused(tmp_path, toml) == (
        "/dataset.toml: subset 1: image_dir '/img' holds no images (png, jpg, webp, avif, bmp, tiff, gif); "
        "name the folder that does"
    )
    add_image(tmp_path / "img" / "5_cat", "a.png")
    assert refused(tmp_path, toml).endswith(
        "; 1 in the folders inside (5_cat/a.png, ...); name one of them, or set recursive = true"
    )


def test_json_metadata_names_images_with_or_without_suffix_and_gives_captions_and_tags(tmp_path: Path) -> None:
    fill(tmp_path / "img", 3)
    metadata = {"00.png": {"caption": "a cat", "tags": "red, small"}, "02": {"tags": "blue"}}
    (tmp_path / "meta.json").write_text(json.dumps(metadata))
    data = build(write_toml(tmp_path, subset="image_dir = 'img'\nmetadata_file = 'meta.json'"))
    assert names(data.train.samples) == ["00.png", "02.png"]
    assert data.captions() == ["a cat, red, small", "blue"]


def test_json_lines_metadata_may_name_images_in_folders_below_and_absolute_ones(tmp_path: Path) -> None:
    add_image(tmp_path / "img" / "deep", "a.png")
    elsewhere = add_image(tmp_path / "other", "b.png")
    lines = [
        {"image_path": "deep/a.png", "caption": "one", "image_size": [1, 1]},
        {"image_path": str(elsewhere), "caption": "two"},
    ]
    (tmp_path / "img" / "meta.jsonl").write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    data = build(write_toml(tmp_path, subset="image_jsonl_file = 'img/meta.jsonl'"))
    assert sorted(data.captions()) == ["one", "two"]
    assert {sample.image.size for sample in data.train.samples} == {(64, 64)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"image_path": "../other/b.png", "caption": ""}', ":1: image '../other/b.png' lies outside /img; write its absolute path"),
        ('{"image_path": "aa.png", "caption": ""}', ":1: image 'aa.png' does not exist; did you mean 'a.png'?"),
        ('{"image_path": "zzz/zzz.png", "caption": ""}', ":1: image 'zzz/zzz.png' does not exist; it is looked for in /img/zzz"),
        ('{"caption": ""}', ':1: no "image_path"; write {"image_path": ..., "caption": ...}'),
        ('\n{"image_path": 3}', ':2: no "image_path"; write {"image_path": ..., "caption": ...}'),
        ('{"image_path": "a.png", "caption": 3}', ":1: 'caption' is not a string; write it in quotes"),
        ('{"image_path": "a.png"}', ':1: neither "caption" nor "tags"; add one, or set class_tokens'),
        ('{"image_path": "a.png", "caption": "", "control_path": "c.png"}', ":1: 'control_path' is not taken: this model generates images from text alone; remove it, or choose an edit model"),
        ("", ": no images in it; write one entry an image"),
    ],
)  # fmt: skip
def test_mistakes_in_json_lines_are_named_with_their_line(tmp_path: Path, text: str, expected: str) -> None:
    add_image(tmp_path / "img", "a.png")
    add_image(tmp_path / "other", "b.png")
    (tmp_path / "img" / "m.jsonl").write_text(text)
    toml = write_toml(tmp_path, subset="metadata_file = 'img/m.jsonl'")
    assert refused(tmp_path, toml) == "/img/m.jsonl" + expected


def test_mistakes_in_json_are_one_line(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    toml = write_toml(tmp_path, subset="metadata_file = 'img/m.json'")
    metadata = tmp_path / "img" / "m.json"
    metadata.write_text("{")
    assert refused(tmp_path, toml).startswith("/img/m.json: not valid JSON (")
    metadata.write_text("[]")
    assert refused(tmp_path, toml) == (
        '/img/m.json: not an object; write {"image.png": {"caption": ...}}, or name the file .jsonl'
    )
    metadata.write_text('{"a.png": "a cat"}')
    assert refused(tmp_path, toml) == "/img/m.json: entry 'a.png' is not an object; write {\"caption\": ...}"
    metadata.write_bytes(b"\xff")
    assert refused(tmp_path, toml) == "/img/m.json: not UTF-8 (byte 0); save it as UTF-8"


def test_the_split_holds_out_the_images_sd_scripts_holds_out(tmp_path: Path) -> None:
    fill(tmp_path / "img", 11)
    data = build(write_toml(tmp_path, dataset="validation_split = 0.3\nvalidation_seed = 7"))
    shuffled = [f"{i:02d}.png" for i in range(11)]
    random.Random(7).shuffle(shuffled)  # sd-scripts: random.seed(seed), shuffle, [len - round(len * split):]
    assert data.validation is not None
    assert set(names(data.validation.samples)) == set(shuffled[11 - round(11 * 0.3) :])
    assert set(names(data.train.samples)) == set(shuffled[: 11 - round(11 * 0.3)])


def test_without_a_validation_seed_the_split_follows_from_the_seed(tmp_path: Path) -> None:
    fill(tmp_path / "img", 12)
    toml = write_toml(tmp_path, dataset="validation_split = 0.5")

    def held_out(seed: int) -> list[str]:
        data = build(toml, seed=seed)
        assert data.validation is not None
        return names(data.validation.samples)

    assert held_out(1) == held_out(1) != held_out(2)


def test_auto_holds_out_one_in_ten_of_ten_and_more_but_at_most_eight(tmp_path: Path) -> None:
    folder, auto = tmp_path / "img", "validation_split = 'auto'"
    for count in range(1, 91):
        add_image(folder, f"{count:02d}.png", size=(16, 16), seed=count)
        every = {f"{i:02d}.png" for i in range(1, count + 1)}
        data = build(write_toml(tmp_path, auto if count % 2 else "", general="" if count % 2 else auto), seed=count)
        held = names(data.validation.samples) if data.validation else []
        assert set(names(data.train.samples)) == every - set(held)
        least, most = (1, 8) if count >= 10 else (0, 0)
        assert least <= len(held) == len(set(held)) <= most
        assert 10 * len(held) <= count + 5  # one in ten, rounded
        assert 10 * len(held) >= min(count - 5, 80) or count < 10
        said = [line for line in data.describe() if "held out to validate on; validation_split = 0 trains" in line]
        assert [f" {len(held)} of {count} images" in line for line in said] == [True] * bool(held)
        none = [line for line in data.describe() if 'validation_split = "auto" holds out no image' in line]
        assert len(none) == (not held)
    for without in ("", "validation_split = 0"):  # sd-scripts' datasets train on all that they name
        assert build(write_toml(tmp_path, without)).validation is None


def test_auto_never_holds_out_all_images_of_a_shape(tmp_path: Path) -> None:
    """With any seed, at any resolution; the same images at each."""
    sizes = [(128, 128)] * 9 + [(64, 256), (256, 64), (256, 64), (120, 128), (144, 96)] + [(96, 144)] * 6
    for i, size in enumerate(sizes):
        add_image(tmp_path / "img", f"{i:02d}.png", size=size, seed=i)
    toml = write_toml(tmp_path, "validation_split = 'auto'\nenable_bucket = true")
    text = toml.read_text()
    for seed in range(12):
        held = set[tuple[str, ...]]()
        for resolution in (64, 128):
            toml.write_text(text.replace("resolution = 64", f"resolution = {resolution}"))
            data = build(toml, seed=seed)
            assert data.validation is not None
            trained = {sample.fit.bucket for sample in data.train.samples}
            assert {sample.fit.bucket for sample in data.validation.samples} <= trained
            held.add(tuple(names(data.validation.samples)))
        assert [len(each) for each in held] == [2]


def test_a_split_that_holds_out_nothing_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "img", 4)
    assert refused(tmp_path, write_toml(tmp_path, dataset="validation_split = 0.1")) == (
        "/dataset.toml: validation_split 0.1 holds out none of 4 images; use at least 0.25, or 0"
    )


def test_a_split_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "img", 1)
    assert refused(tmp_path, write_toml(tmp_path, dataset="validation_split = 0.9")) == (
        "/dataset.toml: no images left to train on; lower validation_split or add images"
    )


def reg_toml(folder: Path, training: int, regular: int, repeats: int = 1, reg_repeats: int = 1) -> Path:
    fill(folder / "img", training)
    fill(folder / "reg", regular)
    toml = write_toml(folder, subset=f"image_dir = 'img'\nnum_repeats = {repeats}")
    toml.write_text(
        toml.read_text() + f"[[datasets.subsets]]\nimage_dir = 'reg'\nis_reg = true\nnum_repeats = {reg_repeats}\n"
    )
    return toml


@pytest.mark.parametrize(
    ("training", "repeats", "regular", "reg_repeats", "expected"),
    [
        (2, 5, 3, 1, [4, 3, 3]),  # once each, then round again until there are ten
        (2, 5, 3, 4, [4, 4, 4]),  # the third still begins below ten
        (2, 5, 4, 5, [5, 5]),  # two suffice
        (3, 1, 3, 1, [1, 1, 1]),
    ],
)
def test_regularisation_images_are_balanced_as_in_sd_scripts(
    tmp_path: Path, training: int, repeats: int, regular: int, reg_repeats: int, expected: list[int]
) -> None:
    data = build(reg_toml(tmp_path, training, regular, repeats, reg_repeats), prior=0.5)
    of_reg = [sample for sample in data.train.samples if sample.group.loss_weight == 0.5]
    assert [sample.repeats for sample in of_reg] == expected
    assert len(data.train.samples) - len(of_reg) == training
    assert bool(data.warnings) == (len(expected) < regular)


def test_regularisation_images_alone_are_refused_and_never_held_out(tmp_path: Path) -> None:
    fill(tmp_path / "img", 4)
    assert refused(tmp_path, write_toml(tmp_path, subset="image_dir = 'img'\nis_reg = true")) == (
        "/dataset.toml: only regularisation images (is_reg); add a subset to train on"
    )
    toml = reg_toml(tmp_path, 4, 4)
    toml.write_text(toml.read_text().replace("resolution = 64", "resolution = 64\nvalidation_split = 0.5"))
    data = build(toml)
    assert data.validation is not None
    assert all("/img/" in sample.image.path for sample in data.validation.samples)


def test_the_same_image_listed_twice_counts_twice_with_other_noise(tmp_path: Path) -> None:
    fill(tmp_path / "img", 2)
    toml = write_toml(tmp_path)
    toml.write_text(toml.read_text() + "[[datasets.subsets]]\nimage_dir = 'img'\nnum_repeats = 2\n")
    samples = build(toml).train.samples
    ids = {sample.sample_id(repeat) for sample in samples for repeat in range(sample.repeats)}
    assert len(ids) == 2 + 4


def test_identities_do_not_depend_on_where_the_dataset_lies(tmp_path: Path) -> None:
    ids = []
    for place in ("here", "there"):
        fill(tmp_path / place / "img", 3)
        ids.append([sample.sample_id(0) for sample in build(write_toml(tmp_path / place)).train.samples])
    assert ids[0] == ids[1]


def test_masks_are_found_by_stem(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.jpg")
    add_image(tmp_path / "masks", "a.png", (32, 32), caption=None)
    add_image(tmp_path / "masks", "z.png", caption=None)
    data = build(write_toml(tmp_path, subset="image_dir = 'img'\nconditioning_data_dir = 'masks'"), masked_loss=True)
    (sample,) = data.train.samples
    assert sample.mask is not None
    assert sample.mask.path == str(tmp_path / "masks" / "a.png")
    assert data.warnings[0].replace(str(tmp_path), "") == (
        "/dataset.toml: subset 1: 1 masks in /masks belong to no image, left out (z.png)"
    )


def test_missing_and_misshapen_masks_are_refused(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    (tmp_path / "masks").mkdir()
    toml = write_toml(tmp_path, subset="image_dir = 'img'\nconditioning_data_dir = 'masks'")
    assert refused(tmp_path, toml, masked_loss=True) == (
        "/dataset.toml: subset 1: no mask in conditioning_data_dir /masks for 1 of 1 image (a.png); "
        "add one of the same name, or put images that count whole in another subset"
    )
    add_image(tmp_path / "masks", "a.png", (64, 32), caption=None)
    assert refused(tmp_path, toml, masked_loss=True) == (
        "/masks/a.png: mask of 64x32 for an image of 64x64; save it in the image's proportions"
    )


def test_masks_and_masked_loss_must_agree(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    assert refused(tmp_path, write_toml(tmp_path), masked_loss=True) == (
        "/dataset.toml: masked_loss is set but no subset has masks; set alpha_mask or conditioning_data_dir"
    )
    with_alpha = write_toml(tmp_path, general="alpha_mask = true")
    assert refused(tmp_path, with_alpha) == (
        "/dataset.toml: subset 1: alpha_mask is set but masked_loss is not; set masked_loss = true"
    )


def test_keys_left_without_effect_are_noted(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    data = build(write_toml(tmp_path, dataset="bucket_reso_steps = 64"))
    assert data.warnings[0].endswith("dataset.toml: no effect without enable_bucket: bucket_reso_steps")
    limits = "enable_bucket = true\nbucket_no_upscale = true\nmin_bucket_reso = 64"
    data = build(write_toml(tmp_path, dataset=limits))
    assert data.warnings[0].endswith("dataset.toml: no effect with bucket_no_upscale: min_bucket_reso")
    toml = write_toml(tmp_path, dataset="enable_bucket = true\nbucket_reso_steps = 64")
    second = "\n[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = " + json.dumps(str(tmp_path / "img"))
    toml.write_text(toml.read_text() + second)
    assert not any("no effect" in warning for warning in build(toml).warnings)  # the second has no such key


def test_subsets_of_no_repeats_are_left_out(tmp_path: Path) -> None:
    fill(tmp_path / "img", 2)
    fill(tmp_path / "off", 2)
    toml = write_toml(tmp_path)
    toml.write_text(toml.read_text() + "[[datasets.subsets]]\nimage_dir = 'off'\nnum_repeats = 0\n")
    data = build(toml)
    assert len(data.train) == 2
    assert data.warnings[0].endswith("subset 2: num_repeats = 0, left out")


def test_an_epoch_beyond_ten_million_images_is_refused_in_one_line(tmp_path: Path) -> None:
    fill(tmp_path / "img", 6)
    six = "image_dir = 'img'\nnum_repeats = 1000000"  # they fit once, and not twice
    toml = write_toml(tmp_path, subset=f"{six}\n[[datasets.subsets]]\n{six}")
    assert refused(tmp_path, toml) == (
        "/dataset.toml: an epoch of 12,000,000 images, each as often as num_repeats says; at most 10,000,000 can be "
        "kept in order: lower num_repeats, and train more epochs"
    )
    assert sum(sample.repeats for sample in build(write_toml(tmp_path, subset=six)).train.samples) == 6_000_000


def test_exif_orientation_decides_the_bucket(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "img").mkdir()
    make_image(128, 64).save(tmp_path / "img" / "a.jpg", exif=exif)
    (tmp_path / "img" / "a.txt").write_text("x")
    settings = "enable_bucket = true\nbucket_reso_steps = 16\nmin_bucket_reso = 16"
    data = build(write_toml(tmp_path, dataset=settings))
    assert data.train.samples[0].fit.bucket == (48, 80)


def test_recursive_beside_a_list_of_the_images_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "img"
    folder.mkdir()
    Image.new("RGB", (64, 64)).save(folder / "a.png")
    (folder / "m.jsonl").write_text('{"image_path": "a.png", "caption": "a"}\n')
    toml = write_toml(tmp_path, subset="metadata_file = 'img/m.jsonl'\nrecursive = true")
    assert refused(tmp_path, toml).endswith("recursive: has no effect, metadata_file lists the images; remove it")
