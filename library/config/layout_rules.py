"""Which options do not go with which ways of splitting a model: one matrix a kind of training.

docs/options.md prints :data:`LORA_MATRIX` and :data:`PRETRAIN_MATRIX`; ``library.config.rules`` asks them of a
configuration. A conflict is data: the options it is about and what to say. An option that asks for nothing (false,
zero, its default) conflicts with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from library.config.markers import is_nothing, listed, options
from library.config.model_types import IMAGE_MODELS, MODEL_TYPES
from library.config.optimizer_types import ELEMENTWISE, SHARDABLE, estimates_step_size


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


def is_one_of(optimizer_type: str, names: tuple[str, ...]) -> bool:
    """Whether an optimizer is one of ``names``, in any case."""
    return optimizer_type.lower() in [name.lower() for name in names]


# Column -> whether a configuration has it.
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


@dataclass(frozen=True)
class Row:
    """What an option does not go with.

    Attributes:
        key: the option.
        why: layout -> reason and remedy; options in braces and {layout} are filled in.
        when: for which values; default: whenever it is set.
        words: those values in words, for the docs.
    """

    key: str
    why: Mapping[str, str]
    when: Callable[[Settings], Any] | None = None
    words: str = ""

    def conflicts(self, settings: Settings) -> Iterator[Conflict]:
        """Yield a conflict for each of the layouts that ``settings`` have."""
        if self.key not in settings.values:
            return
        if not (self.when(settings) if self.when else not is_nothing(settings.values[self.key])):
            return
        for layout, reason in self.why.items():
            if LAYOUTS[layout](settings):
                message = reason.format(layout=layout, **settings.values)
                yield Conflict((self.key, layout.split(" ")[0]), f"{self.key}: {message}")


def _saves_with_base_weights(s: Settings) -> bool:
    """Whether saving takes the base's weights, not only what is trained: DoRA in the other programs' layouts."""
    of_images = s.model_type in IMAGE_MODELS  # of the others it is peft's whatever save_format says
    return s.network_type == "dora" and of_images and s.save_format != "diffusers"


def _each(reason: str, *layouts: str) -> dict[str, str]:
    return dict.fromkeys(layouts, reason)


_SPLITTING = ("shard", "tp", "pp", "device_map", "zero")
_ONE = "; remove one of them"
FP8_NOT_GATHERED = (
    "zero = 3 gathers weights in their own dtype, and gloo takes no fp8 (NCCL was not tried); set zero = 2, or shard"
)
_CHOSEN = {'memory = "auto"': "{layout} chooses it" + _ONE}
_DORA = '{save_format}\'s DoRA is made with full base weights, which {layout} splits; set save_format = "diffusers"'
_PARTS = "{optimizer_type} does not treat every number by itself, and would get parts of weights; use "
_ASKS_TWICE = {"pp": "asks the model twice in a step, stages are passed once; set shard or tp, or pp = 1"}

_COMMON = (
    Row(
        "torch_compile",
        _each("is not made for {layout}" + _ONE, *_SPLITTING),
        lambda s: s.torch_compile is True,
        "true",
    ),
    Row("activation_budget_mb", _CHOSEN),
    Row("shard", {"pp": "the weights of a stage are not split again; set shard = 1 and raise pp"}, LAYOUTS["shard"]),
    Row(
        "tp",
        _each("the parts of a layer are not split again; set {layout} = 1, and raise tp or dp", "shard", "pp"),
        LAYOUTS["tp"],
    ),
)

LORA_MATRIX = (
    *_COMMON,
    Row(
        "cuda_graph",
        _each('{layout} is not captured; set cuda_graph = "auto"', "dp", *_SPLITTING),
        lambda s: s.cuda_graph is True,
        "true",
    ),
    Row(
        "blocks_to_swap",
        _each("moves full weights, which {layout} splits" + _ONE, "shard", "tp")
        | {
            "pp": "a stage has few blocks; raise pp, or remove one of them",
            "device_map": "has blocks on one device in turn" + _ONE,
            "zero": "DeepSpeed puts the model on its device" + _ONE,
        }
        | _CHOSEN,
    ),
    Row("sample_model", _each("changes full weights, which {layout} splits" + _ONE, "shard", "tp", "pp", "zero")),
    Row(
        "memory_dry_run",
        _each("counts a step of the full model; remove it, or set {layout} = 1", "shard", "tp", "pp")
        | {
            "device_map": "looks at one device; remove it, or device_map",
            "zero": "counts a step without DeepSpeed; remove it, or zero",
        },
    ),
    Row(
        "memory_dry_run",
        {'memory = "auto"': "{layout} counts a step in any case; remove it"},
        lambda s: s.memory_dry_run is not None,
        "true, false",
    ),
    Row(
        "mixed_precision",
        _each('fp16 is not made for {layout}; set "bf16"', *_SPLITTING),
        lambda s: s.mixed_precision == "fp16",
        '"fp16"',
    ),
    Row(
        "full_bf16",
        {"shard": "accelerate makes fp32 of it with shard" + _ONE, "zero": "DeepSpeed steps on fp32 copies" + _ONE},
    ),
    Row(
        "text_encoder_lr",
        _each("{layout} takes a single network; remove it, or {layout}", "shard", "device_map", "zero")
        | _each("text encoders are not split; remove it, or set {layout} = 1", "tp", "pp"),
        lambda s: s.network_train_text_encoder_only or any(s.text_encoder_lr),
    ),
    Row("save_format", _each(_DORA, "shard", "pp", "zero = 3"), _saves_with_base_weights, "of DoRA, not diffusers"),
    Row(
        "network_type",
        {
            "tp": "{network_type} changes full weights, of which tp leaves parts; train a lora, or set tp = 1",
        },
        lambda s: s.network_type != "lora",
        "other than lora",
    ),
    Row(
        "optimizer_type",
        {
            "zero": f"{_PARTS}{listed(ELEMENTWISE)}, or shard, with which any trains",
        },
        lambda s: not is_one_of(s.optimizer_type, ELEMENTWISE),
        f"other than {listed(ELEMENTWISE)}",
    ),
    Row("fp8_base", {"zero = 3": FP8_NOT_GATHERED}),
    Row("fp8_scaled", {"zero = 3": FP8_NOT_GATHERED}),
    Row("quantised_activations", {"tp": "rounds by full inputs, of which tp gives a layer a part" + _ONE}),
    Row("gradient_checkpointing", _CHOSEN),
    Row("cpu_offload_checkpointing", {"device_map": "brings inputs back to one device" + _ONE} | _CHOSEN),
    Row(
        "scale_weight_norms",
        {"zero": "DeepSpeed steps on copies of the weights, which it would not reach" + _ONE},
    ),
    Row(
        "memory",
        _each('"auto" tries the full model on each device; remove it, or the split', *_SPLITTING),
        lambda s: s.memory == "auto",
        '"auto"',
    ),
    Row(
        "model_type",
        {"pp": "{model_type} keeps captions' lengths, so that parts of a batch differ in shape; use shard"},
        lambda s: MODEL_TYPES[s.model_type].texts_differ_in_length,
        ", ".join(name for name, row in MODEL_TYPES.items() if row.texts_differ_in_length),
    ),
    Row("preserve", _ASKS_TWICE, lambda s: s.preserve == "prior", '"prior"'),
    Row("train_on", _ASKS_TWICE, lambda s: s.train_on in ("preferences", "slider"), "with pairs"),
    Row(
        "device_map",
        _each("one process drives all GPUs; remove it, or dp, shard, tp and pp", "dp", "shard", "tp", "pp"),
    ),
    Row(
        "zero",
        _each(
            "splits among all processes; remove it, or shard, tp, pp and device_map", "shard", "tp", "pp", "device_map"
        ),
    ),
)

PRETRAIN_MATRIX = (
    *_COMMON,
    Row(
        "full_bf16",
        _each('rounds full tensors, which {layout} splits; set mixed_precision = "bf16" instead', "shard", "tp", "pp"),
    ),
    Row("ema_decay", _each("averages full tensors, which {layout} splits; remove it", "shard", "tp", "pp")),
    Row(
        "optimizer_type",
        {"shard": f"{{optimizer_type}} needs full matrices, which shard splits; use {listed(SHARDABLE)}, or shard = 1"},
        lambda s: not is_one_of(s.optimizer_type, SHARDABLE),
        f"other than {listed(SHARDABLE)}",
    ),
    Row(
        "optimizer_type",
        {"tp": f"{{optimizer_type}} needs full matrices, which tp splits; use {listed(ELEMENTWISE)}, or set tp = 1"},
        lambda s: not is_one_of(s.optimizer_type, ELEMENTWISE),
        f"other than {listed(ELEMENTWISE)}",
    ),
    Row(
        "optimizer_type",
        {"pp": "{optimizer_type} sums over all weights, of which a stage has a part; use AdamW or Muon, or pp = 1"},
        lambda s: estimates_step_size(s.optimizer_type),
        "Prodigy, D-Adaptation",
    ),
)
