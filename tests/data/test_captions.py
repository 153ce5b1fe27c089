"""Caption variants: what may change changes, what must stay stays."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from PIL import Image
from torch import Tensor

from library.config.schema import DatasetArguments
from library.data.cache import TextJob
from library.data.captions import (
    caption_variants,
    choose_caption,
    drawn_from,
    has_word,
    never_drawn,
    plain_caption,
    replace_word,
    words_around,
)
from library.data.config import DatasetConfig, SubsetSettings, load_dataset_config
from library.data.dataset import TrainingData
from library.data.lint import check
from library.errors import UserError
from library.training.checkpoint.metadata import dataset_facts, trigger_phrase
from networks.files.metadata import build_metadata
from tests.data.folders import AverageEncoder, LettersEncoder, add_image, build, silent, spelled, write_toml
from tests.targets import FLUX_TARGETS


def rules(**settings: object) -> SubsetSettings:
    return SubsetSettings(**settings)


TAGS = "one, two, three, four, five, six"


def test_nothing_random_gives_the_first_line_once() -> None:
    assert caption_variants("a cat, sitting\nsecond line", rules(), 8) == ("a cat, sitting",)


def test_shuffling_permutes_all_but_the_kept_tags() -> None:
    variants = caption_variants(TAGS, rules(shuffle_caption=True, keep_tokens=2), 8)
    assert len(variants) == 8
    assert len(set(variants)) > 4
    for variant in variants:
        assert variant.startswith("one, two, ")
        assert sorted(variant.split(", ")) == sorted(TAGS.split(", "))


def test_more_variants_begin_with_those_of_fewer() -> None:
    shuffled = rules(shuffle_caption=True)
    assert caption_variants(TAGS, shuffled, 16)[:8] == caption_variants(TAGS, shuffled, 8)


def test_a_caption_that_cannot_change_has_one_variant() -> None:
    assert caption_variants("only", rules(shuffle_caption=True), 8) == ("only",)
    assert caption_variants("no braces", rules(enable_wildcard=True), 8) == ("no braces",)


def test_the_keep_tokens_separator_fixes_both_ends_and_never_stays_in_the_text() -> None:
    raw = "head, two ||| a, b, c, d, e ||| tail"
    for variant in caption_variants(raw, rules(shuffle_caption=True, keep_tokens_separator="|||"), 8):
        tags = variant.split(", ")
        assert (tags[:2], tags[-1]) == (["head", "two"], "tail")
        assert sorted(tags[2:-1]) == ["a", "b", "c", "d", "e"]
    assert plain_caption(raw, rules(keep_tokens_separator="|||")) == "head, two, a, b, c, d, e, tail"


def test_tags_drop_at_their_rate_but_kept_ones_never() -> None:
    raw = ", ".join(str(i) for i in range(101))
    variants = caption_variants(raw, rules(caption_tag_dropout_rate=0.3, keep_tokens=1), 50)
    counts = Counter(tag for variant in variants for tag in variant.split(", "))
    assert counts["0"] == 50
    kept = sum(count for tag, count in counts.items() if tag != "0") / (50 * 100)
    assert kept == pytest.approx(0.7, abs=0.03)  # binomial standard deviation 0.0065
    for variant in variants:
        numbers = [int(tag) for tag in variant.split(", ")]
        assert numbers == sorted(numbers)  # dropping does not shuffle


def test_prefix_and_suffix_are_joined_with_spaces() -> None:
    assert (
        plain_caption("a cat", rules(caption_prefix="photo of", caption_suffix="outdoors")) == "photo of a cat outdoors"
    )


def test_wildcards_choose_one_option_and_doubled_braces_stay() -> None:
    variants = caption_variants("a {red|blue|green} {{cat}}", rules(enable_wildcard=True), 30)
    assert set(variants) == {"a red {cat}", "a blue {cat}", "a green {cat}"}
    assert plain_caption("a {red|blue} {{cat}}", rules(enable_wildcard=True)) == "a red {cat}"


@given(
    some.lists(some.integers(1, 5), min_size=1, max_size=7), some.integers(1, 40), some.booleans(), some.integers(0, 99)
)
def test_as_many_lines_and_choices_are_drawn_as_variants_allow_and_the_others_are_counted(
    choices: list[int], count: int, shuffle: bool, seed: int
) -> None:
    """Line n has ``choices[n]`` choices; what is in a variant is read off the variants."""
    options = {f"l{n} of {seed}": [f"{n}-{k}" for k in range(many)] for n, many in enumerate(choices)}
    raw = "\n".join(f"{line}, {{{'|'.join(of)}}}" for line, of in options.items())
    settings = rules(enable_wildcard=True, shuffle_caption=shuffle)
    variants = caption_variants(raw, settings, count)
    drawn = {line: {one for one in of if any(one in v for v in variants)} for line, of in options.items()}
    reached = [line for line in options if any(line in variant for variant in variants)]
    assert len(reached) == min(len(choices), count)
    left = len(choices) - len(reached) + sum(len(options[line]) - len(drawn[line]) for line in reached)
    missed, enough = never_drawn(raw, settings, count)
    assert missed == left
    assert never_drawn(raw, settings, max(count, enough))[0] == 0
    times = Counter(one for v in variants for of in options.values() for one in of if one in v.split(", "))
    if len(variants) == count:
        assert max(times.values()) <= math.ceil(math.ceil(count / len(choices)) / min(choices))  # evenly, in each line
    assert caption_variants(raw, settings, count + 3)[: len(variants)] == variants or len(variants) == 1


def test_lines_that_no_variant_has_are_told_and_where_the_trigger_word_is_put_in_is_said_of_all_lines(
    tmp_path: Path,
) -> None:
    add_image(tmp_path / "img", "a.png", caption="a zorbo\n" + "\n".join(f"line {k}" for k in range(19)))
    toml = write_toml(tmp_path, general="enable_wildcard = true\ntrigger_word = 'zorbo'")
    said = "12 lines or choices in the captions of 1 of 1 image (a.png) are in none of its 8 variants"
    report, warnings = check(load(toml), 16, silent), build(toml).warnings
    (finding,) = report.by_kind()["lines"]
    assert said in finding.text
    assert "caption_variants = 20 draws all" in finding.text
    assert finding.text in warnings
    put = [line for line in warnings if "trigger word" in line]
    assert "put in front of 1 of 1 caption" in put[0]
    assert [*report.notes] == put
    arguments = DatasetArguments(dataset_config=str(toml), caption_variants=20)
    report = check(load_dataset_config(toml, arguments), 16, silent)
    assert report.findings == []
    assert report.notes[0].endswith("put in front of 1 of 1 caption")


def test_captions_that_are_drawn_in_another_way_than_before_are_not_taken_for_the_old_ones() -> None:
    """Of these a resumed run says that they have changed; the text encoder's cache goes by the text."""
    assert drawn_from("a\nb", rules()) == "a\nb"
    assert drawn_from("a\nb", rules(enable_wildcard=True)) != "a\nb"
    assert drawn_from("a", rules(enable_wildcard=True, caption_prefix="{b|c}")) != "a"
    assert set(caption_variants("a", rules(enable_wildcard=True, caption_prefix="{b|c}"), 2)) == {"b a", "c a"}


@pytest.mark.parametrize(
    ("word", "caption", "mark"),
    [
        ("zorbo", "a [Trigger]", "[Trigger]"),
        ("", "a [ name ]", "[ name ]"),
        ("", "a [name]", "[name]"),
        ("z", "[nam]", ""),
    ],
)
def test_a_mark_that_is_trained_as_text_is_a_finding(tmp_path: Path, word: str, caption: str, mark: str) -> None:
    add_image(tmp_path / "img", "a.png", caption=caption)
    report = check(load(write_toml(tmp_path, general=f"trigger_word = '{word}'")), 16, silent)
    assert [one.text.partition(" is trained")[0] for one in report.findings] == [f"a.png: {mark}"] * bool(mark)


def test_with_wildcards_every_line_is_a_choice_and_gets_prefix_and_suffix() -> None:
    settings = rules(enable_wildcard=True, caption_prefix="p", caption_suffix="s")
    assert set(caption_variants("first\nsecond", settings, 30)) == {"p first s", "p second s"}


def test_the_secondary_separator_holds_tags_together_while_shuffling() -> None:
    settings = rules(shuffle_caption=True, secondary_separator=";;;")
    for variant in caption_variants("sky;;;cloud;;;day, a, b, c", settings, 8):
        assert "sky,cloud,day" in variant  # sd-scripts puts the plain separator in its place


def test_another_separator_is_used_for_splitting_and_joining() -> None:
    variants = caption_variants("a, b; c; d", rules(shuffle_caption=True, caption_separator=";", keep_tokens=1), 8)
    assert all(variant.startswith("a, b; ") for variant in variants)


def test_the_choice_follows_from_seed_epoch_and_sample_alone() -> None:
    shuffled = rules(shuffle_caption=True)
    variants = caption_variants(TAGS, shuffled, 8)
    choices = [choose_caption(variants, shuffled, 1, epoch, 42) for epoch in range(400)]
    assert choices == [choose_caption(variants, shuffled, 1, epoch, 42) for epoch in range(400)]
    assert choices != [choose_caption(variants, shuffled, 2, epoch, 42) for epoch in range(400)]
    assert choices != [choose_caption(variants, shuffled, 1, epoch, 43) for epoch in range(400)]
    counts = Counter(choices)
    assert set(counts) == set(variants)
    assert max(counts.values()) < 2 * 400 / 8  # expected 50 each, standard deviation 6.6


def test_captions_drop_at_their_rate() -> None:
    dropping = rules(caption_dropout_rate=0.25)
    dropped = sum(choose_caption(("x",), dropping, 0, 0, sample) == "" for sample in range(2000))
    assert dropped / 2000 == pytest.approx(0.25, abs=0.04)  # standard deviation 0.0097


def test_captions_drop_in_every_nth_epoch_counted_from_one() -> None:
    every_third = rules(caption_dropout_every_n_epochs=3)
    assert [choose_caption(("x",), every_third, 0, epoch, 1) for epoch in range(7)] == ["x", "x", "", "x", "x", "", "x"]


class SeeingEncoder(LettersEncoder):
    """Adds the colours of each reference image's upper left pixel."""

    def __init__(self) -> None:
        super().__init__("seeing-1")
        self.sees_references = True
        self.sizes: list[list[tuple[int, int]]] = []

    def encode(self, captions: list[str], references: list[list[Image.Image]] | None = None) -> list[dict[str, Tensor]]:
        assert references is not None
        self.sizes += [[image.size for image in images] for images in references]
        outputs = super().encode(captions)
        for output, images in zip(outputs, references, strict=True):
            output["seen"] = torch.tensor([image.convert("RGB").getpixel((0, 0)) for image in images])
        return outputs


def data_of(folder: Path, general: str = "", dataset: str = "") -> TrainingData:
    for i in range(3):
        add_image(folder / "img", f"{i}.png", caption="the same", seed=i)
        add_image(folder / "control", f"{i}.png", caption=None, seed=10 + i % 2)  # 0 and 2 have the same image
    subset = "image_dir = 'img'\ncontrol_directory = 'control'"
    return build(write_toml(folder, dataset, subset, general), conditioning="references")


def cached(data: TrainingData) -> SeeingEncoder:
    encoder = SeeingEncoder()
    data.cache_text(encoder, [], 2, silent)
    data.cache_latents(AverageEncoder(), 2, silent)
    return encoder


def corner(path: Path, mirrored: bool = False) -> list[int]:
    pixels = np.asarray(Image.open(path))
    return pixels[0, -1 if mirrored else 0].tolist()


def test_equal_captions_are_encoded_once_for_each_content_of_the_references(tmp_path: Path) -> None:
    data = data_of(tmp_path)
    encoder = cached(data)
    assert encoder.seen == ["the same"] * 2
    assert encoder.sizes == [[(64, 64)]] * 2
    for index in range(3):
        text = data.train[(0, index)].text
        assert text["seen"].tolist() == [corner(tmp_path / "control" / f"{index}.png")]
        assert spelled(text) == "the same"
    assert len(data.missing_text("seeing-1", sees_references=True)) == 0
    assert len(data.missing_text("seeing-1")) == 1  # without images it is another text


def test_a_mirrored_image_has_the_text_of_its_mirrored_references(tmp_path: Path) -> None:
    data = data_of(tmp_path, general="flip_aug = true")
    assert len(cached(data).seen) == 4
    straight = data.train[(0, 0)].latents
    seen = set()
    for epoch in range(12):
        item = data.train[(epoch, 0)]
        flipped = not torch.equal(item.latents, straight)
        seen.add((flipped, tuple(item.text["seen"][0].tolist())))
    path = tmp_path / "control" / "0.png"
    assert {colour for _, colour in seen} == {tuple(corner(path)), tuple(corner(path, mirrored=True))}
    assert len(seen) == 2


def test_images_are_shown_at_the_size_of_their_latents(tmp_path: Path) -> None:
    encoder = cached(data_of(tmp_path, dataset="control_resolution = 32"))
    assert encoder.sizes == [[(32, 32)]] * 2


def test_dropped_captions_keep_their_images(tmp_path: Path) -> None:
    data = data_of(tmp_path, general="caption_dropout_rate = 0.5")
    assert sorted(cached(data).seen) == ["", "", "the same", "the same"]
    texts = {spelled(data.train[(epoch, 1)].text) for epoch in range(20)}
    assert texts == {"", "the same"}
    assert all(data.train[(epoch, 1)].text["seen"].shape == (1, 3) for epoch in range(5))


def test_prompts_are_cached_with_the_images_they_name(tmp_path: Path) -> None:
    data = data_of(tmp_path)
    data.missing_latents("vae-1")  # contents are hashed
    shown = data.train.samples[1].control_images
    encoder = SeeingEncoder()
    data.cache_text(encoder, [TextJob("a prompt", shown)], 4, silent)
    assert encoder.seen.count("a prompt") == 1
    found = data.text_embeddings(TextJob("a prompt", shown))
    assert found["seen"].tolist() == [corner(tmp_path / "control" / "1.png")]


def trigger_rules(**settings: object) -> SubsetSettings:
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
        ("[name] with a [trigger]", "zorbo with a zorbo"),  # ai-toolkit, toolkit/prompt_utils.py
        ("a [Trigger]", "zorbo, a [Trigger]"),  # it minds the case
        ("", "zorbo"),
        ("一只zorbo在草地上", "一只zorbo在草地上"),
        ("zorbo가 있다", "zorbo가 있다"),
        ("ça zorboé", "zorbo, ça zorboé"),
    ],
)
def test_a_caption_holds_the_trigger_word_once_it_is_put_in(raw: str, expected: str) -> None:
    assert plain_caption(raw, trigger_rules()) == expected


def test_the_word_is_put_in_after_prefix_wildcards_and_shuffling() -> None:
    assert plain_caption("red", trigger_rules(caption_prefix="a photo of [trigger]", caption_separator=";")) == (
        "a photo of zorbo red"
    )
    assert plain_caption("a; b", trigger_rules(caption_separator=";")) == "zorbo; a; b"
    assert set(caption_variants("a {[trigger]|cat}", trigger_rules(enable_wildcard=True), 20)) == {
        "a zorbo",
        "zorbo, a cat",
    }
    for variant in caption_variants("one, two, [trigger], three", trigger_rules(shuffle_caption=True), 8):
        assert sorted(variant.split(", ")) == ["one", "three", "two", "zorbo"]
    for variant in caption_variants("one, two, three", trigger_rules(shuffle_caption=True), 8):
        assert variant.startswith("zorbo, ")


def test_a_dropped_caption_stays_empty_and_one_whose_tags_all_drop_is_the_word() -> None:
    dropping = trigger_rules(caption_dropout_rate=1.0)
    assert choose_caption(caption_variants("a", dropping, 8), dropping, 0, 0, 1) == ""
    assert caption_variants("a, b", trigger_rules(caption_tag_dropout_rate=1.0), 8) == ("zorbo",)


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
