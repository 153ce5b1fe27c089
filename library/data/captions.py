"""From the text beside an image to the captions it is trained with.

The steps are kohya's (sd-scripts ``process_caption``): choose a line, add prefix and suffix, replace
wildcards ``{a|b}``, shuffle and drop tags except the kept ones, replace the secondary separator. Then the
trigger word is put in: for ``[trigger]`` or ``[name]`` (ai-toolkit's marks, ``inject_trigger_into_prompt``), or in
front where the caption lacks it. Text encoder outputs are cached, so the random steps cannot be taken anew every time
a sample is seen. Instead each caption gets up to ``caption_variants`` *variants*, drawn once from a generator seeded
with the caption itself, and an epoch chooses one of them. Eight variants of a ten-tag caption show the model eight of
its 3.6 million orders: enough that no tag keeps a fixed place, at eight times the cache. Lines and choices of wildcards
are drawn in rounds, so that as many as possible are in a variant; those that are in none are never trained on.

Two things are done differently from sd-scripts: prefix and suffix go to the line that was chosen (there: to
the first and last line of the file), and ``keep_tokens_separator`` never stays in the text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from library.data.config import SubsetSettings
from library.randomness import python_random

_WILDCARD = re.compile(r"\{([^{}]+)\}")
MARKS = ("[trigger]", "[name]")  # ai-toolkit replaces them as they are written here, in lower case
_LIKE_A_MARK = re.compile(r"\[\s*(?:trigger|name)\s*\]", re.IGNORECASE)
# A letter or digit of a script that puts blanks between words: in Thai, Lao, Chinese, Japanese, and before the endings
# of Korean, a Latin trigger word stands between letters and is a word all the same.
_LETTER = r"[^\W\u0e00-\u0eff\u1100-\u11ff\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff]"
_OPEN, _CLOSE = "\ue000", "\ue001"  # stand for {{ and }} while wildcards are replaced (private use characters)


def caption_variants(raw: str, settings: SubsetSettings, count: int) -> tuple[str, ...]:
    """Return the variants of a caption: one where nothing is random, else ``count`` draws (duplicates are
    kept).

    Draw k is the same for every ``count`` above k: asking for more variants later keeps those already cached.
    """
    variants = tuple(_with_trigger(arranged, settings)[0] for arranged in _draw(raw, settings, count)[0])
    return variants[:1] if len(set(variants)) == 1 else variants


def never_drawn(raw: str, settings: SubsetSettings, count: int) -> tuple[int, int]:
    """Return how many of a caption's lines and choices are in none of ``count`` variants; how many variants have all.

    A choice counts in each line that it stands in, if that is drawn. The second may be more than is needed.
    """
    lines = [raw] if settings.multiline_captions else raw.split("\n")
    choices = [len(match.split("|")) for match in _WILDCARD.findall(_written(raw, settings))]
    return _draw(raw, settings, count)[1], len(lines) * max(choices, default=1)


def plain_caption(raw: str, settings: SubsetSettings) -> str:
    """Return the caption without chance: first line, first choice of each wildcard, tags in order."""
    return _with_trigger(_arrange(raw, settings, None), settings)[0]


def drawn_from(raw: str, settings: SubsetSettings) -> str:
    """Return what the variants of a caption are drawn by; another where an earlier Tandem made others of it.

    That drew lines and choices with replacement, and knew one mark.
    """
    varies = settings.enable_wildcard and ("\n" in raw or "{" in _written(raw, settings))
    return f"in rounds: {raw}" if varies or (settings.trigger_word and MARKS[1] in raw) else raw


def has_word(caption: str, word: str) -> bool:
    """Return whether a caption holds ``word`` (or several), whole and in any case."""
    return _whole_word(word).search(caption) is not None


def replace_word(caption: str, word: str, by: str) -> str:
    """Return a caption with ``by`` wherever it holds ``word``, whole and in any case."""
    return _whole_word(word).sub(lambda _: by, caption)


def words_around(caption: str, word: str) -> set[str]:
    """Return the longer words, in lower case, of which ``word`` is a part: "cartoon" of "art"."""
    part = word.lower()
    found = re.findall(f"(?<!{_LETTER}){_LETTER}*?{re.escape(part)}{_LETTER}*", caption.lower())  # linear in its length
    return set(found) - {part}


def trigger_is_added(raw: str, settings: SubsetSettings, count: int) -> bool:
    """Return whether the trigger word is put in front of a caption's variants, or of some."""
    varies = settings.caption_tag_dropout_rate or drawn_from(raw, settings) != raw  # an order of tags changes nothing
    return any(_with_trigger(arranged, settings)[1] for arranged in _draw(raw, settings, count if varies else 1)[0])


def marks_left(raw: str, settings: SubsetSettings) -> set[str]:
    """Return what looks like a mark for the trigger word and is trained as text."""
    return set(_LIKE_A_MARK.findall(_written(raw, settings))).difference(MARKS if settings.trigger_word else MARKS[:1])


def _whole_word(word: str) -> re.Pattern[str]:
    return re.compile(f"(?<!{_LETTER}){re.escape(word)}(?!{_LETTER})", re.IGNORECASE)


def can_drop(settings: SubsetSettings) -> bool:
    """Return whether some epochs train a sample with the empty caption."""
    return settings.caption_dropout_rate > 0 or settings.caption_dropout_every_n_epochs > 0


def choose_caption(variants: tuple[str, ...], settings: SubsetSettings, seed: int, epoch: int, sample_id: int) -> str:
    """Return the caption of a sample in an epoch (from 0): one of its variants, or "" if dropped."""
    every = settings.caption_dropout_every_n_epochs
    if every and (epoch + 1) % every == 0:  # sd-scripts counts epochs from 1
        return ""
    if not settings.caption_dropout_rate and len(variants) == 1:
        return variants[0]
    rng = python_random("caption", seed, epoch, sample_id)
    if rng.random() < settings.caption_dropout_rate:
        return ""
    return rng.choice(variants)


class _Rounds:
    """Draws in rounds: each option comes once before one comes again. ``unseen``: (place, option) not drawn yet."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.unseen = rng, set[tuple[object, str]]()
        self._left: dict[object, list[str]] = {}

    def draw(self, place: object, options: Sequence[str]) -> str:
        if not (left := self._left.get(place)):
            self.unseen |= {(place, option) for option in options if left is None}
            left = self._left[place] = self.rng.sample(options, len(options))
        self.unseen.discard((place, left[-1]))
        return left.pop()


def _draw(raw: str, settings: SubsetSettings, count: int) -> tuple[list[str], int]:
    """Return the variants without the trigger word, and how many lines and choices are in none."""
    seed = drawn_from(raw, settings)
    if not settings.shuffle_caption and not settings.caption_tag_dropout_rate and seed == raw:
        return [_arrange(raw, settings, None)], 0
    rounds = _Rounds(python_random("caption variants", seed))
    return [_arrange(raw, settings, rounds) for _ in range(count)], len(rounds.unseen)


def _written(raw: str, settings: SubsetSettings) -> str:
    return " ".join(filter(None, (settings.caption_prefix, raw, settings.caption_suffix)))


def _with_trigger(caption: str, settings: SubsetSettings) -> tuple[str, bool]:
    """Return a caption with the trigger word, and whether that was put in front."""
    if not (word := settings.trigger_word):
        return caption, False
    for mark in MARKS:
        caption = caption.replace(mark, word)
    if has_word(caption, word):
        return caption, False
    return f"{word}{settings.caption_separator.strip()} {caption}" if caption else word, True


def _arrange(raw: str, settings: SubsetSettings, rounds: _Rounds | None) -> str:
    """Return the caption after all steps but the trigger word's; without ``rounds`` nothing is drawn."""
    lines = [raw] if settings.multiline_captions else raw.split("\n")
    caption = rounds.draw("", lines) if rounds and settings.enable_wildcard else lines[0]
    caption = _written(caption, settings)
    if settings.enable_wildcard:
        caption = _replace_wildcards(caption, rounds)
    if settings.shuffle_caption or settings.caption_tag_dropout_rate or settings.keep_tokens_separator:
        caption = _arrange_tags(caption, settings, rounds.rng if rounds else None)
    if settings.secondary_separator:
        caption = caption.replace(settings.secondary_separator, settings.caption_separator)
    return caption


def _replace_wildcards(caption: str, rounds: _Rounds | None) -> str:
    hidden = caption.replace("{{", _OPEN).replace("}}", _CLOSE)

    def chosen(match: re.Match[str]) -> str:
        options = match.group(1).split("|")
        return rounds.draw((hidden, match.start()), options) if rounds else options[0]

    return _WILDCARD.sub(chosen, hidden).replace(_OPEN, "{").replace(_CLOSE, "}")


def _arrange_tags(caption: str, settings: SubsetSettings, rng: random.Random | None) -> str:
    def tags(text: str) -> list[str]:
        return [tag for tag in (part.strip() for part in text.split(settings.caption_separator)) if tag]

    mark = settings.keep_tokens_separator
    if mark and mark in caption:
        first, _, rest = caption.partition(mark)
        middle, _, last = rest.partition(mark)
        head, loose, tail = tags(first), tags(middle), tags(last)
    elif not (settings.shuffle_caption or settings.caption_tag_dropout_rate):
        return caption
    else:
        every = tags(caption)
        head, loose, tail = every[: settings.keep_tokens], every[settings.keep_tokens :], []
    if rng and settings.shuffle_caption:
        rng.shuffle(loose)
    if rng and settings.caption_tag_dropout_rate:
        loose = [tag for tag in loose if rng.random() >= settings.caption_tag_dropout_rate]
    return f"{settings.caption_separator.strip()} ".join(head + loose + tail)
