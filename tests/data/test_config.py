"""Reading kohya's dataset TOML: inheritance, paths, and a clear line for every mistake."""

# ruff: noqa: E501  (messages are written out)

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from library.config.schema import DatasetArguments
from library.data.config import DATASET_KEYS, DatasetConfig, load_dataset_config
from library.data.samples import idle_parts
from library.errors import UserError
from library.files import toml_text

SMALL = "[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = 'img'\n"


def load(folder: Path, text: str, **arguments: object) -> DatasetConfig:
    (folder / "img").mkdir(exist_ok=True)
    path = folder / "d.toml"
    path.write_text(text)
    return load_dataset_config(path, DatasetArguments.model_validate({"dataset_config": str(path)} | arguments))


def message(folder: Path, text: str) -> str:
    with pytest.raises(UserError) as caught:
        load(folder, text)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(folder), "")


def test_keys_go_from_general_to_dataset_to_subset(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
        [general]
        shuffle_caption = true
        keep_tokens = 1
        batch_size = 3
        num_repeats = 2
        [[datasets]]
        resolution = [128, 64]
        keep_tokens = 2
        [[datasets.subsets]]
        image_dir = 'img'
        num_repeats = 5
        [[datasets.subsets]]
        image_dir = 'img'
        shuffle_caption = false
        [[datasets]]
        resolution = 512
        batch_size = 7
        [[datasets.subsets]]
        image_dir = 'img'
        """,
    )
    first, second = config.datasets
    assert (first.resolution, first.settings.batch_size) == ((128, 64), 3)
    assert (second.resolution, second.settings.batch_size) == ((512, 512), 7)
    one, two = (subset.settings for subset in first.subsets)
    assert (one.num_repeats, one.keep_tokens, one.shuffle_caption) == (5, 2, True)
    assert (two.num_repeats, two.keep_tokens, two.shuffle_caption) == (2, 2, False)
    assert second.subsets[0].settings.keep_tokens == 1


def test_batch_size_falls_back_to_train_batch_size(tmp_path: Path) -> None:
    assert load(tmp_path, SMALL, train_batch_size=6).datasets[0].settings.batch_size == 6


VALUES: dict[str, list[Any]] = {
    "resolution": [64, [96, 64]], "batch_size": [2, 3], "cache_directory": ["/a/b", "/a/c"], "flip_aug": [True, False],
    "num_repeats": [1, 7], "caption_extension": [".txt", ""], "trigger_word": ["zwx", "abc"], "keep_tokens": [0, 1],
}  # fmt: skip
OPTIONS = {"batch_size": "train_batch_size", "trigger_word": "trigger_word", "cache_directory": "cache_directory"}


@pytest.mark.parametrize("seed", range(40))
def test_of_each_value_that_is_given_some_dataset_has_it_or_a_line_says_which_wins(seed: int, tmp_path: Path) -> None:
    """sd-scripts' order: subset, dataset, general, what is given beside the file."""
    draw = random.Random(seed)

    def some(share: float) -> dict[str, Any]:
        return {key: draw.choice(values) for key, values in VALUES.items() if draw.random() < share}

    general, given, tables = some(0.2), some(0.7), [(some(0.4), some(0.4)) for _ in range(draw.choice((1, 2)))]
    inner = [{k: v for k, v in subset.items() if k not in DATASET_KEYS} for _, subset in tables]
    datasets = [own | {"subsets": [sub | {"image_dir": "img"}]} for (own, _), sub in zip(tables, inner, strict=True)]
    if any("resolution" not in general | given | own for own, _ in tables):
        given["resolution"] = 64
    as_option = {key: value for key, value in given.items() if key in OPTIONS and draw.random() < 0.7}
    words = {k: ",".join(map(str, v)) if isinstance(v, list) else v for k, v in given.items() if k not in as_option}
    options: dict[str, Any] = {OPTIONS[key]: value for key, value in as_option.items()}
    options["dataset_args"] = [f"{key}={value}" for key, value in words.items()]
    config = load(tmp_path, toml_text({"general": general, "datasets": datasets}), **options)
    had = [{**given, **general, **own, **sub} for (own, _), sub in zip(tables, inner, strict=True)]
    lost = {key: had[0][key] for key, value in given.items() if value not in [each[key] for each in had]}
    lines = {line.partition(": no effect")[0].rpartition(" = ")[0].rpartition(": ")[2]: line for line in idle_parts(config)
             if ", which wins" in line}  # fmt: skip
    assert lines.keys() == {OPTIONS[key] if key in as_option else key for key in lost}
    for key, value in lost.items():
        line = lines[OPTIONS[key] if key in as_option else key]
        assert f"= {json.dumps(given[key])}: no effect" in line
        assert f"{key} = {json.dumps(value)}" in line.partition("d.toml says ")[2]


def test_of_two_options_for_one_key_the_line_names_the_one_that_wins(tmp_path: Path) -> None:
    both = {"train_batch_size": 4, "dataset_args": ["batch_size=3"]}
    assert [*load(tmp_path, SMALL, **both).overridden] == [
        "train_batch_size = 4: no effect, dataset_args says batch_size = 3, which wins"
    ]
    args = {"dataset_args": ["resolution=64"]}
    several = load(tmp_path, SMALL.replace("resolution = 64", "resolutions = [96, [64, 96]]"), **args)
    assert [line.partition("says ")[2] for line in several.overridden] == ["resolutions = [96, [64, 96]], which wins"]


def test_musubi_names_and_its_flat_form_are_read(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "[general]\ncaption_extension = '.txt'\n[[datasets]]\nresolution = [64, 64]\nimage_directory = 'img'\n"
        "cache_directory = 'cached'\nnum_repeats = 3\n",
    )
    (dataset,) = config.datasets
    (subset,) = dataset.subsets
    assert subset.image_dir == tmp_path / "img"
    assert subset.settings.num_repeats == 3
    assert dataset.cache_directory == tmp_path / "cached"


def test_folders_are_found_beside_the_toml_before_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "img").mkdir(parents=True)
    (elsewhere / "only_here").mkdir()
    monkeypatch.chdir(elsewhere)
    assert load(tmp_path, SMALL).datasets[0].subsets[0].image_dir == tmp_path / "img"
    moved = SMALL.replace("'img'", "'only_here'")
    assert load(tmp_path, moved).datasets[0].subsets[0].image_dir == elsewhere / "only_here"


def test_windows_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    assert load(tmp_path, "\ufeff" + SMALL).datasets[0].resolution == (64, 64)


MISTAKES = {
    SMALL + "num_repeat = 2\n": "subset 1: unknown key 'num_repeat'; did you mean 'num_repeats'?",
    SMALL + SMALL + "flip_augs = true\n": "dataset 2, subset 1: unknown key 'flip_augs'; did you mean 'flip_aug'?",
    "[general]\nresolutoin = 5\n" + SMALL: "[general]: unknown key 'resolutoin'; did you mean 'resolution'?",
    SMALL + "batch_size = 2\n": "subset 1: 'batch_size' belongs to [[datasets]]; move it up",
    "[general]\nimage_dir = 'img'\n" + SMALL: "[general]: 'image_dir' belongs to [[datasets.subsets]]; move it down",
    SMALL
    + "caption_dropout_rate = 1.5\n": "subset 1: caption_dropout_rate = 1.5: should be less than or equal to 1; correct the value",
    SMALL.replace(
        "64", "[64]"
    ): "dataset 1: resolution = [64]: should be a number of pixels or [width, height], each from 1 to 16384; correct the value",
    SMALL
    + "resize_interpolation = 'cubick'\n": "subset 1: resize_interpolation = 'cubick': should be 'lanczos', 'area', 'box', 'bicubic', 'cubic', 'bilinear', 'linear' or 'nearest'; correct the value",
    SMALL
    + "color_aug = true\n": "subset 1: 'color_aug' is not taken: images are read once, when their latents are cached; remove it, or add recoloured copies to the folder",
    "[[datasets]]\nresolution = 64\nimage_directory = 'img'\ncontrol_directory = 'c'\n": "dataset 1: 'control_directory' is not taken: this model generates images from text alone; remove it, or choose an edit model",
    SMALL
    + "image_directory = 'img'\n": "subset 1: 'image_directory' means 'image_dir', which is also given; keep one of them",
    SMALL.replace("'img'", "'imgs'"): "subset 1: image_dir 'imgs' does not exist; did you mean 'img'?",
    SMALL.replace(
        "'img'", "'photographs/of/cats'"
    ): "subset 1: image_dir 'photographs/of/cats' does not exist; it is looked for beside the TOML, then in the working directory",
    SMALL.replace("'img'", "'d.toml'"): "subset 1: image_dir 'd.toml' is a file; name a folder",
    SMALL.replace("image_dir", "metadata_file"): "subset 1: metadata_file 'img' is a folder; name a file",
    SMALL.replace(
        "image_dir = 'img'", "num_repeats = 1"
    ): "subset 1: neither image_dir nor metadata_file; name the folder that holds the images",
    SMALL
    + "alpha_mask = true\nconditioning_data_dir = 'img'\n": "subset 1: alpha_mask and conditioning_data_dir both give a mask; keep one of them",
    SMALL.replace(
        "resolution = 64", ""
    ): "no resolution; write e.g. resolution = 1024 below [[datasets]], or in dataset_args",
    "[[datasets]]\nresolution = 64\n": "no [[datasets.subsets]]; add one with image_dir or metadata_file",
    "[general]\nflip_aug = true\n": "no [[datasets]] table; add one with a [[datasets.subsets]] below it",
    "[datasets]\nresolution = 64\n": "[datasets] is one table of several; write it in double brackets: [[datasets]]",
    "[[datasets]]\nresolution = 64\n[datasets.subsets]\nimage_dir = 'img'\n": "dataset 1: subsets must be [[datasets.subsets]] tables; write the double brackets",
    "general = 3\n" + SMALL: "[general] is not a table; write [general] on a line of its own",
    "resolution = 64\n" + SMALL: "'resolution' stands outside every table; put it below [general]",
    "[dataset]\n" + SMALL: "unknown table 'dataset'; did you mean 'datasets'?",
    "[zzz]\n" + SMALL: "unknown table 'zzz'; tables are [general] and [[datasets]]",
}


def test_a_mistake_is_named_with_file_table_key_and_remedy(tmp_path: Path) -> None:
    for text, expected in MISTAKES.items():
        assert message(tmp_path, text) == f"/d.toml: {expected}"


def test_broken_toml_is_named_with_its_line(tmp_path: Path) -> None:
    assert message(tmp_path, SMALL + "flip_aug = \n").startswith("/d.toml line 5: not valid TOML (")
    backslashes = message(tmp_path, SMALL.replace("'img'", '"C:\\unknown"'))
    assert backslashes.startswith("/d.toml")
    assert "not valid TOML" in backslashes


def test_a_toml_that_is_not_there_or_not_text_is_one_line(tmp_path: Path) -> None:
    arguments = DatasetArguments(dataset_config="unused")
    with pytest.raises(UserError, match=r"nowhere\.toml: no such file; check dataset_config$"):
        load_dataset_config(tmp_path / "nowhere.toml", arguments)
    (tmp_path / "latin.toml").write_bytes("x = 'é'".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.toml: not UTF-8 \(byte 5\); save it as UTF-8$"):
        load_dataset_config(tmp_path / "latin.toml", arguments)
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(UserError, match="holds no folder named like '10_name class'; rename"):
        load_dataset_config(tmp_path / "folder.toml", arguments)
