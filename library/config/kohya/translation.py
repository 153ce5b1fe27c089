"""A configuration of kohya's on its way to the schema's keys: its values, and a note on every key that changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic.fields import FieldInfo

from library.config.markers import is_nothing, words_of
from library.config.model_types import Tool

_IMAGE_SOURCES = ("train_data_dir", "reg_data_dir", "in_json")
_DATASET_NAMES = {"dataset_repeats": "num_repeats", "caption_extention": "caption_extension"}  # there -> in a TOML
Known = Mapping[str, tuple[str, FieldInfo]]  # the schema: key -> (section, field)
Outcome = Literal["same", "changed", "renamed", "accepted", "dataset", "left out", "default", "note", "refused"]


@dataclass(frozen=True)
class Note:
    """What became of one key; ``text`` is one line for the person, with the remedy where it is refused."""

    key: str
    outcome: Outcome
    text: str
    where: str = ""
    to: str = ""  # where it is renamed: the key it became

    def line(self) -> str:
        """Return the note as a line of its own: the place (or key) and what became of it."""
        place = self.key if self.outcome == "default" else self.where or self.key
        return f"{place}: {self.text}"


@dataclass
class Translation:
    """A configuration in the schema's keys.

    Attributes:
        values, origins: keys of the schema, and where each one stands.
        tool: whose configuration it is; None: Tandem's own.
        notes: what became of the keys, in the order in which that was settled; nothing on unchanged keys.
        dataset: keys that belong in the dataset TOML.
    """

    values: dict[str, Any]
    origins: dict[str, str]
    tool: Tool | None = None
    notes: list[Note] = field(default_factory=list)
    dataset: dict[str, Any] = field(default_factory=dict)

    def note(self, key: str, outcome: Outcome, text: str, to: str = "") -> None:
        """Add a note on ``key``, with its place."""
        self.notes.append(Note(key, outcome, text, self.origins.get(key, ""), to))

    def take(self, key: str) -> Any:
        """Remove ``key`` and return its value, None if it is not there."""
        return self.values.pop(key, None)

    def leave_out(self, key: str, why: str, outcome: Outcome = "left out") -> None:
        """Remove ``key``, which has no effect, with a note; "accepted": nothing is lost with it."""
        self.note(key, outcome, why)
        self.take(key)

    def place(self, key: str, value: Any, source: str) -> None:
        """Set ``key`` to what ``source`` asked for; messages about it point there."""
        self.values[key] = value
        self.origins[key] = self.origins.get(source, source)

    def rename(self, source: str, to: str, value: Any, becomes: str = "") -> None:
        """Set ``to``, which ``source`` means, with a note on that."""
        self.place(to, value, source)
        self.note(source, "renamed", becomes or f"becomes {to} = {value}", to)

    def default(self, key: str, value: Any, source: str, why: str) -> None:
        """Set ``key``, which is unset, to what that means in kohya's trainers beside ``source``."""
        self.place(key, value, source)
        self.note(key, "default", why)

    def keep_dataset_keys(self) -> None:
        """Let ``dataset_args`` have what describes images beside a dataset TOML, as sd-scripts does (config_util.py).

        Without one the folder is described by its name and these.
        """
        folder = self.dataset.get("train_data_dir")
        if "dataset_config" not in self.values and folder is None:
            return
        given, beside = self.values.get("dataset_args", []), "dataset_config" in self.values
        pairs = list(given) if isinstance(given, list) else []
        self.notes[:] = [note for note in self.notes if note.outcome != "dataset"]
        for key, value in self.dataset.items():
            if beside and key in _IMAGE_SOURCES:
                self.note(key, "note", "dataset_config is set and counts, as there")
            elif key == "train_data_dir":
                self.rename(key, "dataset_config", value, "becomes dataset_config")
            else:
                text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
                pairs.append(f"{_DATASET_NAMES.get(key, key)}={text}")
                if beside:
                    text = f"holds where {self.values['dataset_config']} does not say"
                    self.note(key, "renamed", text, "dataset_args")
                else:
                    self.note(key, "accepted", f"describes {folder}")
        self.dataset.clear()
        if pairs and isinstance(given, list):  # what is none, the schema refuses
            self.place("dataset_args", pairs, "dataset_args")

    def problems(self) -> list[str]:
        """Return a line for everything that keeps this configuration from running unchanged."""
        return [note.line() for note in self.notes if note.outcome in ("refused", "dataset")]


def choices(known: Known, key: str) -> tuple[str, ...]:
    """Return the words that ``key`` may be, or nothing where it is free."""
    return words_of(known[key][1].annotation) if key in known else ()


def is_off(value: Any, off: Sequence[Any] = ()) -> bool:
    """Return whether a value asks for nothing: false, zero, empty, or one of ``off``."""
    return is_nothing(value, *off)  # a command line gives text
