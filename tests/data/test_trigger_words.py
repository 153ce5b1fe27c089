"""Trigger words: where they stand in a caption, who gets one, and what is said of them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from library.config.schema import DatasetArguments
from library.data.captions import caption_variants, choose_caption, has_word, plain_caption, replace_word, words_around
from library.data.config import DatasetConfig, SubsetSettings, load_dataset_config
from library.data.lint import check
from library.errors import UserError
from library.models.flux.files import FLUX_TARGETS
from library.training.checkpoint.metadata import dataset_facts, trigger_phrase
from networks.files.metadata import build_metadata
from tests.data.folders import add_image, build, write_toml


def rules(**settings: object) -> SubsetSettings:
    return SubsetSettings(trigger_word="zorbo", **settings)


def load(toml: Path, **arguments: object) -> DatasetConfig:
    return load_dataset_config(toml, DatasetArguments.model_validate({"dataset_config": str(toml)} | arguments))


def words(config: DatasetConfig) -> list[tuple[str | None, str | None]]:
    subsets = [subset.settings for dataset in config.datasets for subset in dataset.subsets]
    return [(settings.trigger_word, settings.preserve_class) for settings in subsets]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a red house", "zorbo, a red house"),
        ("a photo of Zorbo, red", "a photo of Zorbo, red"),
        ("zorbo's hat", "zorbo's hat"),
        ("zorbos everywhere", "zorbo, zorbos everywhere"),
        ("un-zorbo-like", "un-zorbo-like"),
        ("a [trigger] and another [trigger]", "a zorbo and another zorbo"),
        ("", "zorbo"),
        ("一只zorbo在草地上", "一只zorbo在草地上"),
        ("zorbo가 있다", "zorbo가 있다"),
        ("ça zorboé", "zorbo, ça zorboé"),
    ],
)
def test_a_caption_holds_the_trigger_word_once_it_is_put_in(raw: str, expected: str) -> None:
    assert plain_caption(raw, rules()) == expected


def test_the_word_is_put_in_after_prefix_wildcards_and_shuffling() -> None:
    assert plain_caption("red", rules(caption_prefix="a photo of [trigger]", caption_separator=";")) == (
        "a photo of zorbo red"
    )
    assert plain_caption("a; b", rules(caption_separator=";")) == "zorbo; a; b"
    assert set(caption_variants("a {[trigger]|cat}", rules(enable_wildcard=True), 20)) == {"a zorbo", "zorbo, a cat"}
    for variant in caption_variants("one, two, [trigger], three", rules(shuffle_caption=True), 8):
        assert sorted(variant.split(", ")) == ["one", "three", "two", "zorbo"]
    for variant in caption_variants("one, two, three", rules(shuffle_caption=True), 8):
        assert variant.startswith("zorbo, ")


def test_a_dropped_caption_stays_empty_and_one_whose_tags_all_drop_is_the_word() -> None:
    dropping = rules(caption_dropout_rate=1.0)
    assert choose_caption(caption_variants("a", dropping, 8), dropping, 0, 0, 1) == ""
    assert caption_variants("a, b", rules(caption_tag_dropout_rate=1.0), 8) == ("zorbo",)


def test_words_are_found_and_replaced_whole_and_in_any_case() -> None:
    assert replace_word("A Zorbo man; zorbos, ZORBO.", "zorbo", r"\1 person") == r"A \1 person man; zorbos, \1 person."
    assert has_word("a photo of zorbo man outside", "Zorbo Man")
    assert not has_word("zorbo mane", "zorbo man")
    assert has_word("a <z*> thing", "<z*>")
    assert words_around("Art, a cartoon of smart art; heart", "art") == {"cartoon", "smart", "heart"}


def test_looking_for_longer_words_takes_no_more_time_than_the_text_is_long() -> None:
    start = time.perf_counter()
    assert words_around("a" * 2**19, "zorbo") == set()
    assert time.perf_counter() - start < 5  # 0.1 s; hours if every letter began a search of its own


def test_the_nearest_trigger_word_counts_and_the_trainings_is_the_last(tmp_path: Path) -> None:
    for name in ("img", "other", "plain", "reg"):
        add_image(tmp_path / name, "a.png")
    subsets = "image_dir = 'img'\n" + "".join(
        f"[[datasets.subsets]]\nimage_dir = '{name}'\n{more}\n"
        for name, more in (
            ("other", "trigger_word = ' blorp '"),
            ("plain", "trigger_word = ''"),
            ("reg", "is_reg = true"),
        )
    )
    toml = write_toml(tmp_path, subset=subsets)
    own = [("blorp", None), ("", None), (None, None)]
    assert words(load(toml)) == [(None, None), *own]
    assert words(load(toml, trigger_word="zorbo")) == [("zorbo", None), *own]
    toml = write_toml(tmp_path, subset=subsets, general="trigger_word = 'quux'\npreserve_class = 'disc'")
    expected = [("quux", "disc"), ("blorp", "disc"), ("", None), (None, None)]
    assert words(load(toml, trigger_word="zorbo")) == expected
    assert trigger_phrase(load(toml)) == "quux, blorp"


@pytest.mark.parametrize(
    ("subset", "general", "expected"),
    [
        ("is_reg = true\ntrigger_word = 'zorbo'", "", "subset 1: trigger_word: has no effect on regularisation images"),
        ("preserve_class = 'disc'", "", "subset 1: preserve_class: has no effect without trigger_word"),
        ("", "preserve_class = 'disc'", "preserve_class: has no effect, no subset has a trigger_word; set one"),
    ],
)
def test_a_word_without_effect_is_refused(tmp_path: Path, subset: str, general: str, expected: str) -> None:
    add_image(tmp_path / "img", "a.png")
    with pytest.raises(UserError) as caught:
        load(write_toml(tmp_path, subset=f"image_dir = 'img'\n{subset}", general=general))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_concept_has_its_word_its_class_and_its_repeats(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png", caption="on grass", seed=1)
    add_image(tmp_path / "dog", "b.png", caption="[trigger] asleep", seed=2)
    add_image(tmp_path / "both", "c.png", caption="zorbo and blorp", seed=3)
    subsets = [
        "image_dir = 'img'\ntrigger_word = 'zorbo'\npreserve_class = 'man'\nnum_repeats = 4",
        "image_dir = 'dog'\ntrigger_word = 'blorp'\npreserve_class = 'dog'\nnum_repeats = 3",
        "image_dir = 'both'\nnum_repeats = 2",
    ]
    data = build(write_toml(tmp_path, subset="\n[[datasets.subsets]]\n".join(subsets)))
    captions = {caption for sample in data.train.samples for caption in data.train.captions_of(sample)}
    assert captions == {"zorbo, on grass", "blorp asleep", "zorbo and blorp"}
    assert [(s.settings.preserve_class, s.repeats) for s in data.train.samples] == [("man", 4), ("dog", 3), (None, 2)]
    assert trigger_phrase(data.config) == "zorbo, blorp"


def test_the_mark_without_a_word_is_refused_with_the_images(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png", caption="a cat")
    add_image(tmp_path / "img", "b.png", caption="a [trigger]")
    with pytest.raises(UserError, match=r"\[trigger\] in the captions of 1 of 2 images \(b\.png\); set trigger_word"):
        build(write_toml(tmp_path))
    assert set(build(write_toml(tmp_path), trigger_word="zorbo").captions()) == {"zorbo, a cat", "a zorbo"}


def test_images_without_captions_are_trained_with_the_word_alone_unless_captions_have_another_ending(
    tmp_path: Path,
) -> None:
    add_image(tmp_path / "img", "a.png", caption=None)
    data = build(write_toml(tmp_path), trigger_word="zorbo")
    assert data.captions() == ["zorbo"]
    assert any("no .txt file for 1 of 1 image (a.png), trained with the trigger word alone" in w for w in data.warnings)
    (tmp_path / "img" / "a.caption").write_text("a cat")
    with pytest.raises(UserError, match=r"no \.txt file for any of 1 image; set caption_extension = '\.caption'"):
        build(write_toml(tmp_path), trigger_word="zorbo")


def test_an_entry_without_a_caption_is_the_word_alone(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png", caption=None)
    (tmp_path / "list.jsonl").write_text(json.dumps({"image_path": "img/a.png"}))
    assert build(write_toml(tmp_path, subset="metadata_file = 'list.jsonl'\ntrigger_word = 'zorbo'")).captions() == [
        "zorbo"
    ]


def test_the_check_counts_where_the_word_is_put_and_warns_where_it_means_something_else(tmp_path: Path) -> None:
    for number, caption in enumerate(("an art piece", "a cartoon", "two cartoons", "smart")):
        add_image(tmp_path / "img", f"{number}.png", caption=caption, seed=number)
    add_image(tmp_path / "reg", "r.png", caption="modern art", seed=9)
    subset = "image_dir = 'img'\ntrigger_word = 'art'\npreserve_class = 'drawing'\n"
    toml = write_toml(tmp_path, subset=f"{subset}[[datasets.subsets]]\nimage_dir = 'reg'\nis_reg = true")
    report = check(load(toml), 16, lambda *_: lambda _: None)
    assert f"{toml}: subset 1: trigger word 'art' (preserve_class 'drawing') put in front of 3 of 4 captions" in (
        report.notes
    )
    texts = [finding.text for finding in report.by_kind()["trigger"]]
    assert texts == [
        "r.png: a caption of regularisation images says 'art', the trigger word",
        "1.png: the trigger word 'art' is part of 'cartoon'; a rarer one is told apart",
        "2.png: the trigger word 'art' is part of 'cartoons'; a rarer one is told apart",
        "3.png: the trigger word 'art' is part of 'smart'; a rarer one is told apart",
    ]


def test_the_file_names_the_word_unless_a_person_did(tmp_path: Path) -> None:
    add_image(tmp_path / "img", "a.png", caption="red, round")
    data = build(write_toml(tmp_path), trigger_word="zorbo")
    assert json.loads(str(dataset_facts(data, 1)["tag_frequency"])) == {"img": {"zorbo": 1, "red": 1, "round": 1}}
    phrase = trigger_phrase(data.config)
    metadata = build_metadata({}, FLUX_TARGETS, title="t", timestamp=0, spec={"trigger_phrase": phrase})
    assert metadata["modelspec.trigger_phrase"] == "zorbo"
    none = build_metadata({}, FLUX_TARGETS, title="t", timestamp=0, spec={"trigger_phrase": ""})
    assert "modelspec.trigger_phrase" not in none
