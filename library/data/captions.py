"""From the text beside an image to the captions it is trained with.

The steps are kohya's (sd-scripts ``process_caption``): choose a line, add prefix and suffix, replace
wildcards ``{a|b}``, shuffle and drop tags except the kept ones, replace the secondary separator. Then the
trigger word is put in: for ``[trigger]`` (ai-toolkit's mark), or in front where the caption lacks it. Text
encoder outputs are cached, so the random steps cannot be taken anew every time a sample is seen. Instead
each caption gets up to ``caption_variants`` *variants*, drawn once from a generator seeded with the caption
itself, and an epoch chooses one of them. Eight variants of a ten-tag caption show the model eight of its
3.6 million orders: enough that no tag keeps a fixed place, at eight times the cache.

Two things are done differently from sd-scripts: prefix and suffix go to the line that was chosen (there: to
the first and last line of the file), and ``keep_tokens_separator`` never stays in the text.
"""

from __future__ import annotations

import random
import re

from library.data.config import SubsetSettings
from library.randomness import python_random

_WILDCARD = re.compile(r"\{([^{}]+)\}")
TRIGGER = "[trigger]"
# A letter or digit of a script that puts blanks between words: in Thai, Lao, Chinese, Japanese, and before the endings
# of Korean, a Latin trigger word stands between letters and is a word all the same.
_LETTER = r"[^\W\u0e00-\u0eff\u1100-\u11ff\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff]"
_OPEN, _CLOSE = "\ue000", "\ue001"  # stand for {{ and }} while wildcards are replaced (private use characters)


def caption_variants(raw: str, settings: SubsetSettings, count: int) -> tuple[str, ...]:
    """Return the variants of a caption: one where nothing is random, else ``count`` draws (duplicates are
    kept).

    Draw k is the same for every ``count`` above k: asking for more variants later keeps those already cached.
    """
    if not _is_random(raw, settings):
        return (plain_caption(raw, settings),)
    rng = python_random("caption variants", raw)
    variants = tuple(_compose(raw, settings, rng) for _ in range(count))
    return variants[:1] if len(set(variants)) == 1 else variants


def plain_caption(raw: str, settings: SubsetSettings) -> str:
    """Return the caption without chance: first line, first choice of each wildcard, tags in order."""
    return _compose(raw, settings, None)


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


def lacks_trigger(raw: str, settings: SubsetSettings) -> bool:
    """Return whether the trigger word has to be put in front of a caption."""
    word = settings.trigger_word
    return bool(word) and not has_word(_arrange(raw, settings, None).replace(TRIGGER, str(word)), str(word))


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


def _is_random(raw: str, settings: SubsetSettings) -> bool:
    return (
        settings.shuffle_caption
        or settings.caption_tag_dropout_rate > 0
        or (settings.enable_wildcard and ("\n" in raw or "{" in raw))
    )


def _compose(raw: str, settings: SubsetSettings, rng: random.Random | None) -> str:
    caption, word = _arrange(raw, settings, rng), settings.trigger_word
    if not word:
        return caption
    caption = caption.replace(TRIGGER, word)
    if has_word(caption, word):
        return caption
    return f"{word}{settings.caption_separator.strip()} {caption}" if caption else word


def _arrange(raw: str, settings: SubsetSettings, rng: random.Random | None) -> str:
    """Return the caption after all steps but the trigger word's."""
    lines = [raw] if settings.multiline_captions else raw.split("\n")
    caption = rng.choice(lines) if rng and settings.enable_wildcard else lines[0]
    caption = " ".join(part for part in (settings.caption_prefix, caption, settings.caption_suffix) if part)
    if settings.enable_wildcard:
        caption = _replace_wildcards(caption, rng)
    if settings.shuffle_caption or settings.caption_tag_dropout_rate or settings.keep_tokens_separator:
        caption = _arrange_tags(caption, settings, rng)
    if settings.secondary_separator:
        caption = caption.replace(settings.secondary_separator, settings.caption_separator)
    return caption


def _replace_wildcards(caption: str, rng: random.Random | None) -> str:
    def chosen(match: re.Match[str]) -> str:
        options = match.group(1).split("|")
        return rng.choice(options) if rng else options[0]

    hidden = caption.replace("{{", _OPEN).replace("}}", _CLOSE)
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
