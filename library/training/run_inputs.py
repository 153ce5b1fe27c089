"""What a run follows from: its settings, what the files hold that they name, its samples, versions of packages.

*A state keeps it*, so that a run that goes on from the state says what has changed since, a line a setting
(:func:`changes_since`). All options of the schema are compared, so a new one cannot be forgotten; ``resume`` alone is
left out, as it is how one goes on. What a state wins over is refused before (``checkpoint.state.read_position``).

*The processes of a run compare it* before the first step (:func:`require_same`). One with another learning rate or
dataset would train on, the gradients being averaged, and one with an image more would wait for ever. A path may differ:
what lies there counts.

Paths are kept by their last part and a hash of the rest: states are uploaded. A sample is a row of hashes; those of
10,000 images take 0.4 MB and a fifth of a second.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from library import __version__
from library.checksums import fingerprint
from library.config.markers import AtStart, MustMatch, options, sorted_pairs
from library.config.model_types import MODEL_FILE_KEYS
from library.data.config import DatasetConfig
from library.data.samples import Sample
from library.errors import UserError, counted, names_in_short
from library.processes import agreed, from_all_processes
from library.randomness import derive_seed
from library.training.checkpoint.metadata import PATHS, without_folders

_PACKAGES = ("torch", "accelerate", "transformers", "numpy", "pillow")
# options that name what a run reads; datasets are compared sample by sample
_READ = (
    *("pretrained_model_name_or_path", *MODEL_FILE_KEYS, "tokenizer", "init_from", "data_dir", "network_weights"),
    *("base_weights", "distill_from", "distill_lora", "sample_model", "sample_prompts", "preserve_prompts"),
    "general_prompts",
)
ASPECTS = (  # of a sample, and their plurals
    ("image", "images"),
    ("caption", "captions"),
    ("mask", "masks"),
    ("set of control images", "sets of control images"),
    ("trained size", "trained sizes"),
    ("number of repeats", "numbers of repeats"),
    ("place in training or validation", "places in training or validation"),
)
_NAMED = 3  # samples in a message


@dataclass(frozen=True)
class Samples:
    """What is trained and validated on.

    Attributes:
        keys: [n] int64, what each is known by.
        aspects: [n, aspects] int32, a hash of each of ``ASPECTS``.
        names: of each, for messages; none of those that a state keeps.
        unit: what one is called.
    """

    keys: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    aspects: Tensor = field(default_factory=lambda: torch.zeros(0, len(ASPECTS), dtype=torch.int32))
    names: Sequence[str] = ()
    unit: str = "image"

    @classmethod
    def of(cls, rows: Iterable[tuple[Sequence[Any], Sequence[Any], str]], unit: str = "image") -> Samples:
        """Return the samples of ``rows``: what one is known by, its aspects, its name; a second of a key is another."""
        seen, keys, aspects, names = Counter[int](), list[int](), list[list[int]](), list[str]()
        for known_by, values, name in rows:
            key = derive_seed(*map(repr, known_by))
            seen[key] += 1
            keys.append(derive_seed(key, seen[key]))
            aspects.append([derive_seed(repr(value)) >> 32 for value in values])  # 31 bits
            names.append(name)
        hashes = torch.tensor(aspects, dtype=torch.int32).reshape(-1, len(ASPECTS))
        return cls(torch.tensor(keys, dtype=torch.int64), hashes, names, unit)

    def changes_from(self, before: Samples) -> list[str]:
        """Return in words, each with a count, what is other than ``before``."""
        old = dict(zip(before.keys.tolist(), before.aspects.tolist(), strict=True))
        keys = self.keys.tolist()
        added = [i for i, key in enumerate(keys) if key not in old]
        changed: list[list[int]] = [[] for _ in ASPECTS]
        for i, (key, aspects) in enumerate(zip(keys, self.aspects.tolist(), strict=True)):
            for column, value in enumerate(aspects):
                if old.get(key, aspects)[column] != value:
                    changed[column].append(i)
        lines = [
            f"{counted(len(rows), *words)} changed{self._named(rows)}"
            for words, rows in zip(ASPECTS, changed, strict=True)
            if rows
        ]
        lines += [f"{counted(len(added), self.unit)} added{self._named(added)}"] if added else []
        gone = len(old.keys() - set(keys))
        return lines + ([f"{counted(gone, self.unit)} removed"] if gone else [])

    def _named(self, rows: Sequence[int]) -> str:
        names = [self.names[i] for i in rows if self.names[i]]
        return f" ({names_in_short(names, _NAMED)})" if names else ""


def samples_of(samples: Iterable[Sample], by_path: bool) -> Samples:
    """Return images whose contents have been hashed, known ``by_path`` as written, or by their names alone."""

    def rows() -> Iterator[tuple[Sequence[Any], Sequence[Any], str]]:
        for sample in samples:
            key = sample.identity if by_path else sample.identity.partition("\n")[2]
            masks = [file and file.content for file in (sample.mask, sample.inpaint_mask)]
            aspects = (
                sample.image.content, sample.caption, masks, [each.key() for each in sample.control_images],
                sample.fit, 1 if sample.held_out else sample.repeats, sample.held_out,
            )  # fmt: skip
            yield (key,), aspects, Path(sample.image.path).name

    return Samples.of(rows())


@dataclass
class RunInputs:
    """See the module's text.

    Attributes:
        settings: option, or "dataset 1: key", -> value as JSON, what is hidden of it behind a NUL as a hash.
        contents: option -> what the files hold that it names.
        samples: what is trained and validated on.
    """

    settings: dict[str, str]
    contents: dict[str, str] = field(default_factory=dict)
    samples: Samples = field(default_factory=Samples)

    def tree(self) -> dict[str, Any]:
        """Return what a state keeps."""
        samples = {"keys": self.samples.keys, "aspects": self.samples.aspects}
        return {"settings": self.settings, "contents": self.contents, "samples": samples}


def settings_of(config: BaseModel) -> dict[str, str]:
    """Return every option but ``resume``, and the versions of what computes."""
    versions = {"version of tandem": __version__} | {f"version of {name}": version(name) for name in _PACKAGES}
    values = {key: _in_order(value, about.metadata) for key, value, about in options(config) if key != "resume"}
    return {key: _stored(key, value) for key, value in (values | versions).items()}


def dataset_settings(config: DatasetConfig) -> dict[str, str]:
    """Return every key of a dataset's tables, with what it inherits."""
    values: dict[str, Any] = {}
    for i, dataset in enumerate(config.datasets, 1):
        sizes = {"resolution": dataset.resolution, "control_resolution": dataset.control_resolution}
        values |= {f"dataset {i}: {k}": v for k, v in (dataset.settings.model_dump() | sizes).items()}
        for j, subset in enumerate(dataset.subsets, 1):
            values |= {f"dataset {i}, subset {j}: {k}": v for k, v in subset.settings.model_dump().items()}
    return {key: _stored(key.rpartition(" ")[2], value) for key, value in values.items()}


def contents_of(config: BaseModel, base: str) -> dict[str, str]:
    """Return option -> what the files hold that it names; ``base``: the base model's fingerprint."""
    found = {key: _content(value) for key, value, _ in options(config) if key in _READ and value}
    return found | ({"pretrained_model_name_or_path": base} if base else {})


def _content(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_content, value))
    with suppress(OSError):  # a prompt that is no file name
        if (path := Path(str(value)).expanduser()).exists():
            return fingerprint(path)
    return str(value)


def _in_order(value: Any, markers: Iterable[Any]) -> Any:
    """Return ``value``, of a list of words without meaning in their order a sorted one."""
    is_set = isinstance(value, list) and any(isinstance(marker, MustMatch) for marker in markers)
    return sorted_pairs(value) if is_set and all(isinstance(word, str) for word in value) else value


def _stored(key: str, value: Any) -> str:
    text = json.dumps(value, default=str)
    shown = json.dumps(without_folders({"": {key: value}})[""].get(key, "..."), default=str)
    return text if shown == text else f"{shown}\0{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def changes_since(saved: Mapping[str, Any], now: RunInputs, config: BaseModel) -> list[str]:
    """Return a line for everything that has changed since a state was saved, with what follows.

    Args:
        saved: the ``tree`` that the state keeps.
        now: of this run.
        config: of this run, which says what an option has an effect on.
    """
    values = {key: value for key, value, _ in options(config)}
    fields = {key: about for key, _, about in options(config)}
    defaults = {k: _stored(k, f.get_default()) for k, f in fields.items() if not f.is_required()}  # of new options

    def effect(key: str) -> str:
        markers = fields[key].metadata if key in fields else ()
        starts = (marker for marker in markers if isinstance(marker, AtStart))
        inert = any(not any(values.get(other) for other in marker.unless) for marker in starts)
        return "no effect on a resumed run" if inert else "from now on"

    lines: list[str] = []
    for key, after in now.settings.items():
        before = saved["settings"].get(key, defaults.get(key, after))
        if before != after:
            shown = [value.partition("\0")[0] for value in (before, after)]
            another = " (another place)" if shown[0] == shown[1] else ""
            lines.append(f"{key} {shown[0]} -> {shown[1]}{another}: {effect(key)}")
    for key, content in now.contents.items():
        if saved["contents"].get(key, content) != content and saved["settings"].get(key) == now.settings.get(key):
            lines.append(f"{key}: its files hold something else: {effect(key)}")
    if found := now.samples.changes_from(Samples(saved["samples"]["keys"], saved["samples"]["aspects"])):
        lines.append(f"dataset: {', '.join(found)}: from now on")
    return lines


def may_differ(key: str) -> bool:
    """Whether processes may have an option or a dataset's key otherwise: it says where something lies."""
    return key.rpartition(" ")[2] in PATHS


def require_same(facts: Mapping[str, str], samples: Samples | None = None) -> None:
    """Compare with the other processes; all call it.

    Args:
        facts: what must be the same, by name.
        samples: likewise.

    Raises:
        UserError: on every process, with a line for each that differs from process 0.
    """
    samples = samples or Samples()
    facts = {key: value for key, value in sorted(facts.items()) if not may_differ(key)}
    rows = [samples.keys.tolist(), samples.aspects.tolist()]
    digest = hashlib.blake2b(json.dumps([facts, rows]).encode(), digest_size=16).hexdigest()
    with agreed("comparing the processes"):
        if len(set(from_all_processes(digest))) == 1:
            return
        every = from_all_processes([facts, rows, list(samples.names)])
        lists = [
            Samples(torch.tensor(k), torch.tensor(a, dtype=torch.int32), n, samples.unit) for _, (k, a), n in every
        ]
        ranks: dict[str, list[str]] = {}
        for rank, (theirs, *_) in enumerate(every):
            differing = "; ".join([*_differences(every[0][0], theirs), *lists[rank].changes_from(lists[0])])
            if rank and every[rank][:2] != every[0][:2]:
                ranks.setdefault(differing or "samples in another order", []).append(str(rank))
        remedy = "start all with the same settings, data, model and versions"
        raise UserError(
            *(f"process {', '.join(who)} differs from process 0: {what}; {remedy}" for what, who in ranks.items())
        )


def _differences(first: Mapping[str, str], other: Mapping[str, str]) -> Iterator[str]:
    for key in sorted(first.keys() | other.keys()):
        values = [each.get(key, "nothing").partition("\0")[0] for each in (other, first)]
        if first.get(key) != other.get(key):
            yield f"{key} is {values[0]} instead of {values[1]}"
