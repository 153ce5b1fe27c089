"""Caption variants: what may change changes, what must stay stays."""

from __future__ import annotations

from collections import Counter

import pytest

from library.data.captions import caption_variants, choose_caption, plain_caption
from library.data.config import SubsetSettings


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
    assert [choose_caption(("x",), every_third, 0, epoch, 1) for epoch in range(7)] == [
        "x",
        "x",
        "",
        "x",
        "x",
        "",
        "x",
    ]
