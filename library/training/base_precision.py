"""The ``[precision]`` section, decided: which weights of the base become fp8, and how products with them are made.

A file that holds fp8 is the file that will be deployed, so it is trained on as it is: options that would quantise the
rest of it are refused, except ``fp8_base``, by which the kohya trainers ask for just that. What has no effect on the
files and the device at hand is refused before anything is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from library.errors import UserError
from library.precision.formats import format_named
from library.precision.fp8_linear import ddp_ignored_names
from library.precision.loading import Fp8Loading
from library.precision.recipe import Fp8Recipe
from library.precision.scaled_matmul import device_has_fp8_matmul

if TYPE_CHECKING:
    from library.config.schema import PrecisionConfig
    from library.precision.checkpoint_layouts import Fp8Layout


def plan_fp8(config: PrecisionConfig, layout: Fp8Layout | None, seed: int, device: torch.device) -> Fp8Loading:
    """Return how the transformer's weights are placed.

    Args:
        config: what is asked for.
        layout: what the transformer's files hold in fp8, or None.
        seed: of stochastic rounding.
        device: that will compute.

    Raises:
        UserError: the device has no fp8 products, or an option has no effect on this file.
    """
    in_fp8 = {"fp8_compute": config.fp8_compute == "scaled_mm", "fp8_input_gradient": config.fp8_input_gradient}
    for key, asked in in_fp8.items():
        if asked and not device_has_fp8_matmul(device):
            remedy = 'use "auto" or "dequant"' if key == "fp8_compute" else "remove it"
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
            raise UserError(f"{key}: products in fp8 need an Ada, Hopper or newer GPU, which {name} is not; {remedy}")
    activations = None if config.fp8_activations == "none" else config.fp8_activations
    compute = "dequant" if activations else config.fp8_compute  # rounded once, where the server rounds
    if layout is None:
        if not (config.fp8_base or config.fp8_scaled):
            for key in ("fp8_compute", "fp8_input_gradient", "fp8_activations"):
                if key in config.model_fields_set:
                    raise UserError(f"{key}: has no effect, the model has no fp8 weights; set fp8_base or fp8_scaled")
        return Fp8Loading(transformer_recipe(config, seed), compute, config.fp8_input_gradient, activations)
    unused = ("fp8_scaled", "fp8_format", "fp8_keep", "fp8_keep_patterns", "fp8_rounding")
    for key in unused:
        if key in config.model_fields_set and (key != "fp8_scaled" or config.fp8_scaled):
            raise UserError(f"{key}: {layout.path} is in fp8 already and is trained on as it is; remove {key}")
    return Fp8Loading(None, compute, config.fp8_input_gradient, activations)


def transformer_recipe(config: PrecisionConfig, seed: int) -> Fp8Recipe | None:
    """Return how a transformer in high precision becomes fp8; None if it does not.

    Raises:
        UserError: a pattern of ``fp8_keep_patterns`` is no regular expression.
    """
    if not (config.fp8_base or config.fp8_scaled):
        return None
    return Fp8Recipe(
        granularity=config.fp8_granularity if config.fp8_scaled else "cast",
        fp8=format_named(config.fp8_format),
        keep=tuple(config.fp8_keep),
        keep_patterns=tuple(config.fp8_keep_patterns),
        stochastic=config.fp8_rounding == "stochastic",
        seed=seed,
    )


def text_encoder_recipe(config: PrecisionConfig) -> Fp8Recipe | None:
    """Return how T5 becomes fp8; None if it does not."""
    return Fp8Recipe("block64", keep=()) if config.fp8_text_encoder else None


def describe_base(layout: Fp8Layout | None, fp8: Fp8Loading, dtype: torch.dtype) -> str:
    """Return the precision of a base that ``fp8`` has loaded, in words, for people and for the LoRA's metadata."""
    high = str(dtype).removeprefix("torch.")
    if layout is not None:
        return f"{layout.kind} fp8 file, {fp8.describe()}, others {high}"
    return f"{fp8.describe()}, others {high}" if fp8.recipe is not None else high


def leave_frozen_out_of_ddp(module: nn.Module) -> None:
    """Tell DDP, which will wrap ``module``, to handle trained parameters only.

    Every process has read the same frozen weights from the same files; broadcasting them takes time, and gloo cannot
    broadcast fp8.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ddp_ignored_names(module))
