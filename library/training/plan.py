"""What a run does, decided from the configuration before anything is loaded: a :class:`Plan` of the task.

Every ``auto`` and every default of the model's family is settled here, once; configuration and plan are frozen. What
``memory = "auto"`` chooses is measured later: it is a value that is passed on.

The transformer is trained, and no text encoder: sd-scripts' ``network_train_unet_only``. ``text_encoder_lr`` adds them,
its first value CLIP-L, its second T5; one value holds for both. As in sd-scripts T5 also needs ``train_t5xxl=True`` in
``network_args``, because it costs 10 GB and seldom helps; where the two disagree, the run is refused (sd-scripts goes
by ``train_t5xxl`` and drops the rest). A rate of 0 leaves an encoder as it is. ``network_train_text_encoder_only``
leaves out the transformer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from library.config.chat_schema import ChatTrainConfig, LanguageModelConfig
from library.config.family_defaults import FAMILY, family_defaults, settle
from library.config.markers import options, split_pairs, unmet_of
from library.config.model_types import ConditionKind
from library.config.optimizer_types import optimizer_named
from library.config.pretrain_schema import LLMOptimizerConfig, PretrainConfig
from library.config.schema import (
    FlowConfig,
    ModelConfig,
    NetworkConfig,
    OptimizerConfig,
    PreservationConfig,
    TrainConfig,
    TrainingConfig,
)
from library.data.config import DatasetConfig, load_dataset_config
from library.errors import UserError
from library.models.layer_names import LoraTargets
from library.training.flow import resolve_sampling
from library.training.optim.factory import check_rates
from networks.files.layouts import PRECISIONS
from networks.network import AdapterNetwork
from networks.options import NetworkOptions, parse_network_args

if TYPE_CHECKING:
    from library.models.family import Family  # imports diffusers, which language models do without

Config = TypeVar("Config", TrainConfig, ChatTrainConfig, PretrainConfig)
LoraConfig = TypeVar("LoraConfig", TrainConfig, ChatTrainConfig)
_AUTOS = ("mixed_precision", "timestep_sampling")  # "auto" until the device and the model's files are known


@dataclass(frozen=True)
class Plan(Generic[Config]):
    """What a task does.

    Attributes:
        config: as given, with every ``auto`` of the family settled.
        dtype: of the frozen weights; where all are trained, of these.
    """

    config: Config
    dtype: torch.dtype


@dataclass(frozen=True)
class LoraPlan(Plan[LoraConfig]):
    """What the training of a LoRA does; ``network`` is what is trained, at which rates."""

    network: NetworkPlan


@dataclass(frozen=True)
class ImagePlan(LoraPlan[TrainConfig]):
    """What the training of a LoRA on images does; ``dataset`` is what the dataset's file says."""

    dataset: DatasetConfig


@dataclass(frozen=True)
class PretrainPlan(Plan[PretrainConfig]):
    """What the training of all weights does; ``optimizer`` has what is usual where it is unset."""

    optimizer: LLMOptimizerConfig


def with_precision(config: LoraConfig, on_cpu: bool) -> LoraConfig:
    """Return ``config`` with what ``mixed_precision = "auto"`` means on this machine."""
    training, base = config.training, config.model.base_dtype
    if training.mixed_precision != "auto":
        return config
    asked = "bf16" if training.full_bf16 else base if base in ("bf16", "fp16") else None
    dtype = asked or ("no" if on_cpu else family_defaults(config.model.model_type)["mixed_precision"])
    return config.model_copy(update={"training": training.model_copy(update={"mixed_precision": dtype})})


def as_in_state(config: LoraConfig, saved: Mapping[str, Any]) -> LoraConfig:
    """Return ``config`` of a run that goes on from a state with these settings: what is unset is as it was.

    States of earlier versions lack some; there the schema's defaults held for every family.
    """
    saved = {"mixed_precision": "no", "guidance_scale": 1.0, "discrete_flow_shift": 3.0} | dict(saved)
    settle(copy := config.model_copy(), saved)
    if copy.training.mixed_precision == "auto":
        training = copy.training.model_copy(update={"mixed_precision": saved["mixed_precision"]})
        copy = copy.model_copy(update={"training": training})
    if isinstance(copy, TrainConfig) and _is_static(copy.flow):  # set, so that the scheduler's does not count
        flow = copy.flow.model_copy(update={"discrete_flow_shift": copy.flow.discrete_flow_shift})
        copy = copy.model_copy(update={"flow": flow})
    return copy


def family_options(config: TrainConfig | ChatTrainConfig) -> dict[str, tuple[Any, bool]]:
    """Return the options that are the family's to say and have an effect, and whether it says them."""
    given = {key for name in type(config).model_fields for key in getattr(config, name).model_fields_set}
    values = {key: value for key, value, _ in options(config)}
    named = [(key, field) for key, _, field in options(config) if field.default is FAMILY or key in _AUTOS]
    counts = [key for key, field in named if not unmet_of(field, values)]
    return {key: (values[key], key not in given or values[key] == "auto") for key in counts}


def _is_static(flow: FlowConfig) -> bool:
    return flow.timestep_sampling in ("shift", "sigma")


def resolve_pretraining(config: PretrainConfig) -> PretrainPlan:
    """Settle what the training of all weights does."""
    dtype = torch.bfloat16 if config.training.full_bf16 else torch.float32
    return PretrainPlan(config, dtype, config.optimizer.with_defaults(config.model.init_from is not None))


def resolve(config: LoraConfig, targets: LoraTargets) -> LoraPlan[LoraConfig]:
    """Settle what a LoRA on a model with these ``targets`` does.

    Raises:
        UserError: as :func:`plan_network`.
    """
    network = plan_network(config.network, config.optimizer, config.training, targets)
    return LoraPlan(config, base_dtype(config.model, config.training), network)


_PRESERVING_WEIGHT = 2.0  # measured: docs/preservation.md


def resolve_images(config: TrainConfig, family: Family) -> ImagePlan:
    """Settle what a LoRA on images does: how noise levels are drawn and what ``preserve`` means, too.

    Raises:
        UserError: as :func:`resolve`; the dataset's file is wrong.
    """
    dataset = load_dataset_config(config.dataset.dataset_config, config.dataset, family.conditioning)
    _refuse_among_images(Path(config.saving.output_dir), dataset)
    flow = config.flow
    if config.distillation.distill_effect and flow.timestep_sampling == "auto":
        flow = flow.model_copy(update={"timestep_sampling": "steps"})  # where the LoRA acts; others are never sampled
    settled = {
        "flow": resolve_sampling(flow, family),
        "preservation": resolve_preservation(config, dataset, family.conditioning),
    }
    if config.preservation.preserve != "none" and "prior_loss_weight" not in config.training.model_fields_set:
        settled["training"] = config.training.model_copy(update={"prior_loss_weight": _PRESERVING_WEIGHT})
    plan = resolve(config.model_copy(update=settled), family.targets)
    return ImagePlan(plan.config, plan.dtype, plan.network, dataset)


def _refuse_among_images(output: Path, dataset: DatasetConfig) -> None:
    """Raise a UserError if a run would write its plots and samples where the next one looks for images."""
    folder = output.expanduser().resolve()
    for subset in (subset for each in dataset.datasets for subset in each.subsets if subset.metadata_file is None):
        folders = {path.resolve() for path in (subset.image_dir, *subset.companion_dirs) if path is not None}
        if folders.intersection([folder, *(folder.parents if subset.settings.recursive else ())]):
            raise UserError(f"output_dir: {output} holds images of the dataset, no place for plots; choose another")


def resolve_preservation(run: TrainConfig, dataset: DatasetConfig, conditioning: ConditionKind) -> PreservationConfig:
    """Return the section with what ``preserve`` means where no key says it.

    Without a kind of sample that preserves it is images of general prompts, or of a model that is given images, the
    blank prompt; the other general prompts are measured with it. Directions are kept where they can be.

    Raises:
        UserError: they are asked for where they cannot.
    """
    config = run.preservation
    preserves, paints = config.preserve != "none", conditioning == "none"
    values: dict[str, object] = {}
    if config.general_prompts == "auto":
        values["general_prompts"] = "general" if preserves and paints else "none"
    named = (config.preserve_class, config.preserve_blank, config.preserve_prompts, config.preserve_outside_mask)
    subsets = [subset.settings for each in dataset.datasets for subset in each.subsets]
    if preserves and not any(named) and not any(each.is_reg or each.preserve_class for each in subsets):
        values |= {"preserve_prompts": "general"} if paints else {"preserve_blank": True}
    general = bool(values.get("preserve_prompts", config.preserve_prompts))
    general |= any(each.is_reg and each.num_repeats for each in subsets)
    reason = why_no_directions(run, general)
    if config.preserve_directions and reason and "preserve_directions" in config.model_fields_set:
        raise UserError(f"preserve_directions: {reason}; remove it")
    if reason or not preserves:
        values["preserve_directions"] = 0
    return config.model_copy(update=values)


def why_no_directions(run: TrainConfig, general: bool) -> str | None:
    """Return why no directions of inputs can be kept, ``general``: whether there are general images; None if they can.

    See ``library.training.optim.preconditioning``: it takes the whole of A, in fp32, from an optimizer that follows
    gradients alone.
    """
    network, optimizer = run.network, optimizer_named(run.optimizer.optimizer_type)
    reasons = {
        "they are those of regularisation images or preserve_prompts, and there are neither": not general,
        "they are kept out of A, which only lora and dora have": network.network_type not in ("lora", "dora"),
        "pissa's A is the base weights'": network.init_lora_weights != "default",
        "the transformer is not trained": network.network_train_text_encoder_only,
        "they need weights in fp32": run.training.full_bf16,
        "they need the whole model in each process": run.parallel.splits_model or run.parallel.zero,
        f"{run.optimizer.optimizer_type} averages its own weights": optimizer is not None and optimizer.averages,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def base_dtype(model: ModelConfig | LanguageModelConfig, training: TrainingConfig) -> torch.dtype:
    """Return the dtype of the frozen weights: as asked, or the dtype of the forward pass."""
    forward = "fp32" if training.mixed_precision == "no" else training.mixed_precision
    return PRECISIONS[forward if model.base_dtype == "auto" else model.base_dtype]


@dataclass(frozen=True)
class NetworkPlan:
    """What is trained.

    Attributes:
        targets: the family's row.
        options: the LoRA's options.
        rates: component ("transformer", "text_encoder", "text_encoder_2") -> learning rate of what is trained.
    """

    targets: LoraTargets
    options: NetworkOptions
    rates: dict[str, float]

    @property
    def trains_transformer(self) -> bool:
        """Whether the transformer gets a LoRA."""
        return self.targets.file_prefix in self.rates

    @property
    def text_encoders(self) -> list[str]:
        """The text encoders that get a LoRA."""
        return [name for name in self.rates if name != self.targets.file_prefix]

    def _loraplus_ratio(self, component: str) -> float | None:
        is_transformer = component == self.targets.file_prefix
        return self.options.loraplus_lr_ratio if is_transformer else self.options.loraplus_text_encoder_lr_ratio

    def learning_rates(self) -> set[float]:
        """Return the rates of all parameter groups, those of LoRA+ among them."""
        return {rate * plus for name, rate in self.rates.items() for plus in (1.0, self._loraplus_ratio(name) or 1.0)}

    def parameter_groups(self, network: AdapterNetwork) -> list[dict]:
        """Return the optimizer's groups, each with its learning rate: ``lora``, and one for each text encoder."""
        names = {self.targets.file_prefix: "lora"} | {each.name: each.group for each in self.targets.text_encoders}
        groups = []
        for component, rate in self.rates.items():
            part = network.component(component)
            groups += part.parameter_groups(rate, self._loraplus_ratio(component), names[component])
        return groups


def plan_network(
    network: NetworkConfig, optimizer: OptimizerConfig, training: TrainingConfig, targets: LoraTargets
) -> NetworkPlan:
    """Decide what is trained.

    Raises:
        UserError: an option of the LoRA is wrong, contradicts another one or could only be ignored; the optimizer takes
            one learning rate and gets several.
    """
    options = parse_network_args(network, targets)
    rates = _text_encoder_rates(optimizer.text_encoder_lr, options, targets)
    only_text = network.network_train_text_encoder_only
    if only_text and not rates:
        raise UserError("network_train_text_encoder_only: no text encoder is trained; set text_encoder_lr")
    if only_text and (unused := options.of_transformer()):
        raise UserError(f"network_args: {unused} is about the transformer, which is not trained; remove it")
    if "loraplus_text_encoder_lr_ratio" in split_pairs(network.network_args, "network_args") and not rates:
        raise UserError("network_args: loraplus_text_encoder_lr_ratio has no effect without text_encoder_lr; remove it")
    if options.train_t5xxl and training.mixed_precision == "fp16":
        raise UserError("train_t5xxl: T5 leaves the range of fp16; use mixed_precision bf16 or do not train it")
    transformer = {} if only_text else {targets.file_prefix: optimizer.learning_rate}
    plan = NetworkPlan(targets, options, transformer | rates)
    check_rates(optimizer.optimizer_type, plan.learning_rates())
    return plan


def _text_encoder_rates(values: list[float], options: NetworkOptions, targets: LoraTargets) -> dict[str, float]:
    """Return text encoder -> learning rate, of those that are trained."""
    if any(values) and not targets.text_encoders:
        raise UserError(f"text_encoder_lr: the text encoder of {targets.family} cannot be trained; remove it")
    wanted = [*values, *values[-1:]][: len(targets.text_encoders)]  # one value holds for both
    if len(values) < 2 and not options.train_t5xxl:
        wanted = wanted[:1]
    rates = {encoder.name: rate for encoder, rate in zip(targets.text_encoders, wanted) if rate}
    trains_second = len(targets.text_encoders) > 1 and targets.text_encoders[1].name in rates
    if trains_second and not options.train_t5xxl:
        raise UserError(
            "text_encoder_lr: the second value is T5's, which is not trained; add train_t5xxl=True to network_args "
            "or remove the value"
        )
    if options.train_t5xxl and not trains_second:
        raise UserError(
            "network_args: train_t5xxl=True has no learning rate; set text_encoder_lr to the rates of CLIP-L and T5, "
            "such as [0, 1e-5] for T5 alone"
        )
    return rates
