"""The images of a dataset as training sees them, for the page of ``tools/check_dataset.py``.

A card shows a whole image with the box that is cut out of it for its bucket; what the model is given besides (the image
without the region to fill, the loss mask, control images, all as they are encoded); its caption and how many tokens it
has; how often it is seen; and what was found about it. Cards of one bucket stand together. Of a large dataset the page
holds ``most`` cards, those with findings first and then as many of each bucket as fit: pictures lie in the page itself,
a few kilobytes each.
"""

from __future__ import annotations

import base64
import io
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from library.data.buckets import size_text
from library.data.cache import previews
from library.data.captions import can_drop, caption_variants
from library.data.file_index import content_hash
from library.data.images import decode
from library.data.lint import Finding
from library.data.samples import Sample
from library.errors import UserError
from library.files import read_bytes

SIDE = 192  # of a picture on the page, pixels
_THREADS = 4
_CAPTIONS_SHOWN = 3

CountTokens = Callable[[str], list[tuple[str, int, int]]]  # caption -> (tokenizer, tokens, tokens that it takes)


@dataclass(frozen=True)
class Card:
    """One image on the page; pictures are data URLs, ``box`` is left, top, width, height in percent of the image."""

    name: str
    path: str
    size: str
    picture: str | None
    box: tuple[float, float, float, float]
    random_crop: bool
    besides: list[tuple[str, str]]  # what it is, picture
    captions: list[str]
    tokens: list[tuple[str, int, int]]
    repeats: int
    marks: list[str]
    findings: list[Finding]
    problem: str | None


@dataclass(frozen=True)
class BucketCards:
    """The cards of one bucket of one dataset (counted from 1), and how many images it has."""

    dataset: int
    size: str
    images: int
    seen: int  # samples an epoch
    cards: list[Card]


def gallery(
    samples: Sequence[Sample],
    findings: Sequence[Finding],
    seed: int,
    most: int,
    count_tokens: CountTokens,
    advance: Callable[[int], None] = lambda _: None,
) -> list[BucketCards]:
    """Return the cards of ``samples`` by bucket, at most ``most`` in all.

    Args:
        samples: of training and held out.
        findings: of the check.
        seed: what generated masks follow from, as in training.
        most: cards at most.
        count_tokens: asked for every caption shown.
        advance: counts the cards made.
    """
    of_path: dict[str, list[Finding]] = defaultdict(list)
    for finding in findings:
        for path in finding.paths:
            of_path[path].append(finding)
    buckets: dict[tuple[int, tuple[int, int]], list[Sample]] = defaultdict(list)
    for sample in samples:
        buckets[sample.group.dataset, sample.fit.bucket].append(sample)
    chosen = {id(sample) for sample in _chosen(list(buckets.values()), of_path, most)}

    def made(sample: Sample) -> Card:
        card = _card(sample, [f for file in sample.files for f in of_path[file.path]], seed, count_tokens)
        advance(1)
        return card

    with ThreadPoolExecutor(_THREADS) as pool:
        return [
            BucketCards(
                dataset + 1,
                size_text(size),
                len(inside),
                sum(sample.repeats for sample in inside if not sample.held_out),
                list(pool.map(made, [sample for sample in inside if id(sample) in chosen])),
            )
            for (dataset, size), inside in sorted(buckets.items(), key=lambda item: item[0])
        ]


def _chosen(buckets: list[list[Sample]], of_path: dict[str, list[Finding]], most: int) -> list[Sample]:
    """Those with findings, then one of each bucket after the other, ``most`` in all."""
    every = [sample for bucket in buckets for sample in bucket]
    if len(every) <= most:
        return every
    ranked = [sorted(bucket, key=lambda s: not any(of_path.get(f.path) for f in s.files)) for bucket in buckets]
    found = [s for bucket in ranked for s in bucket if any(of_path.get(f.path) for f in s.files)]
    known = {id(sample) for sample in found}
    rest = [[sample for sample in bucket if id(sample) not in known] for bucket in ranked]
    turns = [b[i] for i in range(max(map(len, rest), default=0)) for b in rest if i < len(b)]
    return (found + turns)[:most]


def _card(sample: Sample, findings: list[Finding], seed: int, count_tokens: CountTokens) -> Card:
    settings, fit = sample.settings, sample.fit
    picture, besides, problem = None, [], None
    try:
        for file in sample.files:
            file.content = file.content or content_hash(read_bytes(file.path))
        picture = data_url(decode(read_bytes(sample.image.path), sample.image.path)[0])
        besides = [(what, data_url(image)) for what, image in previews(sample, seed)]
    except UserError as error:
        problem = str(error)
    left, top = fit.offset
    left += (fit.encoded[0] - fit.bucket[0]) // 2
    top += (fit.encoded[1] - fit.bucket[1]) // 2
    wide, high = fit.resized
    box = (100 * left / wide, 100 * top / high, 100 * fit.bucket[0] / wide, 100 * fit.bucket[1] / high)
    captions = list(dict.fromkeys(caption_variants(sample.caption, settings, _CAPTIONS_SHOWN)))
    marks = ["held out"] if sample.held_out else []
    marks += ["regularisation"] if settings.is_reg else []
    marks += [f"trigger word: {settings.trigger_word}"] if settings.trigger_word else []
    marks += [f"class: {settings.preserve_class}"] if settings.preserve_class else []
    marks += ["mirrored half of the time"] if sample.flips else []
    marks += ["caption dropped at times"] if can_drop(settings) and not sample.held_out else []
    assert sample.image.size is not None
    return Card(
        name=Path(sample.image.path).name,
        path=sample.image.path,
        size=size_text(sample.image.size),
        picture=picture,
        box=box,
        random_crop=fit.encoded != fit.bucket,
        besides=besides,
        captions=captions,
        tokens=max((count_tokens(text) for text in captions), key=lambda counts: sum(n for _, n, _ in counts)),
        repeats=sample.repeats,
        marks=marks,
        findings=list(dict.fromkeys(findings)),
        problem=problem,
    )


def data_url(image: Image.Image, side: int = SIDE) -> str:
    """Return an image, made no larger than ``side``, as a data URL."""
    small = image.convert("RGB")
    small.thumbnail((side, side), reducing_gap=2)
    data = io.BytesIO()
    small.save(data, "JPEG", quality=75)
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
