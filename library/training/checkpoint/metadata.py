"""What a LoRA file says about its training, in the keys of kohya's sd-scripts.

The keys and their meaning are those of ``train_network.py`` and ``flux_train_network.py`` (48d368f), here without
their ``ss_``. What sd-scripts can do and Tandem cannot is said to be off, as sd-scripts itself says it.
``docs/lora_formats.md`` lists all of them, and the two that are left out.

*Images.* sd-scripts describes a dataset TOML in three JSON values: ``ss_datasets`` (each dataset with its buckets, tags
and subsets), and of all of them together ``ss_tag_frequency`` and ``ss_dataset_dirs``. Without a TOML it writes the
settings of its one dataset as keys of their own (``ss_resolution``, ``ss_bucket_info``, ...), which is what many
readers look for; here these are added wherever a TOML has one dataset.

Counts are sd-scripts': an image counts ``num_repeats`` times; regularisation images are counted as listed, not as
balanced, except in buckets; tags are what stands between commas, in lower case, once per image whatever its repeats.
Folders are given by their last part, so that nobody's home folder is published.

*Hashes*, by which model sites and sd-webui know a base model's file. The whole file is read for one of them: about 15 s
for 24 GB where the processor has SHA instructions. So it is done once a run, and what was found is remembered beside
the dataset's caches under the file's size and time of change.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

from library.checksums import read_checked_json, write_checked_json
from library.config.chat_schema import ChatTrainConfig
from library.config.markers import split_pairs
from library.config.model_types import PATHS
from library.config.run_schema import SavingConfig
from library.config.schema import TrainConfig
from library.data.batches import DataParallelRank
from library.data.buckets import Bucketing
from library.data.captions import plain_caption
from library.data.config import Dataset, DatasetConfig, Subset
from library.data.dataset import TrainingData
from library.data.samples import Sample
from library.errors import UserError
from library.files import read_toml
from library.models.registry import lora_targets
from library.randomness import derive_seed
from library.training.checkpoint.state import Position
from library.training.optim.factory import describe_optimizer

_KEYS = read_toml(Path(__file__).with_name("sd_scripts_metadata.toml"))[0]
_OFF: dict[str, object] = dict.fromkeys(_KEYS["off"]["false"], False) | dict.fromkeys(_KEYS["off"]["none"])
LEAST_FACTS = set(_KEYS["least"])  # what sd-scripts writes with no_metadata too


def lora_facts(config: TrainConfig | ChatTrainConfig, started_at: float, total_steps: int) -> dict[str, object]:
    """Return the facts of a run that hold for its files, whatever model the LoRA is for.

    Args:
        config: the whole configuration.
        started_at: when training began, seconds since 1970.
        total_steps: of the run.
    """
    network, optimizer, training = config.network, config.optimizer, config.training
    return {
        **({} if network.network_type in ("lora", "dora") else {"network_module": "lycoris.kohya"}),
        "network_dim": "Dynamic" if network.dim_from_weights else network.network_dim,
        "network_alpha": "Dynamic" if network.dim_from_weights else network.network_alpha,
        "learning_rate": optimizer.learning_rate,
        "optimizer": describe_optimizer(optimizer),
        "lr_scheduler": optimizer.lr_scheduler,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "mixed_precision": training.mixed_precision,
        "seed": training.seed,
        "max_train_steps": total_steps,
        "training_started_at": started_at,
        "training_comment": config.saving.training_comment,
    }


def image_facts(
    config: TrainConfig,
    data: TrainingData,
    started_at: float,
    batches_per_epoch: int,
    dp_rank: DataParallelRank,
    epochs: int,
) -> dict[str, object]:
    """Return the facts that an image LoRA's run adds to :func:`lora_facts`.

    Args:
        config: the whole configuration.
        data: the images.
        started_at: when training began, seconds since 1970; names the session too.
        batches_per_epoch: over all processes.
        dp_rank: of one process.
        epochs: of the run; the last may be incomplete.
    """
    network, memory = config.network, data.text_folder / "file_hashes.json"
    facts: dict[str, object] = {
        **_OFF,
        **lora_targets()[config.model.model_type].kohya_facts,
        **{key: getattr(getattr(config, section), key) for section, keys in _KEYS["options"].items() for key in keys},
        **dataset_facts(data, dp_rank.step_batches),
        **model_file_facts("sd_model", config.model.pretrained_model_name_or_path, memory),
        **model_file_facts("vae", config.model.ae or config.model.vae, memory),
        "network_dropout": network.network_dropout or None,
        "scale_weight_norms": network.scale_weight_norms or None,
        "ip_noise_gamma": config.flow.ip_noise_gamma or None,
        "unet_lr": None if network.network_train_text_encoder_only else config.optimizer.learning_rate,
        "text_encoder_lr": config.optimizer.text_encoder_lr or None,
        "cache_latents": True,
        "huber_scale": 1.0,
        "huber_schedule": "constant",
        "session_id": derive_seed("session", config.training.seed, str(started_at)) % 2**32,
        "num_batches_per_epoch": math.ceil(batches_per_epoch / dp_rank.processes),
        "num_epochs": epochs,
    }
    if network.network_args:
        facts["network_args"] = json.dumps(split_pairs(network.network_args, "network_args"))
    return facts


def spec_fields(saving: SavingConfig) -> dict[str, str]:
    """Return the fields of ModelSpec that a person set."""
    values = {key.removeprefix("metadata_"): value for key, value in saving if key.startswith("metadata_")}
    return {key: value for key, value in values.items() if value}


def trigger_phrase(config: DatasetConfig) -> str:
    """Return the trigger words of a dataset's subsets, each once; "" without any."""
    words = (subset.settings.trigger_word for dataset in config.datasets for subset in dataset.subsets)
    return ", ".join(dict.fromkeys(filter(None, words)))


def save_facts(position: Position, total_steps: int, now: float) -> dict[str, object]:
    """Return the facts of one file. Epochs are counted from 1: those done, and at the end of training those begun."""
    at_end = position.step >= total_steps and position.batches > 0
    return {"steps": position.step, "epoch": position.epoch + at_end, "training_finished_at": now}


def without_folders(sections: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """Return the configuration with paths cut to their last part: a published LoRA shows nobody's home folder.

    The caption command is left out: it may hold folders and passwords.
    """
    left = {name: {key: keys[key] for key in keys if key != "caption_command"} for name, keys in sections.items()}
    return {name: {key: _cut(key, value) for key, value in keys.items()} for name, keys in left.items()}


_PROMPT_IMAGE = re.compile(r"(--[cm]i[\s=]+)(.+?)(?=\s+--[a-z]|$)", re.IGNORECASE)


def _cut(key: str, value: object) -> object:
    if isinstance(value, list):
        return [_cut_images(item) if key == "sample_prompts" else _cut(key, item) for item in value]
    if not isinstance(value, str):
        return value
    windows = PureWindowsPath(value)  # takes both kinds of slash
    if key in PATHS or value.startswith(("/", "~")) or windows.is_absolute():
        return windows.name
    return value


def _cut_images(prompt: str) -> str:
    return _PROMPT_IMAGE.sub(lambda found: found[1] + PureWindowsPath(found[2]).name, prompt)


# Captions in sentences hardly share a tag, and 100,000 of them would make a header of tens of megabytes, twice: the
# most frequent tags are kept, as many as fit.
TAG_BYTES = 1 << 18


def dataset_facts(data: TrainingData, batches_at_once: int) -> dict[str, object]:
    """Return what is known of the images, under sd-scripts' names without ``ss_``.

    Args:
        data: the datasets with their samples.
        batches_at_once: processes times accumulated batches, for ``total_batch_size``.
    """
    datasets = data.config.datasets
    listed = [[s for s in data.listed if s.group.dataset == number] for number in range(len(datasets))]
    used = [[s for s in data.train.samples if s.group.dataset == number] for number in range(len(datasets))]
    described = [
        _describe(dataset, data.pixel_multiple, found, trained, TAG_BYTES // len(datasets))
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
    regular = [sample for sample in listed if sample.settings.is_reg]
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
    described |= {key: getattr(settings, key) for key in _KEYS["subset"]}
    if settings.image_dir:
        described["image_dir"] = PurePath(settings.image_dir).name
    if settings.metadata_file:
        return described | {"metadata_file": PurePath(settings.metadata_file).name}
    return described | {"class_tokens": settings.class_tokens, "is_reg": settings.is_reg}


def _facts_of_one(dataset: Dataset, described: Mapping[str, Any], batches_at_once: int) -> dict[str, object]:
    """Return the keys that sd-scripts writes where there is one dataset."""
    settings, resolution = dataset.settings, ("resolution", "min_bucket_reso", "max_bucket_reso")
    facts: dict[str, object] = {key: described[key] for key in ("batch_size_per_device", "enable_bucket", *resolution)}
    facts["bucket_no_upscale"] = settings.bucket_no_upscale
    facts["total_batch_size"] = settings.batch_size * batches_at_once
    facts["color_aug"] = False
    facts["bucket_info"] = json.dumps(described["bucket_info"])
    subsets = [subset.settings for subset in dataset.subsets]
    held_out = max(subsets, key=lambda one: one.held_out(1000))
    facts |= {key: getattr(held_out, key) for key in ("validation_seed", "validation_split")}
    for key in _KEYS["one_value"]:
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


def _folder(subset: Subset) -> str:
    """Return the name a subset goes by: that of its metadata file, or else of its folder."""
    return PurePath(subset.settings.metadata_file or subset.settings.image_dir or "").name


def _folders(listed: Iterable[list[Sample]], regular: bool) -> dict[str, dict[str, int]]:
    """Return folder -> repeats and images; a name that comes again gets a number."""
    folders: dict[str, dict[str, int]] = {}
    for samples in listed:
        for subset, members in _by_subset(s for s in samples if s.settings.is_reg == regular):
            name, number = _folder(subset), 2
            while name in folders:
                name, number = f"{_folder(subset)} ({number})", number + 1
            folders[name] = {"n_repeats": subset.settings.num_repeats, "img_count": len(members)}
    return folders


def _tag_frequency(samples: Iterable[Sample]) -> dict[str, Counter[str]]:
    """Return folder -> tag -> captions it stands in (as often as it stands there)."""
    frequency: dict[str, Counter[str]] = {}
    for sample in samples:
        settings = sample.settings
        caption = plain_caption(sample.caption, settings) if settings.trigger_word else sample.caption
        tags = (tag.strip().lower() for tag in caption.split(","))
        frequency.setdefault(_folder(sample.group.subset), Counter()).update(tag for tag in tags if tag)
    return frequency


def most_frequent(frequency: Mapping[str, Mapping[str, int]], limit: int) -> dict[str, dict[str, int]]:
    """Return ``frequency`` (folder -> tag -> count) without the rarest tags, so that its JSON fits ``limit`` bytes."""
    chosen: dict[str, dict[str, int]] = {folder: {} for folder in frequency}
    left = limit - len(json.dumps(chosen))
    entries = [(count, folder, tag) for folder, tags in frequency.items() for tag, count in tags.items()]
    for count, folder, tag in sorted(entries, key=lambda entry: -entry[0]):
        left -= len(json.dumps({tag: count}))  # braces for the comma and the blank between two entries
        if left < 0:
            break
        chosen[folder][tag] = count
    return chosen


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


def webui_hash(path: Path) -> str:
    """Return sd-webui's old hash: 8 digits of SHA-256 over 64 KiB at offset 1 MiB (sd-scripts' ``model_hash``)."""
    with open(path, "rb") as file:
        file.seek(0x100000)
        return hashlib.sha256(file.read(0x10000)).hexdigest()[:8]


def sha256_of(path: Path, memory: Path) -> str:
    """Return the SHA-256 of a file, from ``memory`` (a JSON file) where it is known; ``memory`` learns it."""
    about = path.stat()
    key = f"{path.resolve()}|{about.st_size}|{about.st_mtime_ns}|{about.st_ctime_ns}"
    try:
        known = read_checked_json(memory)
        assert isinstance(known, dict)
    except (OSError, ValueError, AssertionError):  # nothing there yet, or cut short: found out again
        known = {}
    if key not in known:
        with open(path, "rb") as file:
            known[key] = hashlib.file_digest(file, "sha256").hexdigest()
        write_checked_json(memory, known)
    return known[key]


def model_file_facts(name: str, path: str | None, memory: Path) -> dict[str, object]:
    """Return ``<name>_name``, and for a single file ``<name>_hash`` and ``new_<name>_hash``, as sd-scripts calls them.

    Args:
        name: "sd_model" or "vae".
        path: of the file or folder; None: nothing is returned.
        memory: where hashes are remembered.
    """
    if path is None:
        return {}
    file = Path(path).expanduser()
    facts: dict[str, object] = {f"{name}_name": file.name}
    if file.is_file():
        try:
            facts |= {f"{name}_hash": webui_hash(file), f"new_{name}_hash": sha256_of(file, memory)}
        except OSError as error:
            raise UserError(f"{file}: cannot be read ({error.strerror}); check the disk") from error
    return facts
