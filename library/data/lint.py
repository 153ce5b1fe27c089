"""What is wrong with a dataset, or looks as if it were, before hours are spent on it.

``check`` looks at everything; ``summarise`` only at what is known without opening an image.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from library.data.buckets import KEPT, Bucketing, Fit, Size, same_shape, size_text
from library.data.captions import MARKS, caption_variants, has_word, marks_left, words_around
from library.data.config import DatasetConfig, Subset, SubsetSettings
from library.data.file_index import FileIndex, SourceFile
from library.data.mask_files import REFUSED, look_at_masks
from library.data.samples import Sample, Scan, cache_folder, idle_parts, scan, sizes_seen
from library.data.sources import Source, find_images, find_sources, note_frames, note_lines
from library.errors import UserError, counted, gathering, names_in_short
from library.files import read_toml

Advance = Callable[[int], None]
Start = Callable[[str, int], Advance]
TooLong = Callable[[Iterable[str]], Mapping[str, tuple[int, int]]] | None  # library.models.text.TextEncoder.too_long
Caption = tuple[str, str, SubsetSettings]  # of an image: its path, raw caption, what its subset says

KINDS = read_toml(Path(__file__).with_name("finding_kinds.toml"))[0]


@dataclass(frozen=True)
class Finding:
    """One thing about one image or several that belong together."""

    kind: str
    paths: tuple[str, ...]
    text: str

    @property
    def is_error(self) -> bool:
        """Whether training would stop at it."""
        return bool(KINDS[self.kind]["is_error"])


@dataclass(frozen=True)
class Report:
    """All findings of a dataset."""

    images: int
    findings: list[Finding]
    notes: tuple[str, ...] = ()  # what training says too: files that are left out, frames that are not used
    sizes: tuple[str, ...] = ()  # of each dataset, whose rule finds its shapes, and what they keep
    samples: tuple[Sample, ...] = field(default=(), compare=False)  # that training would see
    refused: str | None = None  # why there are none, or none held out

    def by_kind(self) -> dict[str, list[Finding]]:
        """Return the findings of each kind, in the order of :data:`KINDS`, kinds without any left out."""
        found = {kind: [finding for finding in self.findings if finding.kind == kind] for kind in KINDS}
        return {kind: findings for kind, findings in found.items() if findings}

    def lines(self) -> list[str]:
        """Return a line for each kind found, with its first example."""
        return [f"{title(found).lower()} ({found[0].text})" for found in self.by_kind().values()]


def title(found: Sequence[Finding]) -> str:
    """Return what findings of one kind are about, and how many images they name: "Captions: 3 images"."""
    kind = KINDS[found[0].kind]
    named = {path for one in found for path in (one.paths[:1] if kind["names_one"] else one.paths)}
    return f"{kind['title']}: {counted(len(named), 'image')}" if named else str(kind["title"])


def check(
    config: DatasetConfig, pixel_multiple: int, start: Start, too_long: TooLong = None, seed: int = 0, share: float = 0
) -> Report:
    """Look at every image, mask and caption of a dataset TOML.

    Args:
        config: the checked TOML.
        pixel_multiple: image sides are multiples of this.
        start: ``start(description, total) -> advance(n)``, for the progress bar.
        too_long: which captions the model's text encoder does not read to their end.
        seed: the training's, which chooses the held-out images.
        share: the training's ``regular_share``; 0 as in sd-scripts (see ``scan``).
    """
    findings, captions, notes = list[Finding](), list[Caption](), idle_parts(config)
    images: dict[str, SourceFile] = {}
    known: dict[str, list[Source]] = {}
    problems: dict[str, str] = {}  # by path of an unreadable file
    for _, [*datasets] in groupby(config.datasets, key=lambda dataset: dataset.number):  # each resolution of a table
        loaded: list[tuple[Subset, FileIndex, list[Source]]] = []
        used: list[tuple[Size, int]] = []
        for subset in datasets[0].subsets:
            index = FileIndex(cache_folder(datasets[0], subset))
            sources = _sources(subset, index, findings, notes, config)
            files = {file.path: file for source in sources for file in source.files}
            broken = index.decode(files.values(), partial(start, f"checking {subset.written_dir}"))
            findings += [Finding("unreadable", (path,), f"{Path(path).name}: {why}") for path, why in broken.items()]
            problems |= broken
            whole = [each for each in sources if each.image.size and each.image.path not in problems]
            used += sizes_seen(subset, whole, seed) if subset.settings.num_repeats else []
            loaded.append((subset, index, known.setdefault(subset.where, sources)))
        buckets = [Bucketing(dataset, pixel_multiple, used) for dataset in datasets]
        for subset, index, sources in loaded:
            images_read = list[tuple[Source, list[Fit]]]()
            for source in sources:
                found, fits = _of_image(source, problems, subset, buckets if subset.settings.num_repeats else ())
                findings += found
                if not problems.keys() & {file.path for file in source.files}:
                    images_read.append((source, fits))
            lines, remarks = look_at_masks(images_read, subset, index)
            notes += [*note_frames(subset.where, sources), *lines]
            for image, path, remark in remarks:
                kind = "setup" if remark.endswith(REFUSED) else "mask value"
                findings.append(Finding(kind, tuple({image: 1, path: 1}), f"{Path(path).name}: {remark}"))
            for some, text in note_lines(subset, sources, config.arguments.caption_variants):
                findings.append(Finding("lines", tuple(source.image.path for source in some), text))
            captions += [(one.image.path, one.caption, subset.settings) for one in sources if not one.is_refused]
            images |= {source.image.path: source.image for source in sources}
    findings += [*_duplicates(images), *_captions(captions), *_trigger_words(captions)]
    findings += long_captions(captions, too_long, config.arguments.caption_variants)
    how = {"seed": seed, "pixel_multiple": pixel_multiple, "regular_share": share or None}
    trained, refused = _scanned(config, known, findings, **how)
    if refused and not any(finding.is_error for finding in findings):  # of all together: too few to train, or hold out
        findings.append(Finding("setup", (), refused))
    sizes = [f"{config.datasets[number].where}: {text}" for number, text in trained.sizes.items()]
    samples = (*trained.train, *trained.held_out)
    return Report(len(images), findings, (*notes, *trained.unused), tuple(sizes), samples, refused)


def _duplicates(images: Mapping[str, SourceFile]) -> Iterator[Finding]:
    by_content: dict[str, list[str]] = defaultdict(list)
    for path, file in images.items():
        if file.content is not None:
            by_content[file.content].append(path)
    for paths in by_content.values():
        if len(paths) > 1:
            yield Finding("duplicate", tuple(paths), f"{_names(paths)} are the same file")


def refuse_damaged(config: DatasetConfig, start: Start) -> None:
    """Decode to its end, once, each image, mask and control image that is trained on.

    Raises:
        UserError: a line for each that is damaged.
    """
    problems: dict[str, str] = {}
    for dataset, subset in ((one, subset) for one in config.datasets for subset in one.subsets):
        if subset.settings.num_repeats:
            index = FileIndex(cache_folder(dataset, subset))
            files = {file.path: file for source in _sources(subset, index, [], [], config) for file in source.files}
            problems |= index.decode(files.values(), partial(start, "checking images"))
            index.save()
    if problems:
        raise UserError(*(f"{path}: {problem}" for path, problem in problems.items()))


def summarise(samples: Sequence[Sample]) -> list[str]:
    """Return lines on what a start knows of its samples anyway: captions, and sizes against buckets."""
    images, captions = {sample.image.path: sample for sample in samples}, captions_of(samples)
    findings = [*_captions(captions), *_trigger_words(captions)]
    fits: dict[str, list[Fit]] = defaultdict(list)
    for sample in samples:
        fits[sample.image.path].append(sample.fit)
    for path, sample in images.items():
        assert sample.image.size is not None
        findings += _upscaled(path, sample.image.size, fits[path])
    return Report(len(images), findings).lines()


def captions_of(samples: Sequence[Sample]) -> list[Caption]:
    """Return the captions of the samples' images, each image once."""
    return [(path, one.caption, one.settings) for path, one in {one.image.path: one for one in samples}.items()]


def _sources(
    subset: Subset, index: FileIndex, findings: list[Finding], notes: list[str], config: DatasetConfig
) -> list[Source]:
    """The subset's images; where training would refuse it, as many of them as can be found without it."""
    found, refusals, conditioning = list[Source](), list[str](), config.conditioning
    with gathering(refusals):
        found = find_sources(subset, index, notes, conditioning, config.arguments.caption_variants)
        index.save()
        return found
    with gathering(refusals):
        found = find_images(subset, index, [], conditioning, refusals)
    findings += [Finding("setup", (), text) for text in dict.fromkeys(refusals)]
    return found


def _scanned(
    config: DatasetConfig, known: Mapping[str, list[Source]], findings: Sequence[Finding], **how: Any
) -> tuple[Scan, str | None]:
    """Scan the images that training would not stop at; where the split of all is refused, as if nothing was held out.

    Args:
        known: of a subset, by its ``where``. how: more arguments of ``scan``.
    """
    broken = {path for finding in findings if finding.is_error for path in finding.paths}
    refused: str | None = None

    def find(subset: Subset, *_: object) -> list[Source]:
        return [one for one in known[subset.where] if broken.isdisjoint(file.path for file in one.files)]

    def unsplit(subset: Subset) -> Subset:
        return replace(subset, settings=subset.settings.model_copy(update={"validation_split": 0.0}))

    whole = tuple(replace(one, subsets=tuple(map(unsplit, one.subsets))) for one in config.datasets)
    for each in (config, replace(config, datasets=whole)):
        try:
            return scan(each, find=find, **how), refused
        except UserError as error:
            refused = refused or str(error)
    return Scan([], [], [], []), refused


def _of_image(
    source: Source, problems: Collection[str], subset: Subset, buckets: Sequence[Bucketing]
) -> tuple[list[Finding], list[Fit]]:
    """Findings about the size of an image and of its masks and control images; how it is cropped.

    ``problems``: unreadable files.
    """
    path, size, fits = source.image.path, source.image.size, list[Fit]()
    if path in problems or size is None:
        return [], fits
    found: list[Finding] = []
    for kind, files in (("mask", (source.mask, source.inpaint_mask)), ("control", source.control_images)):
        for file in files:
            if file is not None and file.path not in problems and file.size and not same_shape(file.size, size):
                sizes = f"{size_text(file.size)} for an image of {size_text(size)}"
                found.append(Finding(kind, (path, file.path), f"{Path(file.path).name}: {sizes}"))
    try:
        fits = [one.fit(size, subset.settings.random_crop, path) for one in buckets]
        found += _upscaled(path, size, fits)
    except UserError as error:
        found.append(Finding("setup", (path,), str(error)))
    return found, fits


def _upscaled(path: str, size: tuple[int, int], fits: Sequence[Fit]) -> list[Finding]:
    """What is said of an image that is smaller than its bucket at one resolution or several."""
    factors = {fit.bucket: sorted((fit.resized[0] / size[0], fit.resized[1] / size[1])) for fit in fits}
    # Tandem's rule may enlarge by half of what it may crop, rounding by a pixel
    large = {bucket: both[1] for bucket, both in factors.items() if both[0] > 1 / KEPT}
    if not large:
        return []
    times = ", ".join(f"{factor:.2f} times to fill {size_text(bucket)}" for bucket, factor in large.items())
    fitting = [size_text(bucket) for bucket in factors if bucket not in large]
    remedy = f"; it fills {fitting[-1]} (bucket_no_upscale enlarges none)" if fitting else ""
    return [Finding("upscaled", (path,), f"{Path(path).name}: {size_text(size)} is enlarged {times}{remedy}")]


def _captions(captions: Iterable[Caption]) -> list[Finding]:
    """Empty captions without a trigger word, and captions that several images share where none is meant to."""
    by_text: dict[str, list[str]] = defaultdict(list)
    empty: list[str] = []
    for path, caption, settings in captions:
        if not caption.strip():
            empty += [] if settings.trigger_word else [path]
        elif not settings.class_tokens and not settings.is_reg:
            by_text[caption.strip()].append(path)
    found = [Finding("caption", tuple(empty), f"{_names(empty)}: empty caption")] if empty else []
    for text, paths in by_text.items():
        if len(set(paths)) > 1:
            short = text if len(text) <= 40 else f"{text[:40]}..."
            found.append(Finding("caption", tuple(paths), f"{_names(paths)} share the caption {short!r}"))
    return found


def long_captions(captions: Sequence[Caption], too_long: TooLong, variants: int) -> list[Finding]:
    """Return what is said of captions with more tokens than the text encoder reads, in any of their ``variants``."""
    if too_long is None:
        return []
    texts = {path: caption_variants(raw, settings, variants) for path, raw, settings in captions}
    long = too_long(dict.fromkeys(chain.from_iterable(texts.values())))
    paths = [path for path, every in texts.items() if not long.keys().isdisjoint(every)]
    most = f"the {max((kept for kept, _ in long.values()), default=0)} tokens that the text encoder reads of one"
    text = f"{len(paths)} of {counted(len(texts), 'caption')} are longer than {most}"
    text += f"; the rest of each is not trained on: {_names(paths)}"
    return [Finding("long", tuple(paths), text)] if paths else []


def _trigger_words(captions: Sequence[Caption]) -> list[Finding]:
    """Trigger words in captions of regularisation images, and within other words; marks that are trained as text."""
    found: list[Finding] = []
    if odd := {path: marks for path, caption, of in captions if (marks := marks_left(caption, of))}:
        named = ", ".join(sorted(set[str]().union(*odd.values())))
        text = f"{_names([*odd])}: {named} is trained as text; a trigger_word takes the place of {' and '.join(MARKS)}"
        found.append(Finding("trigger", tuple(odd), text))
    for word in filter(None, dict.fromkeys(settings.trigger_word for _, _, settings in captions)):
        if regular := [path for path, caption, of in captions if of.is_reg and has_word(caption, word)]:
            text = f"{_names(regular)}: a caption of regularisation images says {word!r}, the trigger word"
            found.append(Finding("trigger", tuple(regular), text))
        within: dict[str, list[str]] = defaultdict(list)
        for path, caption, _ in captions:
            for longer in words_around(caption, word):
                within[longer].append(path)
        for longer, paths in sorted(within.items()):
            text = f"{_names(paths)}: the trigger word {word!r} is part of {longer!r}; a rarer one is told apart"
            found.append(Finding("trigger", tuple(paths), text))
    return found


def _names(paths: Sequence[str]) -> str:
    return names_in_short([Path(path).name for path in paths], 3)
