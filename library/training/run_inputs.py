"""What a run follows from: its settings, what the files hold that they name, its samples, versions of packages.

*A state keeps it*, so that a run that goes on from the state says what has changed since, a line a setting
(:func:`changes_since`). All options of the schema are compared, so a new one cannot be forgotten; ``resume`` alone is
left out, as it is how one goes on. What a state wins over is refused before (``checkpoint.state.read_position``).

*The processes of a run compare it* before the first step (:func:`require_same`). One with another learning rate or
dataset would train on, the gradients being averaged, and one with an image more would wait for ever. A path may differ:
what lies there counts.

Paths are kept by their last part and a hash of all: states are uploaded. A sample is a row of hashes; those of
10,000 images take 0.7 MB in a state, and 0.4 s.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from library import __version__
from library.checksums import fingerprint
from library.config.markers import EffectOnly, is_nothing, listed, options
from library.config.model_types import PATHS
from library.config.optimizer_types import OPTIMIZERS, PIP_NAMES
from library.data.captions import drawn_from
from library.data.config import DatasetConfig
from library.data.samples import Sample
from library.errors import UserError, counted, names_in_short
from library.processes import agreed, from_all_processes
from library.training.checkpoint.metadata import without_folders

_MODULES = {"torch", "accelerate", "transformers", "tokenizers", "sentencepiece", "diffusers", "numpy"}
_MODULES |= {"pillow", "gguf", "deepspeed", "triton", *(row.module.partition(".")[0] for row in OPTIMIZERS.values())}
_PACKAGES = sorted(PIP_NAMES.get(name, name) for name in _MODULES)
version = cache(metadata.version)  # which parses a file
_BASE, _PART = "pretrained_model_name_or_path", "base model's "
# of these options it counts what lies there sample by sample, or not at all
_PLACES = {"dataset_config", "train_data", "validation_data", "cache_directory", "distill_cache", "resume"}
_PLACES |= {"output_dir", "logging_dir", "save_fallback_dir"}
ASPECTS = ("image", "caption", "mask", "control image", "size", "repeat count", "split")  # of a sample
RESUMED = "resume's state"
_CAUSES = ("model_type", RESUMED)  # where one of these differs, others differ with it
_NAMED = 3  # samples in a message
_NAMED_SETTINGS = 6


@dataclass
class RunInputs:
    """See the module's text.

    Attributes:
        settings: option, or "dataset 1: key", -> value as JSON; of a path its last part, and behind a NUL a hash.
        contents: option -> what the files hold that it names; and of each part of the base model, by ``_PART`` and its
            option or name. An earlier version's state has no parts.
        samples: what one is known by -> a hash of each of ``ASPECTS``; both hashed.
        names: likewise -> its name in messages; a state keeps none.
    """

    settings: dict[str, str]
    contents: dict[str, str] = field(default_factory=dict)
    samples: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def add(self, known_by: str, aspects: Sequence[object], name: str = "") -> None:
        """Add a sample; a second that is known by the same is another."""
        key = _hash(known_by)
        while key in self.samples:
            key = _hash(key)
        self.samples[key], self.names[key] = " ".join(_hash(value)[:6] for value in aspects), name

    def add_images(self, samples: Iterable[Sample], by_path: bool) -> RunInputs:
        """Add images whose contents have been hashed, known ``by_path`` as written, or by their names alone."""
        for each in samples:
            caption = drawn_from(each.caption, each.settings)
            masks = [file and file.content for file in (each.mask, each.inpaint_mask)]
            controls, repeats = [image.key() for image in each.control_images], 1 if each.held_out else each.repeats
            images = each.image.content if each.paired is None else (each.image.content, each.paired.content)
            aspects = (images, caption, masks, controls, each.fit, repeats, each.held_out)
            key = each.identity if by_path else each.identity.partition("\n")[2]
            self.add(key, aspects, Path(each.image.path).name)
        return self


def _hash(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(errors="surrogateescape"), digest_size=8).hexdigest()


def settings_of(config: BaseModel) -> dict[str, str]:
    """Return every option but ``resume``, and the versions of what computes."""
    versions = {"version of tandem": __version__} | {f"version of {name}": "not installed" for name in _PACKAGES}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[f"version of {name}"] = version(name)
    values = {key: value for key, value, _ in options(config) if key != "resume"}
    return {key: _stored(key, value) for key, value in (values | versions).items()}


def dataset_settings(config: DatasetConfig) -> dict[str, str]:
    """Return every key of a dataset's tables, with what it inherits."""
    found: dict[str, str] = {}
    for i, dataset in enumerate(config.datasets, 1):
        tables = {f"dataset {i}": dataset.settings.model_dump() | {"resolution": dataset.resolution}}
        tables |= {f"dataset {i}, subset {j}": s.settings.model_dump() for j, s in enumerate(dataset.subsets, 1)}
        found |= {f"{name}: {key}": _stored(key, table[key]) for name, table in tables.items() for key in table}
    return found


def contents_of(config: BaseModel, base: str, parts: Mapping[str, str]) -> dict[str, str]:
    """Return ``RunInputs.contents``; ``base``, ``parts``: fingerprints of the base model's weights and other parts."""
    keys = PATHS - _PLACES - parts.keys()
    found = {key: _content(value) for key, value, _ in options(config) if key in keys and value}
    return found | ({_BASE: base} if base else {}) | {_PART + name: content for name, content in parts.items()}


def _content(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_content, value))
    with suppress(OSError):  # a prompt that is no file name
        if (path := Path(str(value)).expanduser()).exists():
            return fingerprint(path)
    return str(value)


def _stored(key: str, value: Any) -> str:
    text = json.dumps(value, default=str)
    shown = json.dumps(without_folders({"": {key: value}})[""].get(key, "..."), default=str)
    return text if shown == text else f"{shown}\0{_hash(text)}"


def _shown(value: str) -> str:
    return value.partition("\0")[0]


def changes_since(saved: Mapping[str, Any] | None, now: RunInputs, config: BaseModel) -> list[str]:
    """Return a line for everything that has changed since a state was saved.

    Args:
        saved: attributes of the ``RunInputs`` that the state keeps; None of one of an earlier version.
        now: of this run.
        config: of this run.
    """
    if saved is None:
        return ["the state does not say with which settings and data; what has changed since is not known"]
    new = {key: _stored(key, about.get_default()) for key, _, about in options(config) if not about.is_required()}
    changed = {k: (old, v) for k, v in now.settings.items() if (old := (new | saved["settings"]).get(k, v)) != v}
    lines = {
        key: f"{key} {_shown(before)} -> {_shown(after)}{' (another place)' * (_shown(before) == _shown(after))}"
        for key, (before, after) in changed.items()
    }
    for key, content in now.contents.items():
        if saved["contents"].get(key, content) != content and key.removeprefix(_PART) not in lines:
            lines.setdefault(key, f"{key}: its files hold something else")
    before, after = ({key.rpartition(": ")[0] for key in each} for each in (saved["settings"], now.settings))
    both = before & after  # of a table that came or went its own tables are not named
    tables = sorted(name for name in before ^ after if name and name.partition(",")[0] in (name, *both))
    lines |= {name: f"{name} {'added' if name in after else 'removed'}" for name in tables}
    samples = sample_changes(saved["samples"], now.samples, now.names)
    return [*lines.values(), *([f"dataset: {', '.join(samples)}"] if samples else [])]


def idle_options(config: BaseModel, dataset: DatasetConfig) -> list[str]:
    """Return a line for every option that was given another value than its default and that this run does not use."""
    acting = _acting({key: value for key, value, _ in options(config)}, dataset_settings(dataset))
    return [
        f"{key} = {json.dumps(value)}: no effect without {listed(mark.where)}"
        for key, value, about in options(config)
        for mark in about.metadata
        if isinstance(mark, EffectOnly) and mark.where and acting.isdisjoint(mark.where)
        if value != about.get_default()
    ]


def _acting(values: Mapping[str, Any], tables: Mapping[str, str]) -> set[str]:
    """Return the options, and keys of the dataset's ``tables``, that ask for something."""
    of_tables = {key.rpartition(": ")[2] for key, text in tables.items() if not is_nothing(json.loads(_shown(text)))}
    return of_tables | {key for key, value in values.items() if not is_nothing(value)}


def sample_changes(before: Mapping[str, str], now: Mapping[str, str], names: Mapping[str, str]) -> list[str]:
    """Return in words, each with a count, in what samples differ; arguments as of ``RunInputs``."""
    found: dict[tuple[str, str], list[str]] = {(aspect, "changed"): [] for aspect in ASPECTS}
    for key in (key for key in now if before.get(key, now[key]) != now[key]):
        for aspect, old, new in zip(ASPECTS, before[key].split(), now[key].split(), strict=True):
            found[aspect, "changed"] += [key] if old != new else []
    unit = "image" if any(names.values()) else "conversation"
    gone = Counter(before[key] for key in before if key not in now)
    for key in (key for key in now if key not in before):
        is_moved = unit == "image" and gone[now[key]] > 0  # noise follows from paths, so that it is another sample
        gone[now[key]] -= is_moved
        found.setdefault((unit, "by another path" if is_moved else "added"), []).append(key)
    found[unit, "removed"] = [*gone.elements()]
    lines = []
    for (noun, verb), keys in found.items():
        named = names_in_short([names[key] for key in keys if names.get(key)], _NAMED)
        lines += [f"{counted(len(keys), noun)} {verb}{f' ({named})' if named else ''}"] if keys else []
    pairs = zip([key for key in before if key in now], [key for key in now if key in before], strict=True)
    moved = sum(one != other for one, other in pairs)
    return lines + [f"{counted(moved, unit)} in another order"] * bool(moved)


def require_same(facts: Mapping[str, str], inputs: RunInputs | None = None) -> None:
    """Compare ``facts``, by name, and the samples of ``inputs`` with those of the other processes; all call it.

    Raises:
        UserError: on every process, with a line for each that differs from process 0.
    """
    inputs, lines = inputs or RunInputs({}), list[str]()
    facts = {key: facts[key] for key in sorted(facts) if key.rpartition(" ")[2] not in PATHS}
    with agreed("comparing the processes"):
        if len(set(from_all_processes(_hash((facts, inputs.samples))))) == 1:
            return
        (first, rows, _), *others = from_all_processes((facts, inputs.samples, inputs.names))
        for rank, (theirs, samples, names) in enumerate(others, 1):
            keys = [key for key in first | theirs if first.get(key) != theirs.get(key)]
            shown = [key for key in _CAUSES if key in keys] or sorted(keys)[:_NAMED_SETTINGS]
            values = [[_shown(each.get(key, "nothing")) for each in (theirs, first)] for key in shown]
            found = [f"{key} is {mine} instead of {other}" for key, (mine, other) in zip(shown, values, strict=True)]
            found += [f"{counted(len(keys) - len(shown), 'more setting')}"] * (len(keys) > len(shown))
            found += sample_changes(rows, samples, names)
            remedy = "start all with the same settings, data, model, state and versions"
            lines += [f"process {rank} differs from process 0: {'; '.join(found)}; {remedy}"] if found else []
        if os.environ.get("RANK", "0") == "0":  # the others end with it
            raise UserError(*lines)
