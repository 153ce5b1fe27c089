"""What captions, records and dataset tables say is used, or it is said that it is not."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from PIL import Image

from library.config.markers import is_nothing
from library.config.schema import DatasetArguments
from library.data.config import (
    INPAINT_KEYS,
    REFERENCE_KEYS,
    REFUSED_KEYS,
    SUBSET_ONLY,
    DatasetConfig,
    DatasetSettings,
    SubsetSettings,
    load_dataset_config,
)
from library.data.gallery import described
from library.data.lint import check
from library.data.samples import Scan, scan
from library.errors import UserError
from library.files import toml_text
from tests.data.folders import add_image, build, silent, write_toml
from tests.forked import run_script
from tests.tiny import tiny_flux_pipeline
from tools.check_dataset import conditioning_of

PLAIN = DatasetArguments(dataset_config="dataset.toml")
ROOT = Path(__file__).resolve().parents[2]
TEXT = "First line.\r\n\r\n  A second paragraph, \u2028 with {a|b}.\nThird."
WHOLE = "First line.\n\n  A second paragraph, \u2028 with {a|b}.\nThird."


def load(toml: Path) -> DatasetConfig:
    return load_dataset_config(toml, DatasetArguments(dataset_config=str(toml)))


def scanned(toml: Path) -> Scan:
    return scan(load(toml), 0, 16)


def trained(toml: Path) -> list[str]:
    """Return every caption that training can ask for."""
    return sorted(build(toml).captions())


KOHYA = "[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = 'img'\n"
MUSUBI = "[[datasets]]\nresolution = 64\nimage_directory = 'img'\n"
OF_JSONL = "[[datasets]]\nresolution = 64\nimage_jsonl_file = 'img/m.jsonl'\n"
OF_JSON = "[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nmetadata_file = 'img/m.json'\n"


@pytest.mark.parametrize(
    ("tables", "general", "wanted", "is_said"),
    [
        (KOHYA, "", ["First line."], True),  # sd-scripts' read_caption: the first line
        (KOHYA, "enable_wildcard = true", ["A second paragraph, \u2028 with a.", "First line.", "Third."], False),
        (KOHYA, "multiline_captions = true", [WHOLE], False),
        (MUSUBI, "", [WHOLE], False),  # musubi-tuner's ImageDirectoryDatasource: all that is read, stripped
        (MUSUBI, "multiline_captions = false", ["First line."], True),
        (OF_JSONL, "", [WHOLE], False),
        (OF_JSON, "", ["First line."], True),
        (OF_JSON, "multiline_captions = true", [WHOLE], False),
    ],
)
def test_lines_of_captions_are_those_of_the_program_that_the_dataset_is_for(
    tmp_path: Path, tables: str, general: str, wanted: list[str], is_said: bool
) -> None:
    add_image(tmp_path / "img", "a.png").with_suffix(".txt").write_bytes(TEXT.encode())
    (tmp_path / "img/m.json").write_text(json.dumps({"a.png": {"caption": TEXT}}))
    (tmp_path / "img/m.jsonl").write_text(json.dumps({"image_path": "a.png", "caption": TEXT}))
    toml = tmp_path / "dataset.toml"
    toml.write_text(f"[general]\ncaption_extension = '.txt'\n{general}\n{tables}")
    captions = {caption.replace("with b", "with a") for caption in trained(toml)}  # what a wildcard draws
    assert sorted(captions) == wanted
    found = [one.text for one in check(load(toml), 16, silent).findings if one.kind == "lines"]
    said = "several lines in the captions of 1 of 1 image (a.png); the first of each is trained on, as in sd-scripts"
    assert [said in text for text in found] == [True] * is_said
    assert all(text in scanned(toml).warnings and "set multiline_captions = true" in text for text in found)


@settings(max_examples=60, deadline=None)
@given(some.text(alphabet="a \n\r\t,b", max_size=30))
def test_a_caption_is_whole_or_the_rest_is_said(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("any")
    add_image(folder / "img", "a.png").with_suffix(".txt").write_bytes(text.encode())
    kohya = write_toml(folder)
    if not text.strip():
        with pytest.raises(UserError, match="empty caption"):
            scanned(kohya)
        return
    found = scanned(kohya)
    words = "".join(found.train[0].caption.split())
    assert words
    assert (words != "".join(text.split())) == any("several lines in the captions" in line for line in found.warnings)
    (whole,) = scanned(write_toml(folder, general="multiline_captions = true")).train
    assert whole.caption == text.strip().replace("\r\n", "\n").replace("\r", "\n")


@pytest.mark.parametrize(
    ("image", "caption"),
    [
        ("cat.png", "cat.TXT"),
        ("Cat.PNG", "cat.txt"),
        (unicodedata.normalize("NFD", "café.png"), unicodedata.normalize("NFC", "café.txt")),
        (unicodedata.normalize("NFC", "café.png"), unicodedata.normalize("NFD", "CAFÉ.Txt")),
    ],
)
def test_a_caption_of_another_case_or_unicode_form_is_the_images(tmp_path: Path, image: str, caption: str) -> None:
    add_image(tmp_path / "img", image, caption=None)
    add_image(tmp_path / "img", "other.png", caption="another")
    (tmp_path / "img" / caption).write_text("its caption")
    toml = write_toml(tmp_path)
    found = scanned(toml)
    assert (sorted(sample.caption for sample in found.train), found.warnings) == (["another", "its caption"], [])
    shown = described(load(toml), check(load(toml), 16, silent), found.train, None)["images"]
    assert str((tmp_path / "img" / caption).resolve()) in {one["caption_file"] for one in shown}  # what the page edits


def test_a_caption_that_is_another_images_or_one_of_two_is_not_taken(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "cat.png", caption="small")
    add_image(tmp_path / "img", "CAT.png", caption=None)
    toml = write_toml(tmp_path)
    found = scanned(toml)
    assert sorted(sample.caption for sample in found.train) == ["", "small"]
    assert "no .txt file for 1 of 2 images (CAT.png)" in found.warnings[0]
    for name in ("Cat.txt", "CaT.txt"):
        (tmp_path / "img" / name).write_text("which?")
    with pytest.raises(UserError, match=r"subset 1: Ca[tT].txt, Ca[tT].txt could all be the caption of CAT.png; keep"):
        scanned(toml)
    assert len(check(load(toml), 16, silent).by_kind()["setup"]) == 1


_KEYS = some.text(some.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1, max_size=12)
_VALUES = some.none() | some.booleans() | some.integers() | some.text(max_size=5) | some.lists(some.integers())


@settings(max_examples=60, deadline=None)
@given(some.dictionaries(_KEYS, _VALUES, max_size=8), some.booleans())
def test_every_unknown_key_of_a_record_is_named(
    tmp_path_factory: pytest.TempPathFactory, more: dict[str, object], as_lines: bool
) -> None:
    known = {"image_path", "caption", "tags", "image_size", "control_path"}
    more = {key: value for key, value in more.items() if key not in known}
    folder = tmp_path_factory.mktemp("any")
    add_image(folder, "a.png")
    entry = more | {"caption": "a cat", "image_size": [64, 64]}
    name = "m.jsonl" if as_lines else "m.json"
    (folder / name).write_text(json.dumps(entry | {"image_path": "a.png"} if as_lines else {"a.png": entry}))
    (said, *others) = [*scanned(write_toml(folder, subset=f"metadata_file = '{name}'")).warnings, ""]
    assert others in ([], [""])
    assert said.startswith(f"{folder / name}: keys that nothing reads: ") == bool(more)
    assert all(f"{key!r} (1 of 1)" in said for key in more)


def test_a_misspelt_key_of_a_record_is_told_the_right_one(tmp_path: Path) -> None:
    add_image(tmp_path, "a.png")
    (tmp_path / "m.jsonl").write_text('{"image_path": "a.png", "tags": "x", "captoin": "a cat"}\n')
    (said,) = scanned(write_toml(tmp_path, subset="metadata_file = 'm.jsonl'")).warnings
    assert said.endswith("m.jsonl: keys that nothing reads: 'captoin' (1 of 1); did you mean 'caption'?")


NOTHING = ["false", "0", "0.0", "''", "[]"]
IDLE = {"network_multiplier": "1.0", "token_warmup_min": "1", "custom_attributes": "{}"}


def test_keys_that_ask_for_nothing_are_passed_over(tmp_path: Path) -> None:
    """What sd-scripts and musubi-tuner write as their defaults; a value that asks for something is refused."""
    add_image(tmp_path / "img", "a.png")
    of_conditions = ["control_directory = ''", "no_resize_control = false", "inpaint_alpha_mask = false"]
    lines = [f"{key} = {value}" for key in REFUSED_KEYS for value in (*NOTHING, *filter(None, [IDLE.get(key)]))]
    paths = ["conditioning_data_dir = ''", "metadata_file = ''", "inpaint_mask_directory = ''"]
    plain = load(write_toml(tmp_path)).datasets
    for line in (*lines, *of_conditions, *paths):
        where = "dataset" if line.split()[0] in ("no_resize_control",) else "subset"
        more = {"dataset": line} if where == "dataset" else {"subset": f"image_dir = 'img'\n{line}"}
        assert load(write_toml(tmp_path, **more)).datasets == plain, line
    for key in REFUSED_KEYS:
        with pytest.raises(UserError, match=f"'{key}' is not taken: "):
            load(write_toml(tmp_path, subset=f"image_dir = 'img'\n{key} = 0.5"))
    args = DatasetArguments(dataset_config="d", dataset_args=["color_aug=false", "network_multiplier=1.0"])
    assert load_dataset_config(write_toml(tmp_path), args).datasets == plain


OF_BOTH = DatasetSettings.model_fields | SubsetSettings.model_fields
IDLE_KEYS = [key for key, field in OF_BOTH.items() if is_nothing(field.get_default()) and key != "image_dir"]


@pytest.mark.parametrize("key", sorted({*IDLE_KEYS} - {"resolution", "validation_seed"}))  # 0 is a seed
def test_a_key_that_is_unset_by_default_is_unset_by_any_nothing(tmp_path: Path, key: str) -> None:
    """In a TOML and in dataset_args; of bucket keys without buckets nothing is said then."""
    add_image(tmp_path / "img", "a.png")
    of_dataset = key in DatasetSettings.model_fields
    plain = load(write_toml(tmp_path)).datasets[0]
    for value in NOTHING:
        dataset, subset = (f"{key} = {value}", "") if of_dataset else ("", f"\n{key} = {value}")
        toml = write_toml(tmp_path, dataset, f"image_dir = 'img'{subset}")
        (found,) = load(toml).datasets
        assert not any("no effect" in line for line in scanned(toml).warnings), value
        assert is_nothing(getattr(found.settings if of_dataset else found.subsets[0].settings, key))
        assert found.bucket_rule == plain.bucket_rule
        if key not in SUBSET_ONLY | {"preserve_class"} and value != "[]":
            asked = PLAIN.model_copy(update={"dataset_args": [f"{key}={value.strip(chr(39))}"]})
            (found,) = load_dataset_config(write_toml(tmp_path), asked).datasets
            assert is_nothing(getattr(found.settings if of_dataset else found.subsets[0].settings, key))
    with pytest.raises(UserError, match="batch_size = 0: "):
        load(write_toml(tmp_path, "batch_size = 0"))


def test_a_fill_mask_that_fills_nothing_is_refused_before_anything_is_encoded(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    (tmp_path / "masks").mkdir()
    Image.new("L", (64, 64), 0).save(tmp_path / "masks/a.png")
    for key in ("inpaint_mask_directory = 'masks'", "inpaint_alpha_mask = true"):
        toml = write_toml(tmp_path, subset=f"image_dir = 'img'\n{key}")
        with pytest.raises(UserError, match=r"nothing is filled, which training refuses \(a.png\): paint white"):
            build(toml, conditioning="fill")
        (finding,) = check(load_dataset_config(toml, PLAIN, "fill"), 16, silent).findings
        assert finding.is_error


def test_a_folder_of_its_own_is_held_out(tmp_path: Path) -> None:
    """As sd-scripts' docs/validation.md says, in a subset of its own; a table of its own is the same."""
    for folder, count in (("img", 4), ("held", 3)):
        for i in range(count):
            add_image(tmp_path / folder, f"{i}.png", seed=i)
    in_a_subset = "image_dir = 'img'\n[[datasets.subsets]]\nimage_dir = 'held'\nvalidation_split = 1.0"
    in_a_table = "image_dir = 'img'\n[[datasets]]\nresolution = 64\nvalidation_split = 1.0\n[[datasets.subsets]]\n"
    for text in (in_a_subset, f"{in_a_table}image_dir = 'held'"):
        data = build(write_toml(tmp_path, subset=text))
        assert data.validation is not None
        assert {Path(one.image.path).parent.name for one in data.train.samples} == {"img"}
        assert {Path(one.image.path).parent.name for one in data.validation.samples} == {"held"}
        assert len(data.validation.samples) == 3
    regular = "image_dir = 'img'\n[[datasets.subsets]]\nimage_dir = 'held'\nis_reg = true\nvalidation_split = 1.0"
    with pytest.raises(UserError, match="validation_split: has no effect on regularisation images"):
        build(write_toml(tmp_path, subset=regular))


def test_a_check_counts_captions_in_the_models_tokens(tmp_path: Path) -> None:
    """T5 of the tiny model reads 24 tokens, of which one is the text's end; a letter is a token, and one begins it."""
    rng = random.Random(1)
    lengths = {f"{i}.png": length for i, length in enumerate((22, 23, 5, 80))}
    for name, length in lengths.items():
        add_image(tmp_path / "img", name, caption="".join(rng.choices("abcdef", k=length)), seed=length)
    values = {"pretrained_model_name_or_path": str(tiny_flux_pipeline(tmp_path / "model")), "max_train_steps": 1}
    values |= {"output_dir": "out", "output_name": "lora", "dataset_config": "another.toml"}
    (tmp_path / "run.toml").write_text(toml_text(values))
    script, toml, flags = (
        ROOT / "tools/check_dataset.py",
        write_toml(tmp_path),
        ["--config_file", "run.toml", "--strict"],
    )
    done = run_script(script, [str(toml), *flags], tmp_path)
    assert done.returncode == 2
    assert (
        "2 of 4 captions are longer than the 23 tokens that the text encoder reads of one; the rest of each is not "
        "trained on: 1.png, 3.png" in " ".join(done.stdout.split())
    )
    for name in ("1.txt", "3.txt"):
        (tmp_path / "img" / name).write_text(f"short {name}")
    assert run_script(script, [str(toml), *flags], tmp_path).returncode == 0


def test_a_check_without_a_model_knows_what_kind_the_dataset_is_for(tmp_path: Path) -> None:
    """By keys, not by names of folders that are called like them, and by the metadata file's records."""
    add_image(tmp_path / "img", "a.png")
    for word in (*INPAINT_KEYS, *REFERENCE_KEYS, "control_path"):
        add_image(tmp_path / word, "a.png")
        toml = write_toml(
            tmp_path, subset=f"image_dir = 'img'\nclass_tokens = '{word}'\nconditioning_data_dir = '{word}'"
        )
        assert conditioning_of(toml, PLAIN) == "none", word
    other = "[[datasets]]\nresolution = 64\nimage_directory = 'img'\nflux_kontext_no_resize_control = true\n"
    (tmp_path / "dataset.toml").write_text(other)  # musubi-tuner's name of a key
    assert conditioning_of(toml, PLAIN) == "references"
    assert (
        conditioning_of(write_toml(tmp_path), PLAIN.model_copy(update={"dataset_args": ["inpaint_blank=black"]}))
        == "fill"
    )
    for record, kind in (({}, "none"), ({"control_path": ""}, "none"), ({"control_path_0": "img/a.png"}, "references")):
        for name in ("m.jsonl", "m.json"):
            entry = {"caption": "x"} | record
            lines = entry | {"image_path": "img/a.png"} if name == "m.jsonl" else {"img/a.png": entry}
            (tmp_path / name).write_text(json.dumps(lines))
            flat = f"[[datasets]]\nresolution = 64\nimage_jsonl_file = '{name}'\n"
            (tmp_path / "dataset.toml").write_text(flat)
            assert conditioning_of(toml, PLAIN) == kind


_E = {form: unicodedata.normalize(form, "Été") for form in ("NFC", "NFD")}


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize(("image", "other"), [(_E["NFC"], _E["NFD"]), (_E["NFD"], _E["NFC"].upper()), ("I", "i")])
def test_masks_control_images_and_records_are_found_as_captions_are(
    tmp_path: Path, image: str, other: str, record: bool
) -> None:
    """In another case or Unicode form, in folders inside too; not where that is another image's, or one of two."""
    add_image(tmp_path / "img" / image, f"{image}.png", caption=None)
    for folder in ("masks", "fills", "c1"):
        add_image(tmp_path / folder / other, f"{other}.PNG" if folder == "masks" else f"{other}.png", caption=None)
    add_image(tmp_path / "c2" / other, f"{other}_0.png", caption=None)
    add_image(tmp_path / "c2" / other, f"{other}_01.png", caption=None)
    (tmp_path / "m.json").write_text(json.dumps({f"{other}/{other}.PNG": {"caption": "x"}, f"{other}/{other}": {}}))
    subset = "recursive = true\nimage_dir = 'img'\nclass_tokens = 'x'\nconditioning_data_dir = 'masks'\n"
    subset += "metadata_file = 'm.json'\n" if record else ""
    for kind, key, folder, wanted in (
        ("fill", "inpaint_mask_directory", "fills", [f"{other}.png"]),
        ("references", "control_directory", "c1", [f"{other}.png"]),
        ("references", "control_directory", "c2", [f"{other}_0.png", f"{other}_01.png"]),
    ):
        toml = write_toml(tmp_path, subset=f"{subset}{key} = '{folder}'")
        found = scan(load_dataset_config(toml, PLAIN, kind), 0, 16)
        assert len(found.train) == (2 if record else 1)
        for sample in found.train:
            assert Path(sample.image.path).name == f"{image}.png"
            names = [Path(file.path).name for file in sample.files[1:]]
            assert names == [f"{other}.PNG", *wanted]
        assert not any("belong to no image" in line for line in found.warnings)
    add_image(tmp_path / "img" / image, f"{other}.png", caption=None)  # which could mean it too
    (tmp_path / "m.json").write_text(json.dumps({f"{image}/{one}.png": {"caption": "x"} for one in (image, other)}))
    with pytest.raises(UserError, match="no mask in conditioning_data_dir"):
        scanned(write_toml(tmp_path, subset=subset))


def test_masks_of_onetrainer_lie_beside_their_images(tmp_path: Path) -> None:
    """They are never trained on (OneTrainer's DataLoaderText2ImageMixin): masks where those are wanted, else named."""
    for name in ("a.png", "b.png"):
        add_image(tmp_path / "img/in", name)
    for name in ("a-masklabel.png", "a-condlabel.png", "c-masklabel.png"):
        add_image(tmp_path / "img/in", name, caption=None)
    (tmp_path / "m.json").write_text(json.dumps({"in/a.png": {"caption": "x"}, "in/b.png": {"caption": "x"}}))
    for more in ("", "\nmetadata_file = 'm.json'"):
        subset = f"image_dir = 'img'\nrecursive = true{more}"
        found = scanned(write_toml(tmp_path, subset=subset))
        assert [Path(sample.image.path).name for sample in found.train] == ["a.png", "b.png"]
        named = "in/a-condlabel.png, in/a-masklabel.png, in/c-masklabel.png (of OneTrainer; "
        assert any(named in line for line in found.warnings)
        found = scanned(write_toml(tmp_path, subset=f"{subset}\nconditioning_data_dir = 'img'"))
        masks = [sample.mask and Path(sample.mask.path).name for sample in found.train]
        assert masks == ["a-masklabel.png", None]
        said = "\n".join(found.warnings)
        assert "no -masklabel file for 1 of 2 images (in/b.png), which count whole" in said
        assert "in/a-condlabel.png (of" in said
        assert f"1 masks in {tmp_path}/img belong to no image, left out (in/c-masklabel.png)" in said
        fill = write_toml(tmp_path, subset=f"{subset}\ninpaint_mask_directory = 'img'")
        with pytest.raises(UserError, match=r"no mask in inpaint_mask_directory .* for 1 of 2 images \(in/b.png\)"):
            scan(load_dataset_config(fill, PLAIN, "fill"), 0, 16)


@pytest.mark.parametrize("seed", range(4))
def test_what_lies_beside_the_images_of_a_metadata_file_is_named(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    stems = [f"{folder}{letter}" for folder in ("", "sub/") for letter in "abcd"]
    for name in stems:
        add_image((tmp_path / "img" / name).parent, f"{name[-1]}.png", caption="x" if draw.random() < 0.5 else None)
    listed = draw.sample(stems, 4)
    (tmp_path / "m.json").write_text(json.dumps({f"{name}.png": {"caption": name} for name in listed}))
    found = scanned(write_toml(tmp_path, subset="image_dir = 'img'\nmetadata_file = 'm.json'"))
    assert sorted(sample.caption for sample in found.train) == sorted(listed)
    inside = any("/" in name for name in listed)
    there = [path for path in (tmp_path / "img").rglob("*.*") if inside or path.parent.name == "img"]
    there = [path for path in there if ".tandem_cache" not in path.parts]
    (line,) = found.warnings
    assert f"{len(there) - sum(inside or '/' not in name for name in listed)} files left out: " in line
    assert "(not in metadata_file)" in line


def test_recursive_without_effect_is_refused_in_each_form(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png")
    (tmp_path / "m.jsonl").write_text('{"image_path": "img/a.png", "caption": "x"}\n')
    lines = "metadata_file = 'm.jsonl'\nrecursive = true"
    toml = write_toml(tmp_path, subset=lines)
    for text in (toml.read_text(), toml.read_text().replace("[[datasets.subsets]]\nmetadata_file", "image_jsonl_file")):
        toml.write_text(text)
        with pytest.raises(UserError, match="recursive: has no effect, metadata_file lists the images; remove it"):
            load(toml)
