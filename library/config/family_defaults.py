"""The defaults of each model family: rank, rate, precision, guidance, and how its samples are made.

They stand in ``presets.toml``, each with the trainer, model card or pipeline that it is from. The schema knows the
options of which this holds by their default, :data:`FAMILY`; a configuration gets the values as it is validated, and
whatever writes a configuration, shows one or makes a sample asks here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from library.config.optimizer_types import estimates_step_size
from library.files import read_toml

FAMILY: Any = "the family's"  # an option's default, as help, page and docs print it
KIND: Any = "the model's"  # likewise of model_type, which is set as a configuration is read


@cache
def tables() -> dict[str, Any]:
    """Return ``presets.toml``, which explains itself."""
    return read_toml(Path(__file__).with_name("presets.toml"), "restore it")[0]


def presets(group: str) -> dict[str, tuple[Any, str]]:
    """Return key -> value and comment for a family: its own, then what it takes from the group it is like.

    Of "lokr/flux" what is published of such adapters comes first, then what is of the family's LoRAs.
    """
    kind, _, family = group.rpartition("/")
    return _chain("presets", family) | (_chain(kind, family) if kind else {})


def _chain(table: str, group: str) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    whose, model_type = "", group
    while group:
        of_family, rows = tables()["presets"][group], tables()[table].get(group, {})
        values = {key: (row["value"], whose + _sources(row)) for key, row in rows.items() if isinstance(row, dict)}
        found, group = values | found, of_family.get("like", "")
        if of_family.get("nearest"):
            whose = f"no trainer publishes a preset for {model_type}; of {group}, the nearest:\n"
        whose = "" if group == "all" else whose
    return found


@cache
def family_defaults(model_type: str) -> dict[str, Any]:
    """Return key -> value for a family."""
    return {key: value for key, (value, _) in presets(model_type).items()}


def preset_group(model_type: str, train_on: object = None, network_type: object = None) -> str:
    """Return the group of ``presets.toml`` that a training follows: preferences and LoKr have rates of their own."""
    if train_on == "preferences":
        return "preferences"
    return f"lokr/{model_type}" if network_type == "lokr" else model_type


def settled(section: BaseModel, model_type: str = "flux", kept: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return option -> value of those of a section that are the family's to say and that nobody set.

    Alpha is the rank, so that a LoRA's scale is 1; the rate of an optimizer that estimates its step size is a factor,
    customarily 1. ``kept``: values that come before the family's.
    """
    given, kept = section.model_fields_set, dict(kept or {})
    unset = [key for key, field in type(section).model_fields.items() if field.default is FAMILY and key not in given]
    values = family_defaults(model_type) | kept
    now = section.__dict__ | {key: values[key] for key in unset if key in values}
    values["network_alpha"] = kept.get("network_alpha", now.get("network_dim"))
    if "learning_rate" in unset and estimates_step_size(now.get("optimizer_type", "")):
        values["learning_rate"] = 1.0
    return {key: values[key] for key in unset if key in values}


def settle(config: BaseModel, kept: Mapping[str, Any] | None = None) -> None:
    """Give the unset options of a configuration that was just made the family's defaults, or what is ``kept``.

    They stay unset: the configuration for another family, made of what was set, gets the defaults of that.
    """
    train_on = getattr(getattr(config, "chat", None), "train_on", None)
    network_type = getattr(getattr(config, "network", None), "network_type", None)
    group = preset_group(config.model.model_type, train_on, network_type)  # type: ignore[attr-defined]
    for name in type(config).model_fields:
        section = getattr(config, name)
        if found := settled(section, group, kept):
            config.__dict__[name] = section.model_copy()
            config.__dict__[name].__dict__.update(found)


def _sources(row: Mapping[str, Any]) -> str:
    given = [row["source"], *row.get("others", ())] if "source" in row else []
    cited = [f"{trainer}, {file}: {' '.join(says.split())}" for trainer, file, says in given]
    others = f"others: {'; '.join(cited[1:])}" if cited[1:] else ""
    return "\n".join(filter(None, (*cited[:1], others, row.get("note"))))
