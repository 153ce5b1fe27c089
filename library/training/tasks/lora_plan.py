"""What a run trains, and at which learning rates: decided from the settings before anything is loaded.

The transformer is trained, and no text encoder: sd-scripts' ``network_train_unet_only``. ``text_encoder_lr`` adds them,
its first value CLIP-L, its second T5; one value holds for both. As in sd-scripts T5 also needs ``train_t5xxl=True`` in
``network_args``, because it costs 10 GB and seldom helps; where the two disagree, the run is refused (sd-scripts goes
by ``train_t5xxl`` and drops the rest). A rate of 0 leaves an encoder as it is. ``network_train_text_encoder_only``
leaves out the transformer.

The ``[precision]`` section, decided: which weights of the base become fp8, and how products with them are made.

A file that holds fp8 is the file that will be deployed, so it is trained on as it is: options that would quantise the
rest of it are refused, except ``fp8_base``, by which the kohya trainers ask for just that. What has no effect on the
files and the device at hand is refused before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from library.config.markers import split_pairs
from library.config.schema import (
    NetworkConfig,
    OptimizerConfig,
    PrecisionConfig,
    TrainingConfig,
    effective_learning_rate,
)
from library.errors import UserError
from library.models.layer_names import LoraTargets
from library.precision.checkpoint import QuantizedFile
from library.precision.files.base import device_is_capable
from library.precision.files.fp8 import Fp8Scheme, device_has_fp8_matmul, loaded_scheme
from library.precision.fp8_numbers import format_named
from library.precision.recipe import Recipe, WeightLoader
from library.training.optim.factory import check_rates
from networks.network import AdapterNetwork
from networks.options import NetworkOptions, parse_network_args


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
        own = component == self.targets.file_prefix
        return self.options.loraplus_lr_ratio if own else self.options.loraplus_text_encoder_lr_ratio

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
    transformer = {} if only_text else {targets.file_prefix: effective_learning_rate(optimizer)}
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


def plan_base(config: PrecisionConfig, layout: QuantizedFile | None, seed: int, device: torch.device) -> WeightLoader:
    """Return how the transformer's weights are placed.

    Args:
        config: what is asked for.
        layout: what the transformer's files hold in fp8, or None.
        seed: of stochastic rounding.
        device: that will compute.

    Raises:
        UserError: the device has no such products, or an option has no effect on this file.
    """
    if config.quantised_compute == "quantised":
        in_fp8 = layout is None or any(isinstance(each.scheme, Fp8Scheme) for each in layout.weights.values())
        if device.type != "cuda" or (in_fp8 and not device_has_fp8_matmul(device)):
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
            needs = "in fp8 need an Ada, Hopper or newer GPU" if in_fp8 else "as weights are stored need a GPU"
            raise UserError(f'quantised_compute: products {needs}, which {name} is not; use "auto" or "dequant"')
    if config.quantised_compute == "fused" and not device_is_capable(device, (8, 0)):
        raise UserError('quantised_compute: fused needs an Nvidia GPU, Ampere or newer; use "auto" or "dequant"')
    activations = None if config.quantised_activations == "none" else config.quantised_activations
    # rounded once, where the server rounds
    compute = "dequant" if activations and config.quantised_compute == "auto" else config.quantised_compute
    if layout is None:
        if not (config.fp8_base or config.fp8_scaled):
            for key in ("quantised_compute", "quantised_activations"):
                if key in config.model_fields_set:
                    raise UserError(f"{key}: has no effect, the model has no fp8 weights; set fp8_base or fp8_scaled")
        if activations in ("auto", "static"):
            raise UserError(
                f"quantised_activations = {activations}: is read from a quantised file, and this base is quantised "
                "as it is loaded; train on the file, or name the server's rounding (row, unit, ...)"
            )
        return WeightLoader(transformer_recipe(config, seed), compute, activations)
    unused = ("fp8_scaled", "fp8_format", "fp8_exclude", "fp8_exclude_patterns", "fp8_rounding")
    for key in unused:
        if key in config.model_fields_set and (key != "fp8_scaled" or config.fp8_scaled):
            raise UserError(f"{key}: {layout.path} is in fp8 already and is trained on as it is; remove {key}")
    return WeightLoader(None, compute, activations)


def transformer_recipe(config: PrecisionConfig, seed: int) -> Recipe | None:
    """Return how a transformer in high precision becomes fp8; None if it does not.

    Raises:
        UserError: a pattern of ``fp8_exclude_patterns`` is no regular expression.
    """
    if not (config.fp8_base or config.fp8_scaled):
        return None
    granularity = config.fp8_granularity if config.fp8_scaled else "cast"
    return Recipe(
        loaded_scheme(granularity, format_named(config.fp8_format)),
        exclude=tuple(config.fp8_exclude),
        exclude_patterns=tuple(config.fp8_exclude_patterns),
        stochastic=config.fp8_rounding == "stochastic",
        seed=seed,
    )


def text_encoder_recipe(config: PrecisionConfig) -> Recipe | None:
    """Return how T5 becomes fp8; None if it does not."""
    return Recipe(loaded_scheme("block64"), exclude=()) if config.fp8_text_encoder else None


def describe_base(layout: QuantizedFile | None, fp8: WeightLoader, dtype: torch.dtype) -> str:
    """Return the precision of a base that ``fp8`` has loaded, in words, for people and for the LoRA's metadata."""
    high = str(dtype).removeprefix("torch.")
    if layout is None and fp8.recipe is None:
        return high
    file = "" if layout is None else f"{layout.layout} file ({layout.formats}), "
    return f"{file}{fp8.describe()}, others {high}"
