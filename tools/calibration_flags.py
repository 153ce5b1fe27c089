"""What the tools that look at real activations have in common: flags for model and calibration, devices, the fp8 base.

A base in bf16 of FLUX's size is 24 GB, so it is never loaded whole: its weights are read from the file one layer at a
time. What runs is the deployed model, in fp8 and half that size, with the LoRA in it. Its activations are those that
the corrected layers will meet; they differ from the bf16 model's by the very error that is to be removed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from library.config.model_types import IMAGE_MODELS, MODEL_FILE_KEYS
from library.config.schema import ModelConfig
from library.errors import UserError
from library.precision.quantize import E4M3FN, GRANULARITIES, format_named
from library.precision.recipe import Fp8Recipe
from library.training.calibration import IMAGES, SIGMAS, CalibrationOptions

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16}


def add_calibration_arguments(
    parser: argparse.ArgumentParser, required: bool, model_type: bool = True, seed: bool = True
) -> None:
    """Add the flags of data, model parts and computing; without --model_type or --seed where the parser has it."""
    data = parser.add_argument_group("calibration")
    data.add_argument("--dataset_config", required=required, help="dataset TOML, as in training")
    data.add_argument("--calibration_images", type=int, default=IMAGES, metavar="N", help="default: %(default)s")
    data.add_argument(
        "--calibration_sigmas", type=float, nargs="+", default=SIGMAS, metavar="X", help="noise levels of each image"
    )
    if seed:
        data.add_argument("--seed", type=int, default=0, help="chooses images, noise and stochastic rounding")
    data.add_argument("--guidance_scale", type=float, default=3.5, help="for models with a guidance input")
    data.add_argument("--masked_loss", action="store_true", help="the dataset has loss masks, as in training")
    data.add_argument("--cache_directory", metavar="DIR", help="of latents and text (default: beside the images)")
    data.add_argument(
        "--statistics_gb", type=float, default=4.0, metavar="X", help="memory for layer statistics; less: more passes"
    )
    model = parser.add_argument_group("parts of the model, where it is a single file")
    if model_type:
        model.add_argument("--model_type", choices=list(IMAGE_MODELS), help="architecture family")
    for name in MODEL_FILE_KEYS:
        model.add_argument(f"--{name}", metavar="PATH", help=ModelConfig.model_fields[name].description)
    model.add_argument("--mixed_precision", choices=list(DTYPES), help="default: bf16 on a GPU, no on a CPU")


def calibration_options(options: argparse.Namespace) -> CalibrationOptions:
    """Return what the flags say."""
    return CalibrationOptions(
        dataset_config=options.dataset_config,
        images=options.calibration_images,
        sigmas=tuple(options.calibration_sigmas),
        seed=options.seed,
        guidance_scale=options.guidance_scale,
        masked_loss=options.masked_loss,
        cache_directory=options.cache_directory,
    )


def model_config(options: argparse.Namespace, model: Path) -> ModelConfig:
    """Return the ``[model]`` section for ``model`` with the parts that the flags name."""
    given = {name: value for name in ("model_type", *MODEL_FILE_KEYS) if (value := getattr(options, name)) is not None}
    return ModelConfig(pretrained_model_name_or_path=str(model), **given)


def device_and_dtype(options: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """Return where and in what to compute."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return device, DTYPES[options.mixed_precision or ("bf16" if device.type == "cuda" else "no")]


def recipe_named(text: str, option: str) -> Fp8Recipe:
    """Return the recipe that ``cast``, ``tensor``, ``row``, ``block64``, ``block128`` stand for.

    ``:e5m2`` after it names the format; ``+all`` at the end rounds embedders and the final layer too, as most published
    plain casts do.

    Raises:
        UserError: it is none of them, nor a file.
    """
    plain = text.removesuffix("+all")
    keep = Fp8Recipe().exclude if plain == text else ()
    name, _, fp8 = plain.partition(":")
    for granularity in GRANULARITIES:
        if name == granularity:
            return Fp8Recipe(granularity, format_named(fp8) if fp8 else E4M3FN, keep)
    raise UserError(f"{option} {text}: no such file or folder, and none of {', '.join(GRANULARITIES)}; check the path")
