"""From a checked dataset TOML to the list of samples: which image, at which size, how often, with which
captions.

The steps, for every dataset:

1. list each subset's images, captions and masks (:mod:`library.data.sources`), learn the images' sizes;
2. hold back ``validation_split`` of each subset that is not regularisation, with 1 all of it: shuffle with
   ``validation_seed``, take the last ``round(n * split)`` ("auto": ``SubsetSettings.held_out``). These are the
   images sd-scripts holds back; it rounds the training part by itself, which can leave an image in both, here training
   is what remains;
3. balance regularisation images (sd-scripts ``DreamBoothDataset``): go through them, ``num_repeats`` each,
   until there are as many as training images, or with ``preserve`` as many as its share; if they do not
   suffice, go round again, once each. Where they are too many, the last ones are not used;
4. give each image its bucket (:mod:`library.data.buckets`).
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Self

from PIL import Image

from library.config.model_types import ConditionKind
from library.data.buckets import Bucketing, ControlSizing, Fit, Images, Size, describe_sizes, same_shape, size_text
from library.data.config import LEAST_TO_HOLD_OUT, Dataset, DatasetConfig, Subset, SubsetSettings, idle_keys
from library.data.file_index import FileIndex, SourceFile, checked_bytes, files_inside, list_folder
from library.data.images import decode, fit_image
from library.data.mask_files import REFUSED, look_at_masks
from library.data.sources import Source, find_sources, is_image, left_out, note_frames, note_lines
from library.errors import UserError, counted, names_in_short
from library.randomness import derive_seed

FindSources = Callable[[Subset, FileIndex, list[str], ConditionKind, int], list[Source]]
MOST_IMAGES = 10_000_000  # of an epoch; its order takes some 150 bytes an image


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """What the samples of one subset share."""

    subset: Subset
    dataset: int  # number of the dataset, from 0
    batch_size: int
    cache: Path  # folder of the latents
    loss_weight: float


@dataclass(frozen=True, slots=True)
class ControlImage:
    """A control image at the size it is encoded at; ``interpolation`` is the filter of its subset."""

    file: SourceFile
    fit: Fit
    interpolation: str | None = None

    @classmethod
    def of(
        cls, file: SourceFile, sizing: ControlSizing, trained: Size, unit: int, interpolation: str | None = None
    ) -> Self:
        """Return the control image in ``file`` as :meth:`ControlSizing.fit` sizes it."""
        assert file.size is not None
        return cls(file, sizing.fit(file.size, trained, unit, file.path), interpolation)

    def key(self) -> tuple[object, ...]:
        """Return what its pixels follow from; its content must have been hashed."""
        assert self.file.content is not None, "contents are hashed first"
        return (self.file.content, self.fit.resized, self.fit.offset, self.fit.encoded, self.interpolation)

    def load(self, flipped: bool = False) -> Image.Image:
        """Return the RGB image at its size."""
        image, _ = decode(checked_bytes(self.file), self.file.path)
        fitted = fit_image(image, self.fit, self.interpolation)
        return fitted.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flipped else fitted


@dataclass(frozen=True, slots=True)
class Sample:
    """One image at one size, seen ``repeats`` times an epoch."""

    group: SampleGroup
    image: SourceFile
    mask: SourceFile | None
    caption: str  # raw
    fit: Fit
    repeats: int
    identity: str  # image_dir as written, name in it, and a number where the same image is listed again
    held_out: bool
    inpaint_mask: SourceFile | None = None
    control_images: tuple[ControlImage, ...] = ()
    caption_file: str | None = None
    paired: SourceFile | None = None

    @property
    def settings(self) -> SubsetSettings:
        """What its subset says."""
        return self.group.subset.settings

    @property
    def files(self) -> list[SourceFile]:
        """The files its tensors follow from."""
        others = [file for file in (self.mask, self.inpaint_mask, self.paired) if file is not None]
        return [self.image, *others, *(control.file for control in self.control_images)]

    @property
    def pair(self) -> tuple[Sample, ...]:
        """It, and of a pair the sample of the other image, of which all else is the same."""
        return (self,) if self.paired is None else (self, replace(self, image=self.paired, paired=None))

    def further_sizes(self, views: int) -> list[Size]:
        """Return the sizes of what is trained beside its first view, of so many, and of its control images."""
        return [self.fit.bucket] * (views - 1) + [control.fit.encoded for control in self.control_images]

    @property
    def orientations(self) -> tuple[bool, ...]:
        """The orientations it is seen in: whether mirrored."""
        return (False, True) if self.flips else (False,)

    @property
    def flips(self) -> bool:
        """Whether some epochs see it mirrored."""
        return self.settings.flip_aug and not self.held_out

    @property
    def mask_variants(self) -> int:
        """How many masks a fill model's sample is seen with, in turn; 0 of another model's."""
        masks = self.group.subset.inpainting
        return 0 if masks is None else 1 if self.held_out else masks.variants

    def sample_id(self, repeat: int) -> int:
        """Identity of one repeat, for noise, crops and choices (63 bits)."""
        return derive_seed("sample", self.identity, repeat)


@dataclass(frozen=True)
class Scan:
    """All samples of a dataset TOML, the indexes of the cache folders, and lines the user should read.

    ``listed`` are the samples for training as the TOML lists them, before regularisation images are balanced;
    ``unused``, part of the warnings, says which of those are not used. ``sizes`` say of a dataset, by its place among
    all, whose rule finds its shapes.
    """

    train: list[Sample]
    held_out: list[Sample]
    indexes: list[FileIndex]
    warnings: list[str]
    listed: list[Sample] = field(default_factory=list)
    sizes: dict[int, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)


def control_sizing(dataset: Dataset) -> ControlSizing:
    """Return how a dataset's control images are sized."""
    return ControlSizing(dataset.control_resolution, dataset.settings.no_resize_control, dataset.of_musubi)


def scan(
    config: DatasetConfig,
    seed: int,
    pixel_multiple: int,
    prior_loss_weight: float = 1.0,
    regular_share: float | None = None,
    find: FindSources = find_sources,
) -> Scan:
    """Find all samples.

    Args:
        config: the checked TOML.
        seed: chooses the held-out images where no validation_seed is given.
        pixel_multiple: every trained side is a multiple of this.
        prior_loss_weight: loss weight of regularisation images.
        regular_share: of the samples of an epoch that are regularisation images; where they are more, epochs see
            them in turn. None: as in sd-scripts half, of those that come first.
        find: lists a subset's images.
    """
    indexes: dict[Path, FileIndex] = {}
    identities: Counter[str] = Counter()
    result = Scan([], [], [], idle_parts(config))
    for number, dataset in enumerate(config.datasets):
        loaded: list[tuple[SampleGroup, list[Source], Images]] = []
        for subset in dataset.subsets:
            if subset.settings.num_repeats == 0:
                continue
            cache = cache_folder(dataset, subset)
            index = indexes.setdefault(cache, FileIndex(cache))
            weight = prior_loss_weight if subset.settings.is_reg else 1.0
            group = SampleGroup(subset, number, dataset.settings.batch_size, cache, weight)
            variants = config.arguments.caption_variants
            sources = find(subset, index, result.warnings, config.conditioning, variants)
            index.measure({file.path: file for source in sources for file in source.files}.values())
            index.save()
            result.warnings.extend(note_frames(subset.where, sources))
            result.warnings.extend(text for _, text in note_lines(subset, sources, variants))
            loaded.append((group, sources, sizes_seen(subset, sources, seed)))
        images = [image for _, _, seen in loaded for image in seen]
        buckets = Bucketing(dataset, pixel_multiple, images)
        train: list[Sample] = []
        for group, sources, seen in loaded:
            samples = _load_subset(group, sources, seen, buckets, control_sizing(dataset), identities)
            train += [sample for sample in samples if not sample.held_out]
            result.held_out.extend(sample for sample in samples if sample.held_out)
            fits = [(source, (sample.fit,)) for source, sample in zip(sources, samples, strict=True)]
            result.warnings.extend(_mask_lines(group.subset, fits, indexes[group.cache]))
        result.listed.extend(train)
        result.train.extend(_balance(train, dataset.where, result.unused, regular_share))
        of_dataset = (one for one in (*result.train, *result.held_out) if one.group.dataset == number)
        used = [one.image.size for one in of_dataset if one.group.subset.only is None]
        if used:
            result.sizes[number] = describe_sizes(buckets, [*filter(None, used)])
    _note_auto_split(config, result)
    result.warnings.extend(result.unused)
    if (number := sum(sample.repeats for sample in result.train)) > MOST_IMAGES:
        raise UserError(
            f"{config.path}: an epoch of {number:,} images, each as often as num_repeats says; at most {MOST_IMAGES:,} "
            "can be kept in order: lower num_repeats, and train more epochs"
        )
    result.indexes.extend(indexes.values())
    _check_split(config, result)
    return result


def _note_auto_split(config: DatasetConfig, result: Scan) -> None:
    """Say what ``validation_split = "auto"`` holds out."""
    if chosen := {sample.image.path for sample in result.held_out if sample.settings.validation_split == "auto"}:
        known = chosen.union(sample.image.path for sample in result.listed if not sample.settings.is_reg)
        line = f"{len(chosen)} of {len(known)} images held out to validate on; validation_split = 0 trains on all"
        result.unused.append(f"{config.path}: {line}")
    elif any(one.settings.validation_split == "auto" for each in config.datasets for one in each.subsets):
        why = f"no subset has {LEAST_TO_HOLD_OUT} images; 0.2 holds out a fifth"
        result.warnings.append(f'{config.path}: validation_split = "auto" holds out no image, as {why}')


def cache_folder(dataset: Dataset, subset: Subset) -> Path:
    """Return the folder of a subset's caches: cache_directory, or .tandem_cache beside the images."""
    if dataset.cache_directory:
        return dataset.cache_directory
    folder = subset.image_dir or (subset.metadata_file.parent if subset.metadata_file else Path())
    return folder / ".tandem_cache"


def sizes_seen(subset: Subset, sources: Sequence[Source], seed: int) -> list[tuple[Size, int]]:
    """Return the size of each image of a subset, and how often an epoch sees it: 0 of one that is held out."""
    own_seed, order = subset.settings.validation_seed, list(range(len(sources)))
    # the permutation depends on the count alone, as in sd-scripts
    random.Random(seed if own_seed is None else own_seed).shuffle(order)
    if subset.settings.validation_split == "auto":
        order = _each_shape_first(order, sources)
    held = set(order[len(order) - subset.settings.held_out(len(order)) :])
    # all of them have been measured
    return [(one.image.size or (1, 1), (i not in held) * subset.settings.num_repeats) for i, one in enumerate(sources)]


def _each_shape_first(order: Sequence[int], sources: Sequence[Source]) -> list[int]:
    """Return ``order`` with an image of each shape first: what is held out is its end, and no shape is held out whole.

    Shapes whose sides' ratios are next to each other and less than a tenth apart count as one.
    """
    ratios = [width / height for width, height in (one.image.size or (1, 1) for one in sources)]
    shapes, last = dict[float, int](), 0.0
    for ratio in sorted(set(ratios)):
        shapes[ratio] = len(shapes) if ratio > 1.1 * last else shapes[last]
        last = ratio
    first = set({shapes[ratios[i]]: i for i in reversed(order)}.values())
    return [*first, *(i for i in order if i not in first)]


def _load_subset(
    group: SampleGroup,
    sources: list[Source],
    seen: Images,
    buckets: Bucketing,
    sizing: ControlSizing,
    identities: Counter[str],
) -> list[Sample]:
    """Return the samples of one subset; ``seen``: of each image, as :func:`sizes_seen` returns it."""
    samples: list[Sample] = []
    settings, unit = group.subset.settings, buckets.pixel_multiple
    for source, (size, times) in zip(sources, seen, strict=True):
        identity = f"{group.subset.written_dir}\n{source.name}"
        identities[identity] += 1
        if identities[identity] > 1:
            identity = f"{identity}\n{identities[identity]}"
        for file in (source.mask, source.inpaint_mask, source.paired):
            if file is not None:
                check_shape(file, size, "paired image" if file is source.paired else "mask")
        held_out = times == 0
        fit = buckets.fit(size, settings.random_crop and not held_out, source.image.path)
        if group.subset.only is not None and math.prod(size) <= buckets.area and not any(side % unit for side in size):
            fit = Fit(size, (0, 0), size, size)  # what the base has painted is seen as it was painted, and not enlarged
        how = (sizing, fit.bucket, unit, settings.resize_interpolation)
        controls = tuple(ControlImage.of(file, *how) for file in source.control_images)
        known = (source.image, source.mask, source.caption, fit, max(1, times), identity, held_out, source.inpaint_mask)
        samples.append(Sample(group, *known, controls, source.caption_file, source.paired))
    return samples


def _mask_lines(subset: Subset, fits: Sequence[tuple[Source, tuple[Fit]]], index: FileIndex) -> list[str]:
    lines, remarks = look_at_masks(fits, subset, index)
    alike: dict[str, list[str]] = defaultdict(list)
    for _, path, remark in remarks:
        alike[remark].append(Path(path).name)
    said = {remark: f"{subset.where}: {remark} ({names_in_short(names, 3)})" for remark, names in alike.items()}
    if refused := [line for remark, line in said.items() if remark.endswith(REFUSED)]:
        remedy = "paint white what is to be filled, with inpaint_alpha_mask erase it; or remove the image"
        raise UserError(f"{refused[0]}: {remedy}")
    return [*lines, *said.values()]


def check_shape(file: SourceFile, size: tuple[int, int], what: str = "mask") -> None:
    """Refuse a file that is not in the proportions of its image of ``size``, a side being off by more than 1 %."""
    assert file.size is not None
    if not same_shape(file.size, size):
        raise UserError(
            f"{file.path}: {what} of {size_text(file.size)} for an image of {size_text(size)}; "
            "save it in the image's proportions"
        )


def _balance(samples: list[Sample], where: str, warnings: list[str], share: float | None) -> list[Sample]:
    """Set the repeats of regularisation images so that they are ``share`` of all; None: as many as the others.

    Where they are too many for a ``share``, they stay, with repeats of 0, and epochs see them in turn; without one the
    last are left out. Those of one bucket keep their number in every epoch, so that epochs have the same batches.
    """
    training = [sample for sample in samples if not sample.settings.is_reg]
    regular = [sample for sample in samples if sample.settings.is_reg]
    odds = 1.0 if share is None else share / (1 - share)
    wanted = math.ceil(sum(sample.repeats for sample in training) * odds)
    if not regular:
        return training
    if not training:
        raise UserError(f"{where}: only regularisation images (is_reg); add a subset to train on")
    if share is not None and wanted < len(regular):
        regular.sort(key=lambda sample: sample.fit.bucket)
        due = {number * len(regular) // wanted for number in range(wanted)}
        shapes = {regular[i].fit.bucket for i in due}
        if unseen := sum(sample.fit.bucket not in shapes for sample in regular):
            why = f"an epoch takes {wanted}, and too few have their sizes; a higher preserve_share takes more"
            warnings.append(f"{where}: {unseen} of {len(regular)} regularisation images are not used: {why}")
        return training + [replace(sample, repeats=int(i in due)) for i, sample in enumerate(regular)]
    before = accumulate((sample.repeats for sample in regular), initial=0)
    used = [sample.repeats for sample, total in zip(regular, before, strict=False) if total < wanted]
    rounds, rest = divmod(max(0, wanted - sum(used)), len(used))
    if unused := len(regular) - len(used):
        why = "are not needed and not used; a higher num_repeats of the images to train on uses more"
        warnings.append(f"{where}: {unused} of {len(regular)} regularisation images {why}")
    pairs = enumerate(zip(regular, used, strict=False))
    return training + [replace(one, repeats=times + rounds + (place < rest)) for place, (one, times) in pairs]


def _check_split(config: DatasetConfig, result: Scan) -> None:
    if not result.train:
        remedy = "lower validation_split" if result.held_out else "every num_repeats is 0: raise one,"
        raise UserError(f"{config.path}: no images left to train on; {remedy} or add images")
    splits = [subset.settings.validation_split for dataset in config.datasets for subset in dataset.subsets]
    splits = [split for split in splits if split != "auto"]
    if any(splits) and not result.held_out:
        images = sum(not sample.settings.is_reg for sample in result.train)  # of the others none is held out
        raise UserError(
            f"{config.path}: validation_split {max(splits):g} holds out none of {counted(images, 'image')}; "
            + (f"use at least {1 / images:.2g}, or 0" if images > 1 else "add images, or set 0")
        )


def idle_parts(config: DatasetConfig) -> list[str]:
    """Return lines on subsets and files that are left out, and on keys without effect, as kohya's configs have them."""
    lines = [*config.overridden, *_beside_numbered(config)]
    for dataset in config.datasets:
        tables: list[Dataset | Subset] = [dataset, *dataset.subsets]
        of_tables = [(table, idle_keys(table.settings.model_dump())) for table in tables]
        for table, idle in of_tables:
            reasons, fields = defaultdict[str, list[str]](list), type(table.settings).model_fields
            for key, why in idle.items():
                value = getattr(table.settings, key)
                users = [o for o, unused in of_tables if key not in unused and getattr(o.settings, key, None) == value]
                reasons[why] += [key] if value != fields[key].default and not users else []  # else who uses it has it
            lines += [f"{table.where}: no effect {why}: {', '.join(keys)}" for why, keys in reasons.items() if keys]
        lines += [f"{one.where}: num_repeats = 0, left out" for one in dataset.subsets if not one.settings.num_repeats]
    return list(dict.fromkeys(lines))


def _beside_numbered(config: DatasetConfig) -> list[str]:
    """Return lines on what folders of folders like ``10_name`` hold beside those."""
    subsets = [subset for dataset in config.datasets for subset in dataset.subsets if subset.metadata_file is None]
    folder = config.path.parent
    roots = dict.fromkeys((folder / subset.written_dir).parent for subset in subsets) if config.path.name == "*" else ()
    lines, known = [], [path for one in subsets for path in (one.image_dir, *one.companion_dirs) if path is not None]
    for root in roots:
        others = dict[str, bool]()
        files = list(list_folder(root, others=others))
        files += filter(is_image, files_inside(root, [*known, *(other for other in roots if other != root)]))
        if unread := left_out(files, (), others):
            lines.append(f"{root}: {unread}")
    return lines
