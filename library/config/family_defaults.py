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

from library.config.model_types import MODEL_TYPES
from library.config.optimizer_types import estimates_step_size
from library.files import read_toml

FAMILY: Any = "the family's"  # an option's default, as help, page and docs print it


@cache
def tables() -> dict[str, Any]:
    """Return ``presets.toml``, which explains itself."""
    return read_toml(Path(__file__).with_name("presets.toml"), "restore it")[0]


def presets(model_type: str) -> dict[str, tuple[Any, str]]:
    """Return key -> value and comment for a family: its own, then what it takes from the group it is like."""
    found: dict[str, tuple[Any, str]] = {}
    group, whose = model_type, ""
    while group:
        rows = tables()["presets"][group]
        values = {key: (row["value"], whose + _sources(row)) for key, row in rows.items() if isinstance(row, dict)}
        found, group = values | found, rows.get("like", "")
        if rows.get("nearest"):
            whose = f"no trainer publishes a preset for {model_type}; of {group}, the nearest:\n"
        whose = "" if group == "all" else whose
    return found


@cache
def family_defaults(model_type: str) -> Mapping[str, Any]:
    """Return key -> value for a family."""
    return {key: value for key, (value, _) in presets(model_type).items()}


def unset_of(section: BaseModel) -> list[str]:
    """Return the options of a section that are the family's to say and that nobody set."""
    given = section.model_fields_set
    return [key for key in type(section).model_fields if _is_of_family(section, key) and key not in given]


def settled(section: BaseModel, model_type: str = "flux") -> dict[str, Any]:
    """Return option -> value of those that :func:`unset_of` names.

    Alpha is the rank, so that a LoRA's scale is 1; the rate of an optimizer that estimates its step size is a factor,
    customarily 1.
    """
    unset, values = unset_of(section), dict(family_defaults(model_type))
    now = section.__dict__ | {key: values[key] for key in unset if key in values}
    values["network_alpha"] = now.get("network_dim")
    if estimates_step_size(now.get("optimizer_type", "")):
        values["learning_rate"] = 1.0
    return {key: values[key] for key in unset if key in values}


def settle(config: BaseModel, model_type: str, values: Mapping[str, Any] | None = None) -> None:
    """Give the unset options of a configuration that was just made the family's defaults, or ``values`` of them.

    They stay unset: the configuration for another family, made of what was set, gets the defaults of that.
    """
    for name in type(config).model_fields:
        section = getattr(config, name)
        if found := settled(section, model_type):
            found |= {key: value for key, value in (values or {}).items() if key in found}
            config.__dict__[name] = section.model_copy()
            config.__dict__[name].__dict__.update(found)


def with_precision(config: Any, on_cpu: bool) -> Any:
    """Return the configuration of a LoRA with what ``mixed_precision = "auto"`` means on this machine."""
    training, base = config.training, config.model.base_dtype
    if training.mixed_precision != "auto":
        return config
    asked = "bf16" if training.full_bf16 else base if base in ("bf16", "fp16") else None
    dtype = asked or ("no" if on_cpu else family_defaults(config.model.model_type)["mixed_precision"])
    return config.model_copy(update={"training": training.model_copy(update={"mixed_precision": dtype})})


def as_in_state(config: Any, saved: Mapping[str, Any]) -> Any:
    """Return the configuration of a run that goes on from a state with these settings: what is unset is as it was.

    States of earlier versions lack some; there the schema's defaults held for every family.
    """
    saved = {"mixed_precision": "no", "guidance_scale": 1.0, "discrete_flow_shift": 3.0} | dict(saved)
    update = {}
    if config.training.mixed_precision == "auto":
        update["training"] = config.training.model_copy(update={"mixed_precision": saved["mixed_precision"]})
    if (flow := getattr(config, "flow", None)) and flow.timestep_sampling in ("shift", "sigma"):
        given = {"discrete_flow_shift": saved["discrete_flow_shift"]} | flow.model_dump(exclude_unset=True)
        update["flow"] = flow.model_copy(update={"discrete_flow_shift": given["discrete_flow_shift"]})
    config = config.model_copy(update=update)
    settle(config, config.model.model_type, saved)
    return config


def family_options(config: Any) -> dict[str, Any]:
    """Return the options of a LoRA's configuration that are the family's to say, with the values that they have."""
    sections = [getattr(config, name) for name in type(config).model_fields]
    found = {key: value for section in sections for key, value in section if _is_of_family(section, key)}
    found |= {"mixed_precision": config.training.mixed_precision}
    if (flow := getattr(config, "flow", None)) is None:
        return found
    if flow.timestep_sampling not in ("shift", "sigma"):
        del found["discrete_flow_shift"]
    if not MODEL_TYPES[config.model.model_type].takes_guidance:
        del found["guidance_scale"]
    return found | {"timestep_sampling": flow.timestep_sampling}


def unset_options(config: Any) -> list[str]:
    """Return those of :func:`family_options` that nobody set, or that are "auto"."""
    autos = (("training", "mixed_precision"), ("flow", "timestep_sampling"))
    found = [key for name in type(config).model_fields for key in unset_of(getattr(config, name))]
    return found + [key for name, key in autos if getattr(getattr(config, name, None), key, None) == "auto"]


def _is_of_family(section: BaseModel, key: str) -> bool:
    return type(section).model_fields[key].default is FAMILY


def _sources(row: Mapping[str, Any]) -> str:
    given = [row["source"], *row.get("others", ())] if "source" in row else []
    cited = [f"{trainer}, {file}: {' '.join(says.split())}" for trainer, file, says in given]
    others = f"others: {'; '.join(cited[1:])}" if cited[1:] else ""
    return "\n".join(filter(None, (*cited[:1], others, row.get("note"))))
