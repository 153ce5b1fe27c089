"""What a LoRA file says about the images it was trained on, in the keys of kohya's sd-scripts.

sd-scripts (``train_network.py``, 48d368f) describes a dataset TOML in three JSON values: ``ss_datasets`` (each dataset
with its buckets, tags and subsets), and of all of them together ``ss_tag_frequency`` and ``ss_dataset_dirs``. Without
a TOML it writes the settings of its one dataset as keys of their own (``ss_resolution``, ``ss_bucket_info``, ...),
which is what many readers look for; here these are added wherever a TOML has one dataset.

Counts are sd-scripts': an image counts ``num_repeats`` times; regularisation images are counted as listed, not as
balanced, except in buckets; tags are what stands between commas, in lower case, once per image whatever its repeats.
Folders are given by their last part, so that nobody's home folder is published.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from library.data.buckets import Bucketing
from library.data.config import Dataset, Subset
from library.data.dataset import TrainingData
from library.data.samples import Sample

# Captions in sentences hardly share a tag, and 100,000 of them would make a header of tens of megabytes, twice: the
# most frequent tags are kept, as many as fit.
TAG_BYTES = 1 << 18

_SUBSET_KEYS = (
    "num_repeats",
    "flip_aug",
    "random_crop",
    "shuffle_caption",
    "keep_tokens",
    "keep_tokens_separator",
    "secondary_separator",
    "enable_wildcard",
    "caption_prefix",
    "caption_suffix",
    "resize_interpolation",
)
_ONE_VALUE_KEYS = (  # of subsets; said of the whole where all of them agree
    "flip_aug",
    "random_crop",
    "shuffle_caption",
    "keep_tokens",
    "caption_dropout_rate",
    "caption_dropout_every_n_epochs",
    "caption_tag_dropout_rate",
    "resize_interpolation",
)


def dataset_facts(data: TrainingData, batches_at_once: int, tag_bytes: int = TAG_BYTES) -> dict[str, object]:
    """Return what is known of the images, under sd-scripts' names without ``ss_``.

    Args:
        data: the datasets with their samples.
        batches_at_once: processes times accumulated batches, for ``total_batch_size``.
        tag_bytes: the most that ``tag_frequency`` may take, as JSON.
    """
    datasets = data.config.datasets
    listed = [[s for s in data.listed if s.group.dataset == number] for number in range(len(datasets))]
    used = [[s for s in data.train.samples if s.group.dataset == number] for number in range(len(datasets))]
    described = [
        _describe(dataset, data.pixel_multiple, found, trained, tag_bytes // len(datasets))
        for dataset, found, trained in zip(datasets, listed, used, strict=True)
    ]
    tags: dict[str, dict[str, int]] = {}
    for one in described:
        tags = one["tag_frequency"] | tags  # a folder of several datasets counts once
    facts: dict[str, object] = {
        "num_train_images": sum(one["num_train_images"] for one in described),
        "num_reg_images": sum(one["num_reg_images"] for one in described),
        "num_validation_images": len(data.validation or ()),
        "datasets": json.dumps(described),
        "tag_frequency": json.dumps(tags),
        "dataset_dirs": json.dumps(_folders(listed, regular=False)),
    }
    if len(datasets) == 1:
        facts |= _facts_of_one(datasets[0], described[0], batches_at_once)
        facts["reg_dataset_dirs"] = json.dumps(_folders(listed, regular=True))
    return facts


def _describe(
    dataset: Dataset, pixel_multiple: int, listed: list[Sample], used: list[Sample], tag_bytes: int
) -> dict[str, Any]:
    """Return one entry of ``ss_datasets``: of the samples as listed, and as used after balancing."""
    settings = dataset.settings
    low, high = Bucketing(dataset, pixel_multiple).limits or (None, None)
    regular = [sample for sample in listed if _is_regular(sample)]
    return {
        "is_dreambooth": all(subset.metadata_file is None for subset in dataset.subsets),
        "batch_size_per_device": settings.batch_size,
        "num_train_images": sum(s.repeats for s in listed) - sum(s.repeats for s in regular),
        "num_reg_images": sum(s.repeats for s in regular),
        "resolution": dataset.resolution,
        "enable_bucket": settings.enable_bucket,
        "min_bucket_reso": low,
        "max_bucket_reso": high,
        "tag_frequency": most_frequent(_tag_frequency(listed), tag_bytes),
        "bucket_info": _bucket_info(used) if settings.enable_bucket else None,
        "resize_interpolation": None,  # of a whole dataset there is none
        "subsets": [_describe_subset(subset, samples) for subset, samples in _by_subset(listed)],
    }


def _describe_subset(subset: Subset, samples: list[Sample]) -> dict[str, Any]:
    settings = subset.settings
    described: dict[str, Any] = {"img_count": len(samples), "color_aug": False}
    described |= {key: getattr(settings, key) for key in _SUBSET_KEYS}
    if settings.image_dir:
        described["image_dir"] = PurePath(settings.image_dir).name
    if settings.metadata_file:
        return described | {"metadata_file": PurePath(settings.metadata_file).name}
    return described | {"class_tokens": settings.class_tokens, "is_reg": settings.is_reg}


def _facts_of_one(dataset: Dataset, described: Mapping[str, Any], batches_at_once: int) -> dict[str, object]:
    """Return the keys that sd-scripts writes where there is one dataset."""
    settings = dataset.settings
    facts: dict[str, object] = {
        "batch_size_per_device": settings.batch_size,
        "total_batch_size": settings.batch_size * batches_at_once,
        "resolution": dataset.resolution,
        "color_aug": False,
        "enable_bucket": settings.enable_bucket,
        "bucket_no_upscale": settings.bucket_no_upscale,
        "min_bucket_reso": described["min_bucket_reso"],
        "max_bucket_reso": described["max_bucket_reso"],
        "bucket_info": json.dumps(described["bucket_info"]),
        "validation_seed": settings.validation_seed,
        "validation_split": settings.validation_split,
    }
    subsets = [subset.settings for subset in dataset.subsets]
    for key in _ONE_VALUE_KEYS:
        if len({getattr(one, key) for one in subsets}) == 1:
            facts[key] = getattr(subsets[0], key)
    return facts


def _by_subset(samples: Iterable[Sample]) -> list[tuple[Subset, list[Sample]]]:
    """Return the subsets that have samples, in their order, with them."""
    found: dict[str, tuple[Subset, list[Sample]]] = {}
    for sample in samples:
        subset = sample.group.subset
        found.setdefault(subset.where, (subset, []))[1].append(sample)
    return list(found.values())


def _is_regular(sample: Sample) -> bool:
    return sample.group.subset.settings.is_reg


def _folder(subset: Subset) -> str:
    """Return the name a subset goes by: that of its metadata file, or else of its folder."""
    return PurePath(subset.settings.metadata_file or subset.settings.image_dir or "").name


def _folders(listed: Iterable[list[Sample]], regular: bool) -> dict[str, dict[str, int]]:
    """Return folder -> repeats and images; a name that comes again gets a number."""
    folders: dict[str, dict[str, int]] = {}
    for samples in listed:
        for subset, members in _by_subset(s for s in samples if _is_regular(s) == regular):
            name, number = _folder(subset), 2
            while name in folders:
                name, number = f"{_folder(subset)} ({number})", number + 1
            folders[name] = {"n_repeats": subset.settings.num_repeats, "img_count": len(members)}
    return folders


def _tag_frequency(samples: Iterable[Sample]) -> dict[str, Counter[str]]:
    """Return folder -> tag -> captions it stands in (as often as it stands there)."""
    frequency: dict[str, Counter[str]] = {}
    for sample in samples:
        tags = (tag.strip().lower() for tag in sample.caption.split(","))
        frequency.setdefault(_folder(sample.group.subset), Counter()).update(tag for tag in tags if tag)
    return frequency


def most_frequent(frequency: Mapping[str, Mapping[str, int]], limit: int) -> dict[str, dict[str, int]]:
    """Return ``frequency`` (folder -> tag -> count) without the rarest tags, so that its JSON fits ``limit`` bytes."""
    kept: dict[str, dict[str, int]] = {folder: {} for folder in frequency}
    left = limit - len(json.dumps(kept))
    entries = [(count, folder, tag) for folder, tags in frequency.items() for tag, count in tags.items()]
    for count, folder, tag in sorted(entries, key=lambda entry: -entry[0]):
        left -= len(json.dumps({tag: count}))  # braces for the comma and the blank between two entries
        if left < 0:
            break
        kept[folder][tag] = count
    return kept


def _bucket_info(samples: list[Sample]) -> dict[str, Any]:
    """Return the buckets that are used, smallest first, with their images times repeats, and the mean aspect error."""
    counts: Counter[tuple[int, int]] = Counter()
    errors: list[float] = []
    for sample in samples:
        counts[sample.fit.bucket] += sample.repeats
        (bucket_width, bucket_height), size = sample.fit.bucket, sample.image.size
        assert size is not None, "sizes are known once a dataset is read"
        errors.append(abs(bucket_width / bucket_height - size[0] / size[1]))
    buckets = {i: {"resolution": size, "count": count} for i, (size, count) in enumerate(sorted(counts.items()))}
    return {"buckets": buckets, "mean_img_ar_error": sum(errors) / len(errors) if errors else 0}
