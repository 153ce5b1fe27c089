"""The images as training sees them: boxes, what the model is given, captions; and their small pictures."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from library.config.model_types import ConditionKind
from library.config.schema import DatasetArguments
from library.data.caption_edit import Change, Journal, Text, edited, read
from library.data.config import load_dataset_config
from library.data.gallery import described, hashed_previews, thumbnail_name, write_thumbnails
from library.data.lint import Report
from library.data.new_dataset import CAPTION_SUFFIXES, IMAGE_SUFFIXES, add_file, refusal_of, write_dataset
from library.data.samples import Sample, scan
from library.data.sources import is_image
from library.errors import UserError
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


def all_edited(*asked: str) -> list[str]:
    return [edited(text, *asked) for text in ("ohwx man, tall", "a dog, tall\n b", "")]


def test_captions_are_edited_as_text() -> None:
    assert all_edited("replace", "a", r"\1") == [r"ohwx m\1n, t\1ll", "\\1 dog, t\\1ll\n b", ""]
    assert all_edited("replace", "A", "x") == all_edited("replace", "(a+)+$", "x") == all_edited("remove", "TALL", "")
    assert all_edited("before", "", "ohwx") == ["ohwx man, tall", "ohwx, a dog, tall\nohwx,  b", "ohwx"]
    assert all_edited("before", "", "Ohwx")[0] == "Ohwx, ohwx man, tall"
    assert all_edited("before", "", "see ")[0] == "see ohwx man, tall"
    assert all_edited("after", "", ", big") == ["ohwx man, tall, big", "a dog, tall, big\n b, big", "big"]
    assert all_edited("after", "", ", tall") == ["ohwx man, tall", "a dog, tall\n b, tall", "tall"]
    assert all_edited("remove", "tall", "") == ["ohwx man", "a dog\n b", ""]
    for asked in (("replace", "", "x"), ("before", "x", " ,"), ("remove", ",", "x")):
        with pytest.raises(UserError, match="nothing to look for"):
            all_edited(*asked)


@pytest.mark.parametrize(
    "data",
    [b"a dog\r\n b\r\n", b"\xef\xbb\xbfa dog\n", "a dog \u00e9\r b".encode("utf-16"), b"a dog"],
    ids=["line ends", "mark", "UTF-16", "plain"],
)
def test_a_change_keeps_what_is_not_seen_and_can_be_taken_back(tmp_path: Path, data: bytes) -> None:
    path, journal = tmp_path / "a.txt", Journal(tmp_path / "undo.json", Path)
    path.write_bytes(data)
    old = read(path)
    encoding = "utf-16-le" if old.encoding == "utf-16-le" else "utf-8"
    change: Change = (str(path), old.raw, old.changed(old.shown.replace("dog", "cat")), old.encoding)
    assert journal.write("a change", [change]) == []
    wanted = data.replace("dog".encode(encoding), "cat".encode(encoding))
    assert path.read_bytes() == wanted != data
    assert journal.step(back=True) == ("a change", [])
    assert path.read_bytes() == data
    assert journal.step(back=False) == ("a change", [])
    assert path.read_bytes() == wanted
    path.write_bytes(b"by hand")
    assert journal.step(back=True) == ("a change", [str(path)])
    assert journal.write("another", [change]) == [str(path)]
    assert path.read_bytes() == b"by hand"


@pytest.mark.parametrize("others", ["caf\xe9, an hour's work".encode("latin-1"), b"x " * 600_000])
def test_undo_leaves_a_file_of_somebody_elses_alone(tmp_path: Path, others: bytes) -> None:
    path, journal = tmp_path / "a.txt", Journal(tmp_path / "undo.json", Path)
    path.write_text("words\n")
    journal.write("delete", [(str(path), "words\n", None, "utf-8")])
    assert not path.exists()
    path.write_bytes(others)  # what the page cannot read
    assert journal.step(back=True) == ("delete", [str(path)])
    assert path.read_bytes() == others
    assert journal.write("write", [(str(path), None, "more", "utf-8")]) == [str(path)]
    assert path.read_bytes() == others


def test_what_cannot_be_edited_says_why(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\x00")
    (tmp_path / "big.txt").write_bytes(bytes(2**20 + 1))
    assert "not UTF-8" in read(tmp_path / "a.txt").why
    assert "too much" in read(tmp_path / "big.txt").why
    assert "only as" in read(tmp_path / "a.py").why
    assert read(tmp_path / "absent.txt") == Text(None)


def test_neither_torch_nor_the_page_is_imported() -> None:
    code = "import sys, library.data.caption_edit; assert not {'torch', 'library.web', 'PIL'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_added_is_what_training_reads() -> None:
    Image.init()
    for suffix in {*Image.registered_extensions(), *IMAGE_SUFFIXES, ".txt", ".caption", ".zip"}:
        is_taken = refusal_of(f"a{suffix}") is None
        assert is_taken == (is_image(f"a{suffix}") or suffix in CAPTION_SUFFIXES), suffix


@pytest.mark.parametrize(
    ("names", "ending"),
    [((), ".txt"), (("a.txt",), ".txt"), (("a.caption", "a.png"), ".caption"), (("a.caption", "b.txt"), ".txt")],
)
def test_training_reads_what_is_written(tmp_path: Path, names: tuple[str, ...], ending: str) -> None:
    (tmp_path / "images").mkdir()
    for name in names:
        (tmp_path / "images" / name).touch()
    toml = write_dataset(tmp_path, "images", 'a "word" \\x', "512", "3")
    (dataset,) = load_dataset_config(toml, DatasetArguments(dataset_config=str(toml))).datasets
    (subset,) = dataset.subsets
    assert (subset.settings.caption_extension, subset.settings.num_repeats) == (ending, 3)
    assert (subset.settings.trigger_word, dataset.settings.batch_size) == ('a "word" \\x', 1)
    assert dataset.settings.enable_bucket
    assert "trigger_word" not in write_dataset(tmp_path, "images", "", "512", "3").read_text()


def test_no_numbers_write_nothing(tmp_path: Path) -> None:
    for wrong in ("512, 768", "", "x"):
        with pytest.raises(UserError, match="whole numbers"):
            write_dataset(tmp_path / "new", "images", "", wrong, "1")
    assert list(tmp_path.iterdir()) == []


def test_files_are_put_into_a_dataset_over_none(tmp_path: Path) -> None:
    path = tmp_path / "images/a.png"
    assert add_file(path, io.BytesIO(b"first")) is None
    assert str(add_file(path, io.BytesIO(b"other"))).startswith("there is one of this name already")
    assert path.read_bytes() == b"first"
    assert str(add_file(tmp_path / "images/a.txt", io.BytesIO(b" \n"))).startswith("is empty")  # training refuses it
    assert str(refusal_of("IMG_1.HEIC")).startswith("files of this kind are not read here; save a photo as JPEG")

    class Full(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        add_file(tmp_path / "images/b.png", Full())
    assert [file.name for file in path.parent.iterdir()] == ["a.png"]
    names = ("a.PNG", "b.txt", "c.exe", ".h.png", "../x.png", "con.png", "")
    assert [name for name in names if not refusal_of(name)] == ["a.PNG", "b.txt"]
