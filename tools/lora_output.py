"""What the tools that write a LoRA have in common: the flags that say where and how, and the writing."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from library.errors import UserError
from library.models.layer_names import LoraTargets
from library.models.registry import lora_targets
from networks.files.adapters import PRECISIONS, SAVE_FORMATS, save_adapter
from networks.files.metadata import ADAPTER_METADATA_KEY
from networks.files.weights import LoraWeights


def add_output_arguments(parser: argparse.ArgumentParser, precision_default: str = "the source's") -> None:
    """Add --save_to, --save_format, --save_precision, --model_type and --overwrite."""
    parser.add_argument("--save_to", required=True, type=Path, help="the .safetensors file to write")
    parser.add_argument(
        "--save_format", choices=list(SAVE_FORMATS), help="key layout (default: the source's, or diffusers)"
    )
    parser.add_argument("--save_precision", choices=list(PRECISIONS), help=f"default: {precision_default}")
    parser.add_argument(
        "--model_type", choices=list(lora_targets()), help="architecture family (default: as the files say)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


def check_output(save_to: Path, overwrite: bool) -> None:
    """Refuse a place that is no LoRA file's, or that something is at, before any work is done.

    Raises:
        UserError: with the reason.
    """
    if save_to.suffix != ".safetensors":
        raise UserError(f"{save_to}: a LoRA is a .safetensors file; give --save_to that ending")
    if save_to.exists() and not overwrite:
        raise UserError(f"{save_to}: exists; choose another --save_to or give --overwrite")


def write_lora(
    save_to: Path,
    weights: Mapping[str, LoraWeights],
    targets: LoraTargets,
    save_format: str,
    precision: str,
    metadata: Mapping[str, str],
    comment: str,
) -> None:
    """Write ``weights``, their metadata brought up to date.

    Args:
        save_to, weights, targets, precision: see ``networks.files.adapters.save_adapter``.
        save_format: one of its layouts; another name (a source's "peft", "bare") becomes diffusers, or of
            a language model peft.
        metadata: of the source, or made for this file.
        comment: put before the training comment, as sd-scripts' tools do.
    """
    strings = {key: value for key, value in metadata.items() if key != ADAPTER_METADATA_KEY}
    ranks = Counter(module.rank for module in weights.values())
    alphas = Counter(module.alpha for module in weights.values())
    strings["ss_network_dim"] = str(next(iter(ranks))) if len(ranks) == 1 else "Dynamic"
    strings["ss_network_alpha"] = f"{next(iter(alphas)):g}" if len(alphas) == 1 else "Dynamic"
    before = strings.get("ss_training_comment", "None")
    strings["ss_training_comment"] = comment if before in ("", "None") else f"{comment}; {before}"
    if save_format not in SAVE_FORMATS:
        save_format = "peft" if targets.own_names else "diffusers"
    save_adapter(save_to, weights, targets, save_format, precision, strings)


def widest_precision(weights: Mapping[str, LoraWeights]) -> str:
    """Return the precision that holds every tensor: their common 16-bit dtype, else fp32."""
    dtypes = {tensor.dtype for module in weights.values() for tensor in (module.down, module.up)}
    names = {dtype: name for name, dtype in PRECISIONS.items()}
    return names.get(dtypes.pop(), "fp32") if len(dtypes) == 1 else "fp32"


def default_device() -> str:
    """Return the GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"
