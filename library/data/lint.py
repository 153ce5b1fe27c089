"""What is wrong with a dataset, or looks as if it were, before hours are spent on it.

=============  =======================================================================================================
unreadable     an image, mask or control image that does not decode to its end
mask           a mask in other proportions than its image
control        a control image in other proportions than its image (refused never, stretched never: but cropped)
setup          what training would refuse: a missing file, a caption that is no UTF-8, an image without a bucket
duplicate      images of the same bytes
alike          images that look the same: another size, another compression (see :mod:`library.data.image_stats`)
caption        empty captions, and one caption for several images
upscaled       images smaller than their bucket, which are enlarged
bars           letterbox or pillarbox: even bars on two opposite sides, which the model learns to paint
=============  =======================================================================================================

``check`` looks at everything; ``summarise`` only at what is known without opening an image.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from library.conditions import ConditionKind
from library.data.buckets import Bucketing, same_shape, size_text
from library.data.config import Dataset, DatasetConfig, Subset
from library.data.file_index import FileIndex, list_folder
from library.data.image_stats import ImageStats, ImageStatsIndex
from library.data.samples import FindSources, Sample, cache_folder
from library.data.sources import Source, caption_beside, find_sources, is_image, note_frames
from library.errors import UserError, counted, names_in_short

Advance = Callable[[int], None]

ERRORS = ("unreadable", "mask", "setup")  # training would stop at these
TITLES = {
    "unreadable": "Unreadable or cut off",
    "setup": "Refused by training",
    "mask": "Masks of another shape",
    "control": "Control images of another shape",
    "duplicate": "The same file twice",
    "alike": "Nearly the same image",
    "caption": "Captions",
    "upscaled": "Smaller than their bucket",
    "bars": "Bars at the border",
}
_ALIKE_BITS = 4  # of 64 that may differ; unrelated photographs differ in about half
_ALIKE_COLOUR = 12.0  # mean difference of the thumbnails, of 255
_BAR = 0.02  # of the side: 20 pixels of 1024
_ROWS = 512  # hashes compared with all others at once


@dataclass(frozen=True)
class Finding:
    """One thing about one image or several that belong together."""

    kind: str
    paths: tuple[str, ...]
    text: str

    @property
    def is_error(self) -> bool:
        """Whether training would stop at it."""
        return self.kind in ERRORS


@dataclass(frozen=True)
class Report:
    """All findings of a dataset."""

    images: int
    findings: list[Finding]
    notes: tuple[str, ...] = ()  # what training says too: files that are left out, frames that are not used

    def by_kind(self) -> dict[str, list[Finding]]:
        """Return the findings of each kind, in the order of :data:`TITLES`, kinds without any left out."""
        found = {kind: [finding for finding in self.findings if finding.kind == kind] for kind in TITLES}
        return {kind: findings for kind, findings in found.items() if findings}

    def lines(self) -> list[str]:
        """Return a line for each kind found, with its first example."""
        return [f"{title(found).lower()} ({found[0].text})" for found in self.by_kind().values()]


def title(found: Sequence[Finding]) -> str:
    """Return what findings of one kind are about, and how many images they name: "Captions: 3 images"."""
    kind = found[0].kind
    named = {path for one in found for path in (one.paths[:1] if kind in ("mask", "control") else one.paths)}
    return f"{TITLES[kind]}: {counted(len(named), 'image')}" if named else TITLES[kind]


def check(
    config: DatasetConfig,
    pixel_multiple: int,
    conditioning: ConditionKind,
    start: Callable[[str, int], Advance],
) -> Report:
    """Look at every image, mask and caption of a dataset TOML.

    Args:
        config: the checked TOML.
        pixel_multiple: image sides are multiples of this.
        conditioning: what the model is given besides a caption.
        start: ``start(description, total) -> advance(n)``, for the progress bar.
    """
    findings: list[Finding] = []
    images: dict[str, ImageStats] = {}
    captions: list[tuple[str, str, bool]] = []
    count = 0
    notes: list[str] = []
    for dataset in config.datasets:
        buckets = Bucketing(dataset, pixel_multiple)
        for subset in dataset.subsets:
            folder = cache_folder(dataset, subset)
            sources = _sources(subset, FileIndex(folder), findings, notes, conditioning)
            files = {file.path: file for source in sources for file in source.files}
            index = ImageStatsIndex(folder)
            advance = start(f"checking {subset.written_dir}", index.missing(list(files.values())))
            stats = dict(zip(files, index.measure(list(files.values()), advance), strict=True))
            findings += _of_files(stats)
            notes += note_frames(subset.where, {source.name: stats[source.image.path].frames for source in sources})
            for source in sources:
                findings += _of_image(source, stats, dataset, subset, buckets)
            tokens = subset.settings.class_tokens is not None or subset.settings.is_reg
            captions += [(source.image.path, source.caption, tokens) for source in sources]
            images |= {source.image.path: stats[source.image.path] for source in sources}
            count += len(sources)
    readable = {path: stats for path, stats in images.items() if stats.problem is None}
    findings += [*_duplicates(readable), *_alike(readable), *_captions(captions)]
    return Report(count, findings, tuple(notes))


def summarise(samples: Sequence[Sample]) -> list[str]:
    """Return lines on what a start knows of its samples anyway: captions, and sizes against buckets."""
    images = {sample.image.path: sample for sample in samples}
    findings = _captions(
        [(path, s.caption, s.settings.class_tokens is not None or s.settings.is_reg) for path, s in images.items()]
    )
    for sample in images.values():
        assert sample.image.size is not None
        findings += _upscaled(sample.image.path, sample.image.size, sample.fit.resized)
    return Report(len(images), findings).lines()


def _sources(
    subset: Subset, index: FileIndex, findings: list[Finding], notes: list[str], conditioning: ConditionKind
) -> list[Source]:
    """The subset's images; where training would refuse it, as many of them as can be found without it."""
    try:
        found = find_sources(subset, index, notes, conditioning)
        index.save()
        return found
    except UserError as error:
        findings.append(Finding("setup", (), str(error)))
    if subset.image_dir is None or subset.metadata_file is not None:
        return []
    listed = list_folder(subset.image_dir, subset.settings.recursive)
    found = []
    for name in filter(is_image, listed):
        caption = subset.settings.class_tokens or ""
        if beside := caption_beside(name, listed, subset):
            caption = (subset.image_dir / beside).read_text(encoding="utf-8-sig", errors="replace").strip()
        found.append(Source(name, index.image(str(subset.image_dir / name), listed[name]), caption))
    return found


def without_broken(findings: Sequence[Finding]) -> FindSources:
    """Return what lists for ``scan`` the images that training would not stop at, as ``findings`` tell."""
    broken = {path for finding in findings if finding.is_error for path in finding.paths}

    def find(subset: Subset, index: FileIndex, notes: list[str], conditioning: ConditionKind) -> list[Source]:
        sources = _sources(subset, index, [], notes, conditioning)
        return [source for source in sources if not broken & {file.path for file in source.files}]

    return find


def _of_files(stats: dict[str, ImageStats]) -> list[Finding]:
    return [
        Finding("unreadable", (path,), f"{Path(path).name}: {one.problem}")
        for path, one in stats.items()
        if one.problem is not None
    ]


def _of_image(
    source: Source, stats: dict[str, ImageStats], dataset: Dataset, subset: Subset, buckets: Bucketing
) -> list[Finding]:
    """Findings about an image's size, borders and companions."""
    path, own = source.image.path, stats[source.image.path]
    if own.problem is not None:
        return []
    found: list[Finding] = []
    for kind, files in (("mask", (source.mask, source.inpaint_mask)), ("control", source.control_images)):
        for file in (file for file in files if file is not None and stats[file.path].problem is None):
            size = stats[file.path].size
            if not same_shape(size, own.size):
                sizes = f"{size_text(size)} for an image of {size_text(own.size)}"
                found.append(Finding(kind, (path, file.path), f"{Path(file.path).name}: {sizes}"))
    try:
        fit = buckets.fit(own.size, subset.settings.random_crop, path)
        found += _upscaled(path, own.size, fit.resized)
    except UserError as error:
        found.append(Finding("setup", (path,), str(error)))
    left, top, right, bottom = own.bars
    across, above = min(left, right) >= _BAR, min(top, bottom) >= _BAR
    if across != above:  # on all four sides: an object on a plain ground
        sides = f"{left:.0%} left, {right:.0%} right" if across else f"{top:.0%} above, {bottom:.0%} below"
        found.append(Finding("bars", (path,), f"{Path(path).name}: even bars, {sides}"))
    return found


def _upscaled(path: str, size: tuple[int, int], resized: tuple[int, int]) -> list[Finding]:
    factor = max(resized[0] / size[0], resized[1] / size[1])
    if min(resized[0] / size[0], resized[1] / size[1]) <= 1:  # rounding may enlarge one side by a pixel
        return []
    return [Finding("upscaled", (path,), f"{Path(path).name}: {size_text(size)} is enlarged {factor:.2f} times")]


def _duplicates(images: dict[str, ImageStats]) -> list[Finding]:
    by_content: dict[str, list[str]] = defaultdict(list)
    for path, stats in images.items():
        by_content[stats.content].append(path)
    return [
        Finding("duplicate", tuple(paths), f"{_names(paths)} are the same file")
        for paths in by_content.values()
        if len(paths) > 1
    ]


def _alike(images: dict[str, ImageStats]) -> list[Finding]:
    """Groups of images that look the same; those of the same bytes count as one."""
    one_each = {stats.content: path for path, stats in reversed(images.items())}
    paths = sorted(one_each.values())
    if len(paths) < 2:
        return []
    hashes = np.array([images[path].dhash for path in paths], np.uint64)
    thumbnails = np.stack([_thumbnail(images[path]) for path in paths]).astype(np.float32)
    groups = {path: {path} for path in paths}
    for first in range(0, len(paths), _ROWS):
        distances = np.bitwise_count(hashes[first : first + _ROWS, None] ^ hashes[None, first:])
        for row, distance in enumerate(distances):
            i = first + row
            near = i + 1 + np.flatnonzero(distance[row + 1 :] <= _ALIKE_BITS)  # those before it have seen it
            colours = np.abs(thumbnails[near] - thumbnails[i]).mean(axis=1)
            for j in near[colours <= _ALIKE_COLOUR].tolist():
                joined = groups[paths[i]] | groups[paths[j]]
                groups |= dict.fromkeys(joined, joined)
    distinct = {min(group): sorted(group) for group in groups.values() if len(group) > 1}
    return [Finding("alike", tuple(group), f"{_names(group)} look the same") for group in distinct.values()]


def _thumbnail(stats: ImageStats) -> NDArray[np.uint8]:
    return np.frombuffer(base64.b64decode(stats.thumbnail), np.uint8)


def _captions(captions: Iterable[tuple[str, str, bool]]) -> list[Finding]:
    """Empty captions, and captions that several images share where no class token is meant to."""
    by_text: dict[str, list[str]] = defaultdict(list)
    empty: list[str] = []
    for path, caption, is_shared in captions:
        if not caption.strip():
            empty.append(path)
        elif not is_shared:
            by_text[caption.strip()].append(path)
    found = [Finding("caption", tuple(empty), f"{_names(empty)}: empty caption")] if empty else []
    for text, paths in by_text.items():
        if len(set(paths)) > 1:
            short = text if len(text) <= 40 else f"{text[:40]}..."
            found.append(Finding("caption", tuple(paths), f"{_names(paths)} share the caption {short!r}"))
    return found


def _names(paths: Sequence[str]) -> str:
    return names_in_short([Path(path).name for path in paths], 3)
