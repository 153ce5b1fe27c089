"""The data side of a training run behind one function.

::

    config = load_dataset_config(arguments.dataset_config, arguments, conditioning="none")
    data = build_dataset(config, seed, pixel_multiple=16, latent_factor=8)
    check_masks(data, masked_loss=False)
    print(*data.describe(), sep="\n")
    data.cache_latents(image_encoder, batch_size, progress)     # of images, and of what they are painted from
    data.cache_text(text_encoder, prompts, batch_size, progress)
    sampler = data.batch_sampler(dp_rank)
    loader = DataLoader(data.train, batch_sampler=sampler, collate_fn=collate)

With several processes each encodes its share; the caller waits for all of them before reading.
"""

from __future__ import annotations

import gc
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from library.config.schema import PreservationConfig
from library.console import Console
from library.data.batches import (
    ALL,
    Bucket,
    CachedDataset,
    CaptionPreservation,
    DataParallelRank,
    EpochBatchSampler,
    collate,
    has_mask,
)
from library.data.buckets import ControlSizing
from library.data.cache import (
    EncodeJob,
    ImageEncoder,
    Progress,
    TextEncoder,
    TextJob,
    absent,
    encode_latents,
    encode_texts,
    latent_jobs,
    read_cached,
)
from library.data.captions import has_word
from library.data.config import DatasetConfig, Subset, SubsetSettings
from library.data.directions import Direction
from library.data.samples import Sample, Scan, control_sizing, scan
from library.errors import UserError, counted

ENCODING_IMAGES, ENCODING_CAPTIONS = "encoding images", "encoding captions"


@contextmanager
def collecting_later() -> Iterator[None]:
    """Inside the block garbage is not collected: of 100,000 samples all stay, and looking for garbage takes seconds."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@collecting_later()
def build_dataset(
    config: DatasetConfig,
    seed: int,
    pixel_multiple: int,
    latent_factor: int,
    prior_loss_weight: float = 1.0,
    preservation: PreservationConfig | None = None,
    painted: Painted | None = None,
    directions: Sequence[Direction] = (),
) -> TrainingData:
    """Find all samples of a dataset TOML; nothing is encoded yet.

    Args:
        config: the checked TOML.
        seed: order, orientation, crops and captions follow from it.
        pixel_multiple: image sides are multiples of this (VAE factor times patch size, 16 for FLUX).
        latent_factor: pixels per latent (8 for FLUX).
        prior_loss_weight: loss weight of regularisation images.
        preservation: which samples the frozen model's answers are the targets of.
        painted: pictures that the base has painted.
        directions: of a slider of prompts.

    Raises:
        UserError: anything wrong with the files; ``preserve_class`` has no trigger word to replace.
    """
    painted = painted or Painted()
    if painted.regularisation:
        added = painted_subset(painted.regularisation, is_reg=True)
        with_it = (replace(each, subsets=(*each.subsets, added)) for each in config.datasets)
        config = replace(config, datasets=tuple(with_it))
    share, captions = preserving(preservation or PreservationConfig(), config, prior_loss_weight)
    found = scan(config, seed, pixel_multiple, prior_loss_weight, share)
    classes = (subset for dataset in config.datasets for subset in dataset.subsets if subset.settings.preserve_class)
    if captions is None and (inert := next(classes, None)):
        found.warnings.append(f'{inert.where}: no effect without preserve = "prior": preserve_class')
    data = TrainingData(config, found, seed, pixel_multiple, latent_factor, captions, directions)
    if painted.general:
        first = config.datasets[0]
        alone = replace(first, subsets=(painted_subset(painted.general),))
        data.measure_on(scan(replace(config, datasets=(alone,)), seed, pixel_multiple))
    return data


def check_masks(data: TrainingData, masked_loss: bool) -> None:
    """Refuse masks without ``masked_loss``, and it without masks; of a fill model the region to fill is one."""
    masked = [sample for sample in data.train.samples if has_mask(sample)]
    if masked_loss and not masked and data.conditioning != "fill":
        raise UserError(
            f"{data.config.path}: masked_loss is set but no subset has masks; set alpha_mask or conditioning_data_dir"
        )
    if masked and not masked_loss:
        key = "conditioning_data_dir" if masked[0].mask is not None else "alpha_mask"
        raise UserError(f"{masked[0].group.subset.where}: {key} is set but masked_loss is not; set masked_loss = true")


def check_pairs(data: TrainingData, train_on: str) -> None:
    """Refuse pairs without ``train_on``, and with it single images and captions that take others' place."""
    for sample in data.samples:
        where, preservation = sample.group.subset.where, data.train.preservation
        if train_on == "images" or data.train.directions:
            if sample.paired is not None:
                needs = 'train_on = "preferences", or "slider" without slider_prompts'
                raise UserError(f"{where}: paired_directory: has no effect without {needs}; set that, or remove it")
        elif sample.paired is None and not sample.settings.is_reg:
            what = f'no paired_directory, and train_on = "{train_on}" learns from pairs'
            raise UserError(f"{where}: {what}; name the folder of the other images")
        if train_on != "images" and preservation is not None and preservation.captions(sample, sample.caption):
            remedy = "remove it, and name preserve_prompts or add an is_reg subset"
            raise UserError(f"preserve_class, preserve_blank: a pair is not seen with another caption; {remedy}")


def check_references(data: TrainingData, most: int | None) -> None:
    """Raise a UserError for the first image with more than ``most`` control images; None allows any number."""
    for dataset in filter(None, (data.train, data.validation)):
        for sample in dataset.samples:
            if most is not None and len(sample.control_images) > most:
                found = f"{len(sample.control_images)} control images"
                raise UserError(f"{sample.image.path}: {found}, this model takes {most}; remove the others")


@dataclass(frozen=True)
class Painted:
    """Pictures that the base has painted, each kind in a folder of its own (``library.training.sampling.painting``).

    Attributes:
        regularisation: to train on beside the dataset.
        general: to measure by what changes elsewhere.
    """

    regularisation: Sequence[Path] = ()
    general: Sequence[Path] = ()


def painted_subset(pictures: Sequence[Path], is_reg: bool = False) -> Subset:
    """Return painted pictures as a subset: what else lies in their folder is not of it."""
    folder, only = pictures[0].parent, frozenset(path.name for path in pictures)
    settings = SubsetSettings(image_dir=str(folder), caption_extension=".txt", multiline_captions=True, is_reg=is_reg)
    # known by the folder's name, which says what they are: samples are the same wherever the cache lies
    return Subset(f"generated images in {folder}", settings, f"painted/{folder.name}", folder, None, None, only=only)


def preserving(
    settings: PreservationConfig, config: DatasetConfig, loss_weight: float
) -> tuple[float | None, CaptionPreservation | None]:
    """Return the share of an epoch that regularisation images are, and how training images preserve; or None, None."""
    subsets = [subset.settings for dataset in config.datasets for subset in dataset.subsets]
    has_class = bool(settings.preserve_class) or any(each.preserve_class for each in subsets)
    if has_class and not any(each.trigger_word for each in subsets):
        raise UserError(
            f"{config.path}: preserve_class: takes the place of the trigger word, which no subset has; set trigger_word"
        )
    for each in subsets:
        trigger, word = each.trigger_word, each.preserve_class or settings.preserve_class
        if trigger and word and has_word(word, trigger):
            raise UserError(
                f"{config.path}: preserve_class {word!r} holds the trigger word {trigger!r}, which is to be learnt; "
                "name what the subject is an example of"
            )
    if settings.preserve == "none":
        return None, None
    regular = any(each.is_reg and each.num_repeats for each in subsets)
    in_captions = has_class + settings.preserve_blank
    alone = settings.preserve_outside_mask and not (regular or in_captions or settings.preserve_prompts)
    if alone and "preserve_share" in settings.model_fields_set:
        raise UserError("preserve_share: has no effect with preserve_outside_mask alone: every mask counts; remove it")
    share = settings.preserve_share / max(1, in_captions + regular)
    of_regular = share * regular
    of_others = share * in_captions / (1 - of_regular)
    return of_regular, CaptionPreservation(of_others, settings.preserve_class, settings.preserve_blank, loss_weight)


class TrainingData:
    """Training samples, held-out samples and their caches.

    Attributes:
        train: the training samples.
        validation: the held-out samples, or None.
        general: painted pictures of general prompts, which are measured by, or None.
        warnings: lines the user should read (also part of :meth:`describe`).
        listed: the samples for training as the TOML lists them, regularisation images not balanced.
        conditioning: what the samples bring besides a caption.
    """

    def __init__(
        self,
        config: DatasetConfig,
        found: Scan,
        seed: int,
        pixel_multiple: int,
        latent_factor: int,
        preservation: CaptionPreservation | None = None,
        directions: Sequence[Direction] = (),
    ) -> None:
        self.config = config
        self.conditioning, arguments = config.conditioning, config.arguments
        self.seed = seed
        self.warnings = list(dict.fromkeys(found.warnings))  # once, at however many resolutions
        self.listed, self._sizes = found.listed, found.sizes
        self.pixel_multiple = pixel_multiple
        self.latent_factor = latent_factor
        self._indexes = found.indexes
        self.text_folder = Path(arguments.cache_directory or found.indexes[0].folder).expanduser().resolve()
        self._shared = (seed, arguments.caption_variants, self.text_folder, pixel_multiple, latent_factor)
        self.train = CachedDataset(found.train, *self._shared, preservation, directions)
        self.validation = (
            CachedDataset(found.held_out, *self._shared, directions=directions) if found.held_out else None
        )
        self.general: CachedDataset | None = None
        self._captions: list[str] | None = None

    def measure_on(self, found: Scan) -> None:
        """Have the pictures in ``found`` cached with the others, to be measured by."""
        self._indexes += found.indexes
        samples = [replace(sample, held_out=True, repeats=1) for sample in found.train]
        self.general = CachedDataset(samples, *self._shared)

    @property
    def _datasets(self) -> list[CachedDataset]:
        return [each for each in (self.train, self.validation, self.general) if each is not None]

    @property
    def _samples(self) -> list[Sample]:
        return [sample for dataset in self._datasets for sample in dataset.samples]

    @property
    def samples(self) -> list[Sample]:
        """The samples to train on and those held out."""
        return [*self.train.samples, *(self.validation.samples if self.validation else ())]

    @property
    def cache_folders(self) -> list[Path]:
        """The folders that cache files are written into."""
        caches = dict.fromkeys(sample.group.cache for sample in self._samples)
        folders = [cache / kind for cache in caches for kind in ("latents", "conditions")]
        return [*(index.folder for index in self._indexes), *folders, self.text_folder / "text"]

    def batch_sampler(self, dp_rank: DataParallelRank = ALL) -> EpochBatchSampler:
        """Return the batch sampler of the training samples, for one data-parallel rank."""
        return EpochBatchSampler(self.train.buckets, self.train.batch_sizes, self.seed, dp_rank)

    def captions(self) -> list[str]:
        """Return every caption that can be asked for, each once: all variants, and "" where captions drop."""
        if self._captions is None:
            every = (dataset.all_captions(sample) for dataset in self._datasets for sample in dataset.samples)
            self._captions = list(dict.fromkeys(chain.from_iterable(every)))
        return self._captions

    @property
    def control_sizing(self) -> ControlSizing:
        """How control images are sized; of several datasets as in the first."""
        return control_sizing(self.config.datasets[0])

    @property
    def has_regions(self) -> bool:
        """Whether any sample has a mask or a region to fill."""
        return self.conditioning == "fill" or any(has_mask(sample) for sample in self._samples)

    def cache_latents(
        self, encoder: ImageEncoder, batch_size: int, progress: Progress, rank: int = 0, world: int = 1
    ) -> None:
        """Encode the latents that are missing, conditions included; process ``rank`` of ``world`` does its share.

        The encoder's weights are freed.
        """
        assert (encoder.pixel_multiple, encoder.latent_factor) == (self.pixel_multiple, self.latent_factor)
        jobs = [job for job in self.missing_latents(encoder.fingerprint) if _owner(job.path, world) == rank]
        try:
            if jobs:
                encode_latents(jobs, encoder, batch_size, progress(ENCODING_IMAGES, len(jobs)))
        finally:
            encoder.release()

    def cache_text(
        self,
        encoder: TextEncoder,
        extra: Sequence[TextJob | str],
        batch_size: int,
        progress: Progress,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """Encode the captions that are missing, and ``extra`` ones (sample prompts), each once; free the weights."""
        missing = self.missing_text(encoder.fingerprint, extra, encoder.sees_references)
        paths = (job.path(self.text_folder, encoder.fingerprint) for job in missing)
        mine = [job for job, path in zip(missing, paths, strict=True) if _owner(path, world) == rank]
        try:
            if mine:
                encode_texts(self.text_folder, mine, encoder, batch_size, progress(ENCODING_CAPTIONS, len(mine)))
        finally:
            encoder.release()

    def text_embeddings(self, text: TextJob | str) -> dict[str, Tensor]:
        """Return the cached embeddings of a caption or extra caption, without a batch dimension."""
        fingerprint = self.train.text_fingerprint
        assert fingerprint is not None, "ask missing_text or cache_text first"
        return read_cached(_as_job(text).path(self.text_folder, fingerprint))

    def describe(self) -> list[str]:
        """Return the lines of a summary of datasets, subsets, buckets and counts."""
        lines: list[str] = []
        for number, dataset in enumerate(self.config.datasets):
            settings = dataset.settings
            width, height = dataset.resolution
            kind = "buckets" if settings.enable_bucket else "one size"
            lines.append(f"dataset {dataset.number}: {width}x{height}, {kind}, batch size {settings.batch_size}")
            for subset in dataset.subsets:
                of_subset = [s for s in self._samples if s.group.subset is subset]
                lines.append(f"  {_describe_subset(subset.written_dir, of_subset)}")
            in_buckets = Counter(key[1] for key in self.train.buckets if key[0] == number)
            for (wide, high), count in sorted(in_buckets.items()):
                lines.append(f"    {wide:>5} x {high:<5} {count:>7} sample{'s' * (count > 1)} an epoch")
            lines += [f"    {self._sizes[number]}"] if number in self._sizes else []
        held_out = len({sample.image.path for sample in (self.validation.samples if self.validation else ())})
        batches = self.batch_sampler().batches_per_epoch()
        lines.append(
            f"{counted(len(self.train), 'sample')} and {counted(batches, 'batch', 'batches')} an epoch, "
            f"{counted(held_out, 'image')} held out, {counted(len(self.captions()), 'different caption')}"
        )
        return [*lines, *(f"note: {warning}" for warning in self.warnings)]

    def hashed_samples(self) -> list[Sample]:
        """Return the samples to train on and those held out, contents hashed."""
        self._hash_contents()
        return self.samples

    def _hash_contents(self) -> None:
        """Hash the samples' files, and save what is read of them."""
        files = {id(file): file for sample in self._samples for file in sample.files}
        for index in self._indexes:
            index.hash_contents(file for file in files.values() if index.knows(file))
            index.save()

    @collecting_later()
    def missing_latents(self, fingerprint: str) -> list[EncodeJob]:
        """Return the latents, of conditions too, that an image encoder with this fingerprint has yet to encode."""
        self._hash_contents()
        for dataset in self._datasets:
            dataset.image_fingerprint = fingerprint
        return absent((job.path, job) for job in latent_jobs(self._samples, self.seed, fingerprint))

    @collecting_later()
    def missing_text(
        self, fingerprint: str, extra: Sequence[TextJob | str] = (), sees_references: bool = False
    ) -> list[TextJob]:
        """Return the captions that a text encoder with this fingerprint has yet to encode; see :meth:`cache_text`."""
        jobs = self._texts(fingerprint, extra, sees_references)
        return absent((job.path(self.text_folder, fingerprint), job) for job in jobs)

    def cached_files(self, encoder: ImageEncoder, text_encoder: TextEncoder, extra: Sequence[TextJob]) -> list[Path]:
        """Return where all latents, conditions and text embeddings lie once they are cached by these encoders."""
        self._hash_contents()
        name, folder = text_encoder.fingerprint, self.text_folder
        texts = [job.path(folder, name) for job in self._texts(name, extra, text_encoder.sees_references)]
        return [*(job.path for job in latent_jobs(self._samples, self.seed, encoder.fingerprint)), *texts]

    def _texts(self, fingerprint: str, extra: Sequence[TextJob | str], sees_references: bool) -> list[TextJob]:
        for dataset in self._datasets:
            dataset.text_fingerprint, dataset.text_sees_references = fingerprint, sees_references
        own = [TextJob(caption) for caption in self.captions()]
        if sees_references:
            self._hash_contents()
            own = [
                dataset.text_job(sample, caption, flipped)
                for dataset in self._datasets
                for sample in dataset.samples
                for caption in dataset.all_captions(sample)
                for flipped in sample.orientations
            ]
        return [*own, *map(_as_job, extra)]


def _as_job(text: TextJob | str) -> TextJob:
    return TextJob(text) if isinstance(text, str) else text


def _owner(path: Path, world: int) -> int:
    """The process that encodes a file: by its name, so all agree whatever they found missing."""
    return int(path.stem, 16) % world


def _describe_subset(name: str, samples: list[Sample]) -> str:
    if not samples:
        return f"{name}: left out"
    settings = samples[0].settings
    marks = [
        key for key in ("is_reg", "flip_aug", "random_crop", "alpha_mask", "shuffle_caption") if getattr(settings, key)
    ]
    if samples[0].mask is not None:
        marks.append("masks")
    if samples[0].paired is not None:
        marks.append("pairs")
    if (masks := samples[0].group.subset.inpainting) is not None:
        marks.append(masks.describe())
    if samples[0].control_images:
        counts = sorted({len(sample.control_images) for sample in samples})
        marks.append(f"{' or '.join(map(str, counts))} control image{'s' if counts != [1] else ''} an image")
    trained = [sample for sample in samples if not sample.held_out]
    repeats = sorted({sample.repeats for sample in trained}) or [0]
    times = f"{repeats[0]}" if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
    if samples[0].settings.is_reg and repeats[0] == 0:
        times = f"1, {sum(sample.repeats for sample in trained)} an epoch in turn"
    parts = [f"{name}: {counted(len(trained), 'image')} x {times}"]
    if len(samples) > len(trained):
        parts.append(f"{len(samples) - len(trained)} held out")
    return ", ".join(parts + marks)


def workers_with_room(train: CachedDataset, workers: int, processes: int, console: Console) -> int:
    """Return ``workers``, or 0 where shared memory has no room for the batches of those of ``processes``.

    Workers hand batches over in /dev/shm, two each, and wait for ever where it is full: where it is too small for twice
    as much, and for what is being trained on, there are none, and ``console`` says so.
    """
    shared = Path("/dev/shm")
    if not workers or not shared.is_dir() or train.image_fingerprint is None:  # a dry run has nothing cached
        return workers
    nbytes = 0
    for bucket in set(train.buckets):
        first = collate(train.views((0, train.buckets.index(bucket)))).tensors()
        nbytes = max(nbytes, sum(tensor.nbytes for tensor in first) * train.batch_sizes[bucket])
    needed, free = 2 * (2 * workers + 2) * nbytes * processes, shutil.disk_usage(shared).free
    if needed <= free:
        return workers
    room = f"{free / 2**20:,.0f} MiB free, and {workers} workers need {needed / 2**20:,.0f}"
    remedy = "batches are loaded without workers (in Docker: --shm-size=2g)"
    console.print(f"note: {shared} has {room}: {remedy}", soft_wrap=True)
    return 0


def held_out_loader(images: CachedDataset, most: int) -> DataLoader[Any]:
    """Return the first ``most`` held-out images in batches of one bucket each, always in the same order."""
    by_bucket: dict[Bucket, list[tuple[int, int]]] = {}
    for index, bucket in list(enumerate(images.buckets))[:most]:
        by_bucket.setdefault(bucket, []).append((0, index))  # epoch 0: held-out samples have no random choices
    batches = [
        items[i : i + images.batch_sizes[bucket]]
        for bucket, items in by_bucket.items()
        for i in range(0, len(items), images.batch_sizes[bucket])
    ]
    return DataLoader(images, batch_sampler=batches, collate_fn=collate)
