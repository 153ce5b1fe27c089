"""What does not go together: refused before anything is loaded, each line with its remedy.

What an option has no effect without stands on its field (``OnlyWith`` in ``library.config.schema``). What options and
layouts exclude each other stands in ``library.config.layout_rules``. The rest are rules with a predicate. A rule is
about options by name, so it holds wherever a schema has these; what a schema lacks it says nothing about.

The optimizer is judged by its name, so that the check needs no optimizer package; what only the built optimizer knows
is checked again by ``library.training.optim.factory`` and ``library.training.optim.schedules``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from library.config.chat_schema import ChatTrainConfig
from library.config.layout_rules import LORA_MATRIX, PRETRAIN_MATRIX, Conflict, Row, Settings, is_one_of
from library.config.markers import is_nothing, options, unmet_of
from library.config.model_types import MODEL_TYPES
from library.config.optimizer_types import OptimizerType, estimates_step_size, optimizer_named
from library.config.pretrain_schema import PretrainConfig
from library.config.run_schema import KINDS_OF_LAYOUT, layout_refusal
from library.config.schema import ModelConfig, NetworkConfig, TrainConfig

# Below this, an optimizer that estimates its step size was surely given another optimizer's learning rate.
SMALLEST_LR_FACTOR = 0.01


@dataclass(frozen=True)
class Rule:
    """Options (first the one to change), when they do not go together, and what to say, options in braces."""

    keys: tuple[str, ...]
    when: Callable[[Settings], Any]
    text: str
    harmless: bool = False

    def conflicts(self, settings: Settings) -> Iterator[Conflict]:
        """Yield the conflict if it holds and the schema has the options."""
        if all(key in settings.values for key in self.keys) and self.when(settings):
            yield Conflict(self.keys, f"{self.keys[0]}: {self.text.format(**settings.values)}", self.harmless)


def _arguments(s: Settings) -> set[str]:
    return {argument.replace(" ", "") for argument in s.optimizer_args}


def _row(s: Settings) -> OptimizerType:
    return optimizer_named(s.optimizer_type) or OptimizerType("", "")


def _has_its_own_rate(key: str) -> Rule:
    flags = {"relative_step=True", "warmup_init=True"}
    return Rule(
        (key, "optimizer_args", "optimizer_type"),
        lambda s: _row(s).name == "Adafactor" and _arguments(s) & flags and s.asks(key),
        "has no effect with Adafactor's relative_step=True; remove one of the two",
        harmless=True,
    )


def _warms_up_to_the_end(s: Settings) -> bool:
    """Epochs are as long as the dataset, which nobody has looked at yet: those are checked before the first step."""
    counted = getattr(s, "max_train_epochs", None) is None
    return counted and s.lr_scheduler != "constant" and s.lr_warmup_steps >= max(1, s.max_train_steps)


_OPTIMIZER = (
    Rule(
        ("lr_scheduler", "lr_warmup_steps"),
        lambda s: s.lr_scheduler == "constant_with_warmup" and not s.lr_warmup_steps,
        "'constant_with_warmup' needs lr_warmup_steps above 0; set it or choose 'constant'",
    ),
    Rule(
        ("lr_warmup_steps", "max_train_steps"),
        _warms_up_to_the_end,
        "the warm-up does not end within max_train_steps; lower lr_warmup_steps or train longer",
    ),
    Rule(
        ("lr_scheduler", "lr_decay_steps"),
        lambda s: s.lr_scheduler == "warmup_stable_decay" and not s.lr_decay_steps,
        "'warmup_stable_decay' needs lr_decay_steps above 0 (such as 0.2); set it",
    ),
    Rule(
        ("trust_class_paths", "optimizer_type"),
        lambda s: s.trust_class_paths and "." not in s.optimizer_type,
        "has no effect without a class path (a.b.C) in optimizer_type; remove it",
        harmless=True,
    ),
    Rule(
        ("lr_scheduler", "optimizer_type", "optimizer_args"),
        lambda s: _row(s).averages and s.lr_scheduler != "constant" and "use_schedulefree=False" not in _arguments(s),
        "{optimizer_type} averages weights instead of lowering the learning rate, lr_scheduler {lr_scheduler!r} would "
        'fight it; set lr_scheduler = "constant" (for a warm-up, AdamWScheduleFree takes warmup_steps in '
        "optimizer_args)",
    ),
    Rule(
        ("ema_decay", "optimizer_type"),
        lambda s: s.ema_decay is not None and _row(s).averages,
        "a schedule-free optimizer averages its weights already; remove ema_decay",
    ),
    *map(_has_its_own_rate, ("learning_rate", "text_encoder_lr", "lr_scheduler")),
    Rule(
        ("learning_rate", "optimizer_type"),
        lambda s: (
            "learning_rate" in s.given
            and estimates_step_size(s.optimizer_type)
            and 0 < s.learning_rate < SMALLEST_LR_FACTOR
        ),
        "{learning_rate:g} multiplies the step size that {optimizer_type} estimates, nothing would be learned; set "
        "learning_rate = 1.0 or leave it out",
    ),
)

_COMPILED = (
    Rule(
        ("dynamo_mode", "gradient_checkpointing"),
        lambda s: s.dynamo_mode == "reduce-overhead" and s.gradient_checkpointing,
        "the graphs of reduce-overhead fail where blocks are recomputed (pytorch #154306); remove it for cuda_graph",
    ),
    Rule(
        ("torch_compile", "blocks_to_swap", "gradient_checkpointing"),
        lambda s: s.torch_compile is True and s.blocks_to_swap and not s.gradient_checkpointing,
        "backward of a compiled block would read the weights of the block swapped in since; set "
        "gradient_checkpointing = true, or swap none",
    ),
    *(
        Rule(
            ("activation_budget_mb", "torch_compile", key),
            lambda s, key=key: s.torch_compile is True and s.activation_budget_mb and s.values[key],  # type: ignore[misc]
            f"compiled blocks keep attention's outputs only without {key}; remove one of the three",
        )
        for key in ("blocks_to_swap", "cpu_offload_checkpointing")
    ),
)

_LORA = (
    Rule(
        ("full_bf16", "mixed_precision"),
        lambda s: s.full_bf16 and s.mixed_precision not in ("auto", "bf16"),
        'needs the forward pass in bf16 too; set mixed_precision = "bf16"',
    ),
    Rule(
        ("base_dtype", "mixed_precision"),
        lambda s: s.base_dtype in ("bf16", "fp16") and s.mixed_precision not in ("auto", s.base_dtype),
        '{base_dtype} weights need a {base_dtype} forward pass; set mixed_precision = "{base_dtype}"',
    ),
    Rule(
        ("fp8_base", "fp8_scaled"),
        lambda s: s.fp8_base and s.fp8_scaled,
        "casts without scales, fp8_scaled quantises with scales; keep one of them",
    ),
    Rule(
        ("quantised_activations", "quantised_compute"),
        lambda s: s.quantised_activations != "none" and s.quantised_compute == "quantised",
        "products as weights are stored round them already; remove quantised_compute",
    ),
    Rule(
        ("fp8_granularity", "quantised_compute"),
        lambda s: s.quantised_compute == "quantised" and s.fp8_scaled and s.fp8_granularity.startswith("block"),
        'block scales cannot be multiplied in fp8, as quantised_compute = "quantised" does; set "row" or "tensor"',
    ),
    Rule(
        ("fp8_format", "quantised_compute"),
        lambda s: s.quantised_compute == "quantised" and (s.fp8_base or s.fp8_scaled) and s.fp8_format != "e4m3fn",
        '{fp8_format} weights cannot be multiplied in fp8, as quantised_compute = "quantised" does; set "e4m3fn"',
    ),
)


def _drops(s: Settings) -> bool:
    pairs = (pair.partition("=") for pair in s.network_args)
    values = (value for key, _, value in pairs if key.strip() in ("rank_dropout", "module_dropout"))
    return bool(s.network_dropout) or not all(map(is_nothing, values))


def _not_captured(key: str, when: Callable[[Settings], Any], reason: str) -> Rule:
    remedy = '; change that, or set cuda_graph = "auto"'
    return Rule(("cuda_graph", key), lambda s: s.cuda_graph is True and when(s), reason + remedy)


_IMAGES = (
    _not_captured(
        "blocks_to_swap",
        lambda s: s.blocks_to_swap,
        "a graph finds weights only where they were, and blocks_to_swap moves them",
    ),
    _not_captured(
        "cpu_offload_checkpointing",
        lambda s: s.cpu_offload_checkpointing,
        "the copies of cpu_offload_checkpointing are not captured",
    ),
    _not_captured(
        "text_encoder_lr",
        lambda s: s.network_train_text_encoder_only or any(s.text_encoder_lr),
        "text encoders in training (text_encoder_lr) read captions and are not captured",
    ),
    _not_captured("mixed_precision", lambda s: s.mixed_precision == "fp16", "fp16's loss scaler is not captured"),
    _not_captured(
        "network_dropout", _drops, "a graph would repeat the masks of network_dropout, rank_dropout and module_dropout"
    ),
    _not_captured(
        "dynamo_mode", lambda s: s.dynamo_mode == "reduce-overhead", "reduce-overhead captures graphs of its own"
    ),
    Rule(
        ("fp8_text_encoder", "mixed_precision", "model_type"),
        lambda s: s.fp8_text_encoder and s.mixed_precision == "fp16" and "t5xxl" in MODEL_TYPES[s.model_type].files,
        'T5 leaves the range of fp16; set mixed_precision = "bf16" or remove it',
    ),
    Rule(
        ("distill_from", "distill_lora", "network_weights"),
        lambda s: s.distill_from and not (s.distill_lora or s.network_weights),
        "it needs the LoRA as it was trained in bf16; set network_weights to that LoRA",
    ),
    Rule(
        ("distill_from", "loss_type"),
        lambda s: s.distill_from and s.loss_type != "l2",
        'learns by the squared error, not {loss_type}; set loss_type = "l2"',
    ),
    Rule(
        ("distill_from", "text_encoder_lr"),
        lambda s: s.distill_from and any(s.text_encoder_lr),
        "its answers are to cached text, which text encoders in training change; remove text_encoder_lr",
    ),
    Rule(
        ("preserve", "distill_from"),
        lambda s: s.preserve != "none" and s.distill_from,
        "a teacher's answers are the targets already; remove one of the two",
    ),
    Rule(
        ("train_on", "distill_from"),
        lambda s: s.train_on != "images" and s.distill_from,
        "a teacher's answers take the place of what {train_on} learn from; remove one of the two",
    ),
    Rule(
        ("train_on", "network_type"),
        lambda s: s.train_on == "slider" and s.network_type != "lora",
        'a slider has strengths below 0, which {network_type} has not; set network_type = "lora"',
    ),
    Rule(
        ("train_on", "text_encoder_lr"),
        lambda s: s.train_on == "slider" and (s.network_train_text_encoder_only or any(s.text_encoder_lr)),
        "a slider's prompts are encoded once for both strengths; remove text_encoder_lr",
    ),
    Rule(
        ("train_on", "loss_type"),
        lambda s: s.train_on == "preferences" and s.loss_type != "l2",
        'preferences are told by the squared error, not {loss_type}; set loss_type = "l2"',
    ),
    Rule(
        ("train_on", "preserve_outside_mask"),
        lambda s: s.train_on != "images" and s.preserve_outside_mask,
        "pairs have no frozen answer outside of a mask; name preserve_prompts, or add an is_reg subset",
    ),
    Rule(
        ("prior_loss_weight", "preserve"),
        lambda s: s.preserve != "none" and not s.prior_loss_weight,
        "0 leaves preserve = {preserve!r} without effect; raise it, or remove preserve",
    ),
    Rule(
        ("text_encoder_lr", "dim_from_weights"),
        lambda s: s.dim_from_weights and any(s.text_encoder_lr),
        "dim_from_weights trains the transformer's layers of a file and nothing else; remove one of the two",
    ),
    Rule(
        ("base_weights_multiplier", "base_weights"),
        lambda s: len(s.base_weights_multiplier) > len(s.base_weights),
        "has more strengths than base_weights has files; give one for each",
    ),
    Rule(
        ("sample_model", "init_lora_weights"),
        lambda s: s.sample_model and s.init_lora_weights != "default",
        "takes the place of base weights, which {init_lora_weights} has changed; remove one of them",
    ),
    Rule(
        ("min_timestep", "max_timestep"),
        lambda s: s.min_timestep >= s.max_timestep,
        "{min_timestep} is not below max_timestep {max_timestep}; swap or change them",
    ),
    Rule(
        ("weighting_scheme", "timestep_sampling"),
        lambda s: s.weighting_scheme in ("logit_normal", "mode") and s.timestep_sampling != "sigma",
        '{weighting_scheme} shapes the density of timestep_sampling = "sigma" only; set that too',
        harmless=True,
    ),
)

_PIPELINE = (
    Rule(
        ("microbatches", "train_batch_size", "pp"),
        lambda s: s.pp > 1 and (s.microbatches or 1) > s.train_batch_size,
        "{microbatches} parts of a train_batch_size of {train_batch_size}; raise that or lower it",
    ),
)

_HELD_OUT = Rule(
    ("validation_split", "validation_data"),
    lambda s: s.validation_data and s.validation_split,
    "validation_data is what is validated on; remove one of them",
)

_CHATS = (
    _HELD_OUT,
    Rule(
        ("network_type",),
        lambda s: s.network_type not in ("lora", "dora"),
        "peft's {network_type} has another form; a language model takes lora and dora",
    ),
)

_PRETRAINING = (
    _HELD_OUT,
    Rule(
        ("data_dir", "train_data"),
        lambda s: bool(s.data_dir) == bool(s.train_data),
        "give either data_dir (texts, as tools/prepare_text.py writes them) or train_data (conversations)",
    ),
    Rule(
        ("init_from", "train_data"),
        lambda s: s.train_data and not s.init_from,
        "conversations teach a model that has been trained on texts; set it, instead of preset",
    ),
    Rule(
        ("preset", "init_from"),
        lambda s: (s.preset is None) == (s.init_from is None),
        "give either preset (fresh weights) or init_from (published ones)",
    ),
    Rule(
        ("full_bf16", "mixed_precision"),
        lambda s: s.full_bf16 and s.mixed_precision != "no",
        'weights are bf16 already; set mixed_precision = "no"',
    ),
    Rule(
        ("full_bf16", "optimizer_type"),
        lambda s: s.full_bf16 and is_one_of(s.optimizer_type, ("Muon",)),
        'is not made for Muon; set mixed_precision = "bf16" instead',
    ),
)

RULES: Mapping[type, tuple[Row | Rule, ...]] = {
    TrainConfig: (*_IMAGES, *_LORA, *_OPTIMIZER, *_COMPILED, *LORA_MATRIX),
    ChatTrainConfig: (*_CHATS, *_LORA, *_OPTIMIZER, *_COMPILED, *_PIPELINE, *LORA_MATRIX),
    PretrainConfig: (*_PRETRAINING, *_OPTIMIZER, *_COMPILED, *_PIPELINE, *PRETRAIN_MATRIX),
}


def find_conflicts(config: TrainConfig | ChatTrainConfig | PretrainConfig) -> Iterator[Conflict]:
    """Yield every conflict among the options: what has no effect, then what excludes each other."""
    settings = Settings(config)
    found = [*_without_effect(config, settings)]
    if isinstance(config, TrainConfig):
        found += model_conflicts(config.model)
        found += layout_conflicts(config.network.network_type, config.saving.save_format)
    if not isinstance(config, PretrainConfig):
        found += network_conflicts(config.network)
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
        marker = unmet_of(field, settings.values) if key in settings.given else None
        if marker is not None and (marker.overridden or settings.asks(key)):
            message = f"{key}: has no effect {marker.reason(settings.values)}; remove it"
            keys = (key, *marker.unmet(settings.values))
            yield Conflict(keys, message, harmless=True, overridden=marker.overridden)


def is_of_lokr(pair: str) -> bool:
    """Whether one of ``network_args`` has a meaning for LoKr alone."""
    key = pair.partition("=")[0].strip()
    return key in ("factor", "full_matrix", "decompose_both") or key.endswith("_factor")


def network_conflicts(network: NetworkConfig) -> Iterator[Conflict]:
    """Yield a conflict for each of ``network_args`` that the kind of adapter does not take."""
    for pair in filter(is_of_lokr, network.network_args if network.network_type != "lokr" else ()):
        what = f"network_args: {pair.partition('=')[0].strip()}"
        message = f"{what}: has no effect on network_type {network.network_type}, only on lokr; remove it"
        yield Conflict(("network_args", "network_type"), message)


def layout_conflicts(kind: str, save_format: str) -> Iterator[Conflict]:
    """Yield a conflict if no program would load this kind of adapter from the layout."""
    if kind not in KINDS_OF_LAYOUT[save_format]:
        yield Conflict(("save_format", "network_type"), layout_refusal(kind, save_format, ["comfy"]))


def model_conflicts(model: ModelConfig) -> Iterator[Conflict]:
    """Yield a conflict for each file or setting that belongs to another family than ``model_type``."""
    own = MODEL_TYPES[model.model_type]
    others = {key for row in MODEL_TYPES.values() for key in row.keys} - set(own.keys)
    for key in type(model).model_fields:
        if key in others and key in model.model_fields_set and not is_nothing(getattr(model, key)):
            files = f"{', '.join(own.files[:-1])} and {own.files[-1]}"
            message = f'{key}: has no effect with model_type = "{model.model_type}", whose files are {files}; remove it'
            yield Conflict((key, "model_type"), message, harmless=True)
