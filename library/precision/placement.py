"""The ``[precision]`` section, decided: which weights of the base become fp8, and how products with them are made.

A file that holds fp8 is the file that will be deployed, so it is trained on as it is: options that would quantise the
rest of it are refused, except ``fp8_base``, by which the kohya trainers ask for just that. What has no effect on the
files and the device at hand is refused before anything is loaded.
"""

from __future__ import annotations

import torch

from library.config.schema import PrecisionConfig
from library.errors import UserError
from library.precision.checkpoint import QuantizedFile
from library.precision.files.fp8 import device_has_fp8_matmul, loaded_scheme
from library.precision.fp8_numbers import format_named
from library.precision.recipe import Recipe, WeightLoader


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
    if config.quantised_compute == "quantised" and not device_has_fp8_matmul(device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        raise UserError(
            f"quantised_compute: products in fp8 need an Ada, Hopper or newer GPU, which {name} is not; "
            'use "auto" or "dequant"'
        )
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
