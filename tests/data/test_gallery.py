"""The images as training sees them: boxes, what the model is given, captions; and their small pictures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from library.conditions import ConditionKind
from library.config.schema import DatasetArguments
from library.data.config import load_dataset_config
from library.data.gallery import described, hashed_previews, thumbnail_name, write_thumbnails
from library.data.lint import Report
from library.data.samples import Sample, scan
from tests.data.folders import add_image, write_toml
from tests.forked import run_script

ROOT = Path(__file__).resolve().parents[2]


def only(toml: Path, kind: ConditionKind = "none") -> tuple[dict[str, Any], Sample]:
    config = load_dataset_config(toml, DatasetArguments(dataset_config=str(toml)), kind)
    (sample,) = scan(config, 0, 16).train
    (image,) = described(config, Report(1, []), [sample], None)["images"]
    return image, sample


def test_the_box_is_the_part_that_is_trained_on(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png", (128, 64), caption="one two three four")
    image, _ = only(write_toml(tmp_path))
    assert image["box"] == (25.0, 0.0, 50.0, 100.0)  # by hand: the middle half of 128 x 64 at 64 x 64
    assert (image["size"], image["repeats"], image["captions"]) == ((128, 64), 1, ["one two three four"])


def test_a_region_to_fill_is_shown_as_the_model_is_given_it(tmp_path: Path) -> None:
    (tmp_path / "img").mkdir()
    Image.new("RGB", (64, 64), "white").save(tmp_path / "img" / "a.png")
    (tmp_path / "img" / "a.txt").write_text("x")
    mask = Image.new("L", (64, 64))
    mask.paste(255, (0, 0, 32, 64))
    (tmp_path / "m").mkdir()
    mask.save(tmp_path / "m" / "a.png")
    toml = write_toml(tmp_path, subset="image_dir = 'img'\ninpaint_mask_directory = 'm'")
    image, sample = only(toml, "fill")
    ((what, picture),) = hashed_previews(sample, 0)
    shown = np.asarray(picture.convert("RGB")).astype(int)
    assert image["besides"] == [what] == ["given to fill"]
    assert abs(shown[:, :24].mean() - 127.5) < 4  # half grey, zero in [-1, 1]
    assert shown[:, 40:].mean() > 250


def test_control_images_stand_beside_their_image(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    add_image(tmp_path / "from", "a.png", caption=None)
    toml = write_toml(tmp_path, subset="image_dir = 'img'\ncontrol_directory = 'from'")
    assert only(toml, "references")[0]["besides"] == ["control image"]


def test_thumbnails_of_all_kinds(tmp_path: Path) -> None:
    folder, kept = tmp_path / "img", tmp_path / "kept"
    folder.mkdir()
    Image.new("I;16", (600, 300), 32768).save(folder / "deep.png")
    Image.new("CMYK", (600, 300), (0, 255, 255, 0)).save(folder / "cmyk.jpg")
    frames = [Image.new("RGB", (600, 300), colour) for colour in ("blue", "red")]
    frames[0].save(folder / "moves.gif", save_all=True, append_images=frames[1:])
    Image.new("RGBA", (600, 300), (255, 0, 0, 0)).save(folder / "clear.png")
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter to the right
    Image.new("RGB", (600, 300), "lime").save(folder / "turned.jpg", exif=turned)
    Image.new("RGB", (3000, 1), "lime").save(folder / "thin.png")
    (folder / "cut.jpg").write_bytes((folder / "turned.jpg").read_bytes()[:900])
    (folder / "empty.png").touch()
    Image.new("1", (20_000, 10_000)).save(folder / "bomb.png")
    os.mkfifo(folder / "pipe.png")
    wanted = {"deep.png": (128, 128, 128), "cmyk.jpg": (255, 0, 0), "moves.gif": (0, 0, 255), "clear.png": (255,) * 3,
              "turned.jpg": (0, 255, 0), "thin.png": (0, 255, 0)}  # fmt: skip
    bad = ["cut.jpg", "empty.png", "bomb.png", "pipe.png", "absent.png"]
    counted: list[int] = []
    made = named([str(folder / name) for name in (*wanted, *bad[:-1])])
    write_thumbnails(made, kept, counted.append)
    assert sum(counted) == len(made)
    for name, colour in wanted.items():
        with Image.open(kept / made[str(folder / name)]) as small:
            sizes = {"turned.jpg": (192, 384), "thin.png": (384, 1)}
            assert small.size == sizes.get(name, (384, 192)), name
            assert small.getpixel((small.width // 3, small.height // 3)) == pytest.approx(colour, abs=6), name
    assert {path.name for path in kept.iterdir()} == {made[str(folder / name)] for name in wanted}
    assert thumbnail_name(str(folder / bad[-1])) is None


def named(paths: list[str]) -> dict[str, str]:
    return {path: str(thumbnail_name(path)) for path in paths}


def test_thumbnails_are_made_once_and_of_what_is_there(tmp_path: Path) -> None:
    kept, paths = tmp_path / "kept", [str(add_image(tmp_path / "img", f"{n}.png", seed=n)) for n in range(3)]
    first = named(paths)
    write_thumbnails(first, kept, lambda done: None)
    for name in first.values():
        (kept / name).write_bytes(b"as it was")
    (kept / "of somebody else.jpg").touch()
    add_image(tmp_path / "img", "1.png", (80, 64), seed=9)
    again = named(paths[:2])
    write_thumbnails(again, kept, lambda done: None)
    assert again[paths[0]] == first[paths[0]]
    assert again[paths[1]] != first[paths[1]]
    assert (kept / again[paths[0]]).read_bytes() == b"as it was"
    assert {path.name for path in kept.iterdir()} == {*again.values(), "of somebody else.jpg"}


def test_the_command_names_thumbnails_and_stops_at_no_broken_image(tmp_path: Path) -> None:
    for n in range(3):
        add_image(tmp_path / "img", f"{n}.png", (64, 64), caption=f"image {n}", seed=n)
    (tmp_path / "img/2.png").write_bytes(b"no image")
    toml, script = write_toml(tmp_path), ROOT / "tools/check_dataset.py"
    words = [str(toml), "--json", "found.json", "--thumbnails", "kept"]
    done = run_script(script, words, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "making small pictures: 2 of 2" in done.stdout
    images = json.loads((tmp_path / "found.json").read_text())["images"]
    assert [(one["name"], one["thumbnail"] is None) for one in images] == [
        ("0.png", False), ("1.png", False), ("2.png", True)]  # fmt: skip
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {one["thumbnail"] for one in images[:2]}
    refused = run_script(script, [str(toml), "--thumbnails", "kept"], tmp_path)
    assert refused.stderr.splitlines()[-1].startswith("error: --thumbnails: has no effect without --json")
