"""Datasets with faults made on purpose: what the check finds, what it does not, and how it is shown."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import library.data.file_index as file_index
from library.config.schema import DatasetArguments
from library.data.config import load_dataset_config
from library.data.lint import Report, check, summarise
from library.data.samples import scan
from library.errors import UserError
from tests.forked import run_script

ROOT = Path(__file__).resolve().parents[2]


def make_image(seed: int, size: tuple[int, int] = (160, 160)) -> Image.Image:
    """An image of soft blobs; no two seeds look alike."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six good images with captions and a TOML; files are old enough to be remembered."""
    (tmp_path / "images").mkdir()
    for i in range(6):
        put(tmp_path, f"{i}.png", make_image(i))
    write_toml(tmp_path)
    return tmp_path


def put(folder: Path, name: str, image: Image.Image, caption: str | None = None, **options: object) -> Path:
    path = folder / "images" / name
    image.save(path, **options)
    path.with_suffix(".txt").write_text(f"an image called {name}" if caption is None else caption)
    past = time.time() - 100
    os.utime(path, (past, past))
    return path


def write_toml(folder: Path, subset: str = "") -> None:
    text = "[[datasets]]\nresolution = 128\nenable_bucket = true\nbucket_reso_steps = 32\n[[datasets.subsets]]\n"
    (folder / "dataset.toml").write_text(f'{text}image_dir = "images"\ncaption_extension = ".txt"\n{subset}\n')


def looked(folder: Path, kind: str = "none") -> Report:
    arguments = DatasetArguments(dataset_config=str(folder / "dataset.toml"))
    config = load_dataset_config(folder / "dataset.toml", arguments, kind)  # type: ignore[arg-type]
    return check(config, 16, lambda *_: lambda _: None)


def found(folder: Path, kind: str) -> list[set[str]]:
    return [{Path(path).name for path in finding.paths} for finding in looked(folder).findings if finding.kind == kind]


def test_a_good_dataset_has_no_findings(folder: Path) -> None:
    report = looked(folder)
    assert report.findings == []
    assert report.images == 6


@pytest.mark.parametrize("name", ["cut.png", "cut.jpg", "cut.webp"])
def test_files_that_end_too_early_are_found(folder: Path, name: str) -> None:
    whole = put(folder, name, make_image(50, (600, 400)))
    whole.write_bytes(whole.read_bytes()[: whole.stat().st_size * 2 // 3])
    assert found(folder, "unreadable") == [{name}]


def test_a_file_that_is_no_image_and_an_empty_one_are_found(folder: Path) -> None:
    for name, content in (("text.png", b"hello"), ("empty.jpg", b"")):
        put(folder, name, make_image(51)).write_bytes(content)
    assert sorted(map(sorted, found(folder, "unreadable"))) == [["empty.jpg"], ["text.png"]]


def test_equal_files_are_found(folder: Path) -> None:
    (folder / "images" / "copy.png").write_bytes((folder / "images" / "2.png").read_bytes())
    (folder / "images" / "copy.txt").write_text("another")
    assert found(folder, "duplicate") == [{"2.png", "copy.png"}]


def test_captions_that_are_empty_or_shared(folder: Path) -> None:
    (folder / "images" / "1.txt").write_text(" \n")
    for name in ("2", "3"):
        (folder / "images" / f"{name}.txt").write_text("the same")
    assert found(folder, "caption") == [{"2.png", "3.png"}]
    assert "empty caption" in found_text(folder, "setup")  # training refuses the file


def test_a_kind_is_counted_in_images_of_an_image_with_its_mask_as_one(folder: Path) -> None:
    for name in ("1", "2", "3"):
        (folder / "images" / f"{name}.txt").write_text("the same")
    put(folder, "copy.png", make_image(4))
    assert [line.partition(" (")[0] for line in looked(folder).lines()] == [
        "the same file twice: 2 images",
        "captions: 3 images",
    ]
    (folder / "masks").mkdir()
    for name in (*map(str, range(6)), "copy"):
        Image.new("L", (160, 90) if name == "0" else (160, 160), 255).save(folder / "masks" / f"{name}.png")
    write_toml(folder, 'conditioning_data_dir = "masks"')
    assert "masks of another shape: 1 image" in looked(folder).lines()[0]


def test_of_an_animation_the_check_says_what_training_says(folder: Path) -> None:
    frames = [make_image(90 + i) for i in range(3)]
    put(folder, "moving.gif", frames[0], save_all=True, append_images=frames[1:])
    for _ in range(2):  # looked at, and remembered
        (note,) = looked(folder).notes
        assert note.endswith(
            "several frames or pages in 1 of 7 images (moving.gif: 3); the first of each is trained on"
        )
    arguments = DatasetArguments(dataset_config=str(folder / "dataset.toml"))
    assert scan(load_dataset_config(folder / "dataset.toml", arguments), 0, 16).warnings == [note]


def test_broken_images_do_not_hide_the_others(folder: Path) -> None:
    """One is no image, one has an empty caption; names as long as file systems allow stay whole."""
    long = f"{'x' * 200}.png"
    put(folder, long, make_image(8)).write_bytes(b"no image")
    put(folder, "still.png", make_image(10), " ")
    script, words = ROOT / "tools/check_dataset.py", ["dataset.toml", "--json", "found.json"]
    done = run_script(script, words, folder, {"COLUMNS": "80"})
    assert done.returncode == 0, done.stderr
    assert f"  {long}: " in done.stdout
    images = json.loads((folder / "found.json").read_text())["images"]
    assert [one["name"] for one in images if one["bucket"] is None] == [long]
    assert len(images) == 8


def test_captions_without_an_ending_are_found_where_training_would_refuse_the_rest(folder: Path) -> None:
    for caption in (folder / "images").glob("*.txt"):
        caption.rename(caption.with_suffix(""))
    (folder / "images" / "0").write_text(" \n")  # an empty caption, at which training stops
    text = (folder / "dataset.toml").read_text()
    (folder / "dataset.toml").write_text(text.replace('caption_extension = ".txt"', 'caption_extension = ""'))
    assert found(folder, "caption") == []
    assert "images/0: empty caption; write one" in found_text(folder, "setup")


BAD = {"latin": "caf\xe9".encode("latin-1"), "sjis": "\u732b".encode("shift-jis"), "utf-32": "cat".encode("utf-32")}
BAD |= {"nul": b"a\0b", "empty": b"", "blank": b" \r\n\t"}


@pytest.mark.parametrize("missing", [False, True])
def test_a_caption_that_cannot_be_used_has_one_finding(folder: Path, missing: bool) -> None:
    for number, text in enumerate(BAD.values()):
        caption = folder / "images" / f"{number}.txt"
        caption.unlink() if missing else caption.write_bytes(text)
    report = looked(folder)
    assert [one.kind for one in report.findings] == ["setup"] * (1 if missing else len(BAD))
    assert report.images == 6


@pytest.mark.parametrize(("count", "share", "unused"), [(10, None, 4), (6, None, 0), (9, 0.25, 2)])
def test_of_regularisation_images_the_check_says_what_training_says(
    folder: Path, count: int, share: float | None, unused: int
) -> None:
    """Of those that stay away without a share 6 are used; of a share's those of two sizes that are seen in turn."""
    (folder / "regular").mkdir()
    for number in range(count):
        size = (160, 160) if number < 7 or share is None else (320, 80)
        make_image(number + 50, size).save(folder / "regular" / f"{number}.png")
    more = '[[datasets.subsets]]\nimage_dir = "regular"\nis_reg = true\nclass_tokens = "a house"'
    write_toml(folder, more)
    config = load_dataset_config(folder / "dataset.toml", DatasetArguments(dataset_config="d"))
    report, trained = check(config, 16, lambda *_: lambda _: None, None, 0, share), scan(config, 0, 16, 1.0, share)
    assert [*report.notes] == trained.warnings
    assert sum(f"{unused} of {count} regularisation images" in note for note in report.notes) == bool(unused)
    assert "at 128x128" in report.sizes[0]
    if share is None:
        assert f"{6 + count - unused} at 128x128" in report.sizes[0]


def found_text(folder: Path, kind: str) -> str:
    return "\n".join(finding.text for finding in looked(folder).findings if finding.kind == kind)


def test_captions_shared_on_purpose_are_not_told(folder: Path) -> None:
    for caption in (folder / "images").glob("*.txt"):
        caption.unlink()
    write_toml(folder, 'class_tokens = "a cat"')
    assert found(folder, "caption") == []


def test_what_is_left_out_is_told_and_is_no_finding(folder: Path) -> None:
    (folder / "images" / "notes.docx").write_text("x")
    report = looked(folder)
    assert report.findings == []
    (note,) = report.notes
    assert note.endswith("1 file left out: notes.docx (not read; save pictures as PNG or JPEG)")


@pytest.mark.parametrize(
    ("subset", "said"),
    [
        ("num_repeats = 0", "no images left to train on; every num_repeats is 0: raise one, or add images"),
        ("validation_split = 1.0", "no images left to train on; lower validation_split or add images"),
        ("validation_split = 0.01", "validation_split 0.01 holds out none of 6 images; use at least 0.17, or 0"),
        ("is_reg = true", "only regularisation images"),
    ],
)
def test_the_check_refuses_what_training_refuses_of_all_images_together(folder: Path, subset: str, said: str) -> None:
    write_toml(folder, subset)
    arguments = DatasetArguments(dataset_config=str(folder / "dataset.toml"))
    with pytest.raises(UserError, match=said) as refused:
        scan(load_dataset_config(folder / "dataset.toml", arguments), 0, 16)
    report = looked(folder)
    assert [(finding.kind, finding.text) for finding in report.findings] == [("setup", str(refused.value))]
    assert not any(" 0 shapes" in line for line in report.sizes)


def test_keys_without_effect_are_told_by_the_check_as_by_training(folder: Path) -> None:
    write_toml(folder, "keep_tokens = 2\nvalidation_seed = 3")
    text = (folder / "dataset.toml").read_text().replace("enable_bucket = true", "bucket_no_upscale = true")
    (folder / "dataset.toml").write_text(text)
    arguments = DatasetArguments(dataset_config=str(folder / "dataset.toml"))
    notes = looked(folder).notes
    assert [*notes] == scan(load_dataset_config(folder / "dataset.toml", arguments), 0, 16).warnings
    assert [note.partition("no effect without ")[2] for note in notes] == [
        "enable_bucket: bucket_no_upscale, bucket_reso_steps",
        "shuffle_caption or caption_tag_dropout_rate: keep_tokens",
        "validation_split: validation_seed",
    ]
    write_toml(folder, "keep_tokens = 2\nvalidation_seed = 3\nshuffle_caption = true\nvalidation_split = 0.5")
    assert looked(folder).notes == ()


@pytest.mark.parametrize(
    "bad", ['{"image_path": "1.png", "caption": ', '{"image": "1.png"}', "[]", '{"image_path": "x.png"}']
)
def test_a_bad_record_hides_no_other(folder: Path, bad: str) -> None:
    records = [json.dumps({"image_path": f"{n}.png", "caption": f"{n}"}) for n in (0, 2, 3)]
    (folder / "images" / "m.jsonl").write_text("\n".join([records[0], bad, records[1], bad, records[2]]))
    write_toml(folder, 'metadata_file = "images/m.jsonl"')
    report = looked(folder)
    assert [(one.kind, one.text.partition("m.jsonl:")[2][:1]) for one in report.findings] == [
        ("setup", "2"),
        ("setup", "4"),
    ]
    assert report.images == 3
    assert "3 at 128x128" in report.sizes[0]
    (folder / "images" / "m.jsonl").write_text(bad)
    assert [(one.kind, one.text.partition("m.jsonl:")[2][:1]) for one in looked(folder).findings] == [("setup", "1")]


def test_what_lies_beside_numbered_folders_is_named(tmp_path: Path) -> None:
    named = ["img/loose.png", "img/photos/b.png", "img/0_x/b.png", "reg/late/c.png"]
    for path in ("img/2_sky/a.png", "img/reg/1_sky/a.png", *named, "reg/1_sky/r.png"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        make_image(0).save(tmp_path / path)
    (tmp_path / "img" / "clip.mp4").write_bytes(b"x")
    told = []
    for regular in ("reg", "img/reg"):
        extra = (f"reg_data_dir={tmp_path / regular}", "resolution=128", "caption_extension=.txt")
        arguments = DatasetArguments(dataset_config=str(tmp_path / "img"), dataset_args=extra)
        lines = scan(load_dataset_config(tmp_path / "img", arguments), 0, 16).warnings
        told.append([line.replace(str(tmp_path), "") for line in lines if "'10_name'" in line])
    why = "(images in no folder called like '10_name')"
    assert told[0] == [
        f"/img: 5 files left out: 0_x/b.png, loose.png, photos/b.png and 1 more {why}; "
        "clip.mp4 (not read; save pictures as PNG or JPEG)",
        f"/reg: 1 file left out: late/c.png {why}",
    ]
    assert "4 files left out" in told[1][0]
    script = ROOT / "tools/check_dataset.py"
    done = run_script(script, ["img", "--dataset_args", "resolution=128", "reg_data_dir=reg"], tmp_path)
    assert told[0][0][1:] in done.stdout
    assert "below [[datasets]], or in dataset_args" in run_script(script, ["img"], tmp_path).stderr


def test_small_images_are_told_with_their_factor(folder: Path) -> None:
    put(folder, "small.png", make_image(60, (64, 64)))
    assert "small.png: 64x64 is enlarged 2.00 times" in found_text(folder, "upscaled")


def test_masks_of_another_shape_and_cut_off(folder: Path) -> None:
    (folder / "masks").mkdir()
    for i in range(6):
        Image.new("L", (160, 160) if i else (160, 90), 255).save(folder / "masks" / f"{i}.png")
    broken = folder / "masks" / "3.png"
    broken.write_bytes(broken.read_bytes()[:-40])
    write_toml(folder, 'conditioning_data_dir = "masks"')
    assert "0.png: 160x90 for an image of 160x160" in found_text(folder, "mask")
    assert {"3.png"} in found(folder, "unreadable")


def test_control_images_of_another_shape(folder: Path) -> None:
    (folder / "controls").mkdir()
    for i in range(6):
        make_image(i + 100, (160, 160) if i else (90, 160)).save(folder / "controls" / f"{i}.png")
    write_toml(folder, 'control_directory = "controls"')
    (finding,) = [f for f in looked(folder, "references").findings if f.kind == "control"]
    assert finding.text == "0.png: 90x160 for an image of 160x160"


def test_the_second_look_opens_nothing_but_what_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = looked(folder)
    opened: list[str] = []
    read_bytes = file_index.read_bytes
    monkeypatch.setattr(file_index, "read_bytes", lambda path: opened.append(path) or read_bytes(path))
    assert looked(folder) == first
    assert opened == []
    put(folder, "3.png", make_image(200))
    looked(folder)
    assert [Path(path).name for path in opened] == ["3.png"]


def test_a_run_says_at_its_start_what_it_knows_without_opening_images(folder: Path) -> None:
    for name in ("1", "2"):
        (folder / "images" / f"{name}.txt").write_text("the same")
    put(folder, "small.png", make_image(60, (64, 64)))
    config = load_dataset_config(folder / "dataset.toml", DatasetArguments(dataset_config="d"))
    assert summarise(scan(config, 0, 16).listed) == [
        "captions: 2 images (1.png, 2.png share the caption 'the same')",
        "smaller than their bucket: 1 image (small.png: 64x64 is enlarged 2.00 times to fill 128x128)",
    ]


def test_strict_leaves_with_an_error_code(folder: Path) -> None:
    put(folder, "small.png", make_image(60, (64, 64)))
    put(folder, "twin.png", make_image(0))
    script = ROOT / "tools/check_dataset.py"
    done = run_script(script, ["dataset.toml"], folder)
    assert done.returncode == 0, done.stderr
    assert "Smaller than their bucket" in done.stdout
    strict = run_script(script, ["dataset.toml", "--strict"], folder)
    assert strict.returncode == 2
    assert strict.stderr.splitlines()[-1].startswith("error: dataset.toml: 2 findings")


def test_what_could_not_be_read_is_looked_at_again(folder: Path) -> None:
    """A share comes back: that changes neither the file's size nor its time."""
    path = folder / "images" / "3.png"
    data = path.read_bytes()
    for content, found_now in ((bytes(len(data)), [{"3.png"}]), (data, [])):
        path.write_bytes(content)
        os.utime(path, ns=(10**18, 10**18))
        assert found(folder, "unreadable") == found_now
