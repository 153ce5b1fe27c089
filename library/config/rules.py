"""What does not go together: refused before anything is loaded, each line with its remedy.

What an option has no effect without stands on its field (``OnlyWith`` in ``library.config.schema``). What options and
layouts exclude each other stands in ``rules.toml``: in one matrix a kind of training, :data:`LORA_MATRIX` and
:data:`PRETRAIN_MATRIX`, which docs/options.md prints, and in rules among options. A rule is about options by name, so
it holds wherever a schema has these; what a schema lacks it says nothing about. A row's ``when`` has a condition for
each option or fact (:data:`FACTS`): true or false (it asks for something, or for nothing), a list (it is one of these),
``{ not = [...] }``, or "chosen" (:meth:`Settings.asks`).

A conflict is data: the options it is about and what to say. An option that asks for nothing (false, zero, its default)
conflicts with nothing.

The optimizer is judged by its name, so that the check needs no optimizer package; what only the built optimizer knows
is checked again by ``library.training.optim.factory`` and ``library.training.optim.schedules``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.config.chat_schema import ChatTrainConfig
from library.config.markers import OnlyWith, is_met, is_nothing, listed, options
from library.config.model_types import IMAGE_MODELS, MODEL_TYPES
from library.config.optimizer_types import ELEMENTWISE, SHARDABLE, OptimizerType, estimates_step_size, optimizer_named
from library.config.pretrain_schema import PretrainConfig
from library.config.schema import ModelConfig, TrainConfig
from library.files import read_toml


@dataclass(frozen=True)
class Conflict:
    """Options that do not go together.

    Attributes:
        keys: the options it is about, first the one to change.
        message: one line for the person, with the remedy.
        harmless: whether the first has no effect, instead of a wrong one.
        overridden: whether the others decide what the first would, so that nothing is lost with it.
    """

    keys: tuple[str, ...]
    message: str
    harmless: bool = False
    overridden: bool = False


class Settings:
    """A configuration without its sections: options are attributes."""

    def __init__(self, config: Any) -> None:
        found = list(options(config))
        self.values = {key: value for key, value, _ in found}
        self._defaults = {key: field.get_default() for key, _, field in found}
        sections = (getattr(config, name) for name in type(config).model_fields)
        self.given = {key for section in sections for key in section.model_fields_set}

    def __getattr__(self, key: str) -> Any:
        return self.values[key]

    def asks(self, key: str) -> bool:
        """Return whether an option was set on purpose to more than nothing and to another value than its default."""
        return key in self.given and not is_nothing(self.values[key]) and self.values[key] != self._defaults[key]

    def meet(self, when: Mapping[str, Any]) -> bool:
        """Return whether all of ``when`` holds, which has a condition for options and for :data:`FACTS`."""
        return all(self._meets(key, wanted) for key, wanted in when.items())

    def _meets(self, key: str, wanted: Any) -> bool:
        if wanted == "chosen":
            return self.asks(key)
        value = bool(FACTS[key](self)) if key in FACTS else self.values[key]
        return value not in wanted["not"] if isinstance(wanted, dict) else is_met(wanted, value)


# --- what conditions may ask besides options -----------------------------------------------------------------------

# Below this, an optimizer that estimates its step size was surely given another optimizer's learning rate.
SMALLEST_LR_FACTOR = 0.01

# Column of the matrix -> whether a configuration has it.
LAYOUTS: Mapping[str, Callable[[Settings], Any]] = {
    "shard": lambda s: s.shard > 1,
    "dp": lambda s: s.dp and s.dp > 1,
    "tp": lambda s: s.tp > 1,
    "pp": lambda s: s.pp > 1,
    "device_map": lambda s: s.device_map,
    "zero": lambda s: s.zero,
    "zero = 3": lambda s: s.zero == 3,
    'memory = "auto"': lambda s: s.values.get("memory") == "auto",
}


def _arguments(s: Settings) -> set[str]:
    return {argument.replace(" ", "") for argument in s.optimizer_args}


def _row(s: Settings) -> OptimizerType:
    return optimizer_named(s.optimizer_type) or OptimizerType("", "")


def _is_one_of(optimizer_type: str, names: tuple[str, ...]) -> bool:
    return optimizer_type.lower() in [name.lower() for name in names]


def _saves_base_weights(s: Settings) -> bool:
    """Whether saving takes the base's weights, not only what is trained: DoRA in the other programs' layouts."""
    of_images = s.model_type in IMAGE_MODELS  # of the others it is peft's whatever save_format says
    return s.network_type == "dora" and of_images and s.save_format != "diffusers"


def _warms_up_to_the_end(s: Settings) -> bool:
    """Epochs are as long as the dataset, which nobody has looked at yet: those are checked before the first step."""
    counted = s.values.get("max_train_epochs") is None
    return counted and s.lr_scheduler != "constant" and s.lr_warmup_steps >= max(1, s.max_train_steps)


def _drops(s: Settings) -> bool:
    pairs = (pair.partition("=") for pair in s.network_args)
    values = (value for key, _, value in pairs if key.strip() in ("rank_dropout", "module_dropout"))
    return bool(s.network_dropout) or not all(map(is_nothing, values))


FACTS: Mapping[str, Callable[[Settings], Any]] = {
    **LAYOUTS,
    "averages_weights": lambda s: _row(s).averages,
    "averaging_is_off": lambda s: "use_schedulefree=False" in _arguments(s),
    "computes_its_rate": lambda s: (
        _row(s).name == "Adafactor" and _arguments(s) & {"relative_step=True", "warmup_init=True"}
    ),
    "drops": _drops,
    "estimates_its_step": lambda s: estimates_step_size(s.optimizer_type),
    "forward_in_another_dtype": lambda s: (
        s.base_dtype in ("bf16", "fp16") and s.mixed_precision not in ("auto", s.base_dtype)
    ),
    "has_one_beginning": lambda s: (s.preset is None) != (s.init_from is None),
    "has_t5": lambda s: "t5xxl" in MODEL_TYPES[s.model_type].files,
    "is_class_path": lambda s: "." in s.optimizer_type,
    "is_fp8": lambda s: s.fp8_base or s.fp8_scaled,
    "is_muon": lambda s: _is_one_of(s.optimizer_type, ("Muon",)),
    "learning_rate_is_tiny": lambda s: "learning_rate" in s.given and 0 < s.learning_rate < SMALLEST_LR_FACTOR,
    "more_parts_than_a_batch": lambda s: s.pp > 1 and (s.microbatches or 1) > s.train_batch_size,
    "more_strengths_than_files": lambda s: len(s.base_weights_multiplier) > len(s.base_weights),
    "no_timesteps_between": lambda s: s.min_timestep >= s.max_timestep,
    "saves_base_weights": _saves_base_weights,
    "steps_by_element": lambda s: _is_one_of(s.optimizer_type, ELEMENTWISE),
    "steps_by_row": lambda s: _is_one_of(s.optimizer_type, SHARDABLE),
    "texts_differ_in_length": lambda s: MODEL_TYPES[s.model_type].texts_differ_in_length,
    "trains_text_encoders": lambda s: s.network_train_text_encoder_only or any(s.text_encoder_lr),
    "warms_up_to_the_end": _warms_up_to_the_end,
}


# --- the rows of rules.toml ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What an option does not go with.

    Attributes:
        key: the option.
        why: layout -> reason and remedy; options in braces and {layout} are filled in.
        when: for which values.
        words: those values in words, for the docs.
    """

    key: str
    why: Mapping[str, str]
    when: Mapping[str, Any]
    words: str

    def conflicts(self, settings: Settings) -> Iterator[Conflict]:
        """Yield a conflict for each of the layouts that ``settings`` have."""
        if self.key not in settings.values or not settings.meet(self.when):
            return
        for layout, reason in self.why.items():
            if LAYOUTS[layout](settings):
                message = reason.format(layout=layout, **settings.values)
                yield Conflict((self.key, layout.split(" ")[0]), f"{self.key}: {message}")


@dataclass(frozen=True)
class Rule:
    """Options (first the one to change), when they do not go together, and what to say, options in braces."""

    keys: tuple[str, ...]
    when: Mapping[str, Any]
    text: str
    harmless: bool = False

    def conflicts(self, settings: Settings) -> Iterator[Conflict]:
        """Yield the conflict if it holds and the schema has the options."""
        if all(key in settings.values for key in self.keys) and settings.meet(self.when):
            yield Conflict(self.keys, f"{self.keys[0]}: {self.text.format(**settings.values)}", self.harmless)


_NAMES = {
    "{elementwise}": listed(ELEMENTWISE),
    "{by_row}": listed(SHARDABLE),
    "{texts_differ_in_length}": ", ".join(name for name, row in MODEL_TYPES.items() if row.texts_differ_in_length),
}


def _filled_in(text: str) -> str:
    return re.sub("|".join(_NAMES), lambda name: _NAMES[name[0]], text)


def _matrix(*parts: str) -> tuple[Row, ...]:
    rows = []
    for row in (row for part in parts for row in _TABLES["matrix"][part]):
        why = {layout: _filled_in(reason) for at, reason in row["why"].items() for layout in at.split(", ")}
        rows.append(Row(row["key"], why, row.get("when", {row["key"]: True}), _filled_in(row.get("words", ""))))
    return tuple(rows)


def _rules(*parts: str) -> tuple[Rule, ...]:
    return tuple(Rule(tuple(row.pop("keys")), **row) for part in parts for row in map(dict, _TABLES["rules"][part]))


_TABLES = read_toml(Path(__file__).with_name("rules.toml"))[0]
LORA_MATRIX, PRETRAIN_MATRIX = _matrix("common", "lora"), _matrix("common", "pretraining")
FP8_NOT_GATHERED = next(row.why["zero = 3"] for row in LORA_MATRIX if row.key == "fp8_base")
RULES: Mapping[type, tuple[Row | Rule, ...]] = {
    TrainConfig: (*_rules("images", "lora", "optimizer", "compiled"), *LORA_MATRIX),
    ChatTrainConfig: (*_rules("chats", "lora", "optimizer", "compiled", "pipeline"), *LORA_MATRIX),
    PretrainConfig: (*_rules("pretraining", "optimizer", "compiled", "pipeline"), *PRETRAIN_MATRIX),
}


def find_conflicts(config: TrainConfig | ChatTrainConfig | PretrainConfig) -> Iterator[Conflict]:
    """Yield every conflict among the options: what has no effect, then what excludes each other."""
    settings = Settings(config)
    found = [*_without_effect(config, settings)]
    if isinstance(config, TrainConfig):
        found += model_conflicts(config.model)
    for rule in RULES[type(config)]:
        found += rule.conflicts(settings)
    yield from {conflict.message: conflict for conflict in found}.values()


def conflicts_of_true(config: Any, key: str) -> list[str]:
    """Return what would speak against ``key``, a switch of ``[accelerate]`` that is "auto", if it were true."""
    accelerate = config.accelerate.model_copy(update={key: True})
    found = find_conflicts(config.model_copy(update={"accelerate": accelerate}))
    return [conflict.message for conflict in found if key in conflict.keys]


def reason_alone(message: str, key: str) -> str:
    """Return the reason that a conflict's ``message`` gives; "auto" needs neither the name of ``key`` nor a remedy."""
    return message.removeprefix(f"{key}: ").partition(";")[0]


def _without_effect(config: Any, settings: Settings) -> Iterator[Conflict]:
    for key, _, field in options(config):
        for marker in field.metadata if settings.asks(key) else ():
            if isinstance(marker, OnlyWith) and (unmet := marker.unmet(settings.values)):
                message = f"{key}: has no effect {marker.reason(settings.values)}; remove it"
                yield Conflict((key, *unmet), message, harmless=True, overridden=marker.overridden)
                break


def model_conflicts(model: ModelConfig) -> Iterator[Conflict]:
    """Yield a conflict for each file or setting that belongs to another family than ``model_type``."""
    own = MODEL_TYPES[model.model_type]
    others = {key for row in MODEL_TYPES.values() for key in row.keys} - set(own.keys)
    for key in type(model).model_fields:
        if key in others and key in model.model_fields_set and not is_nothing(getattr(model, key)):
            files = f"{', '.join(own.files[:-1])} and {own.files[-1]}"
            message = f'{key}: has no effect with model_type = "{model.model_type}", whose files are {files}; remove it'
            yield Conflict((key, "model_type"), message, harmless=True)
