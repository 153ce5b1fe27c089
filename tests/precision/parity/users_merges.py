"""What other programs do when a LoRA is merged into an fp8 file, written out from their published behaviour."""

from __future__ import annotations

import torch
from torch import Tensor

from library.precision.files.fp8 import Fp8Weight
from library.precision.fp8_numbers import E4M3FN, round_stochastically


def comfyui(weight: Fp8Weight, update: Tensor) -> Fp8Weight:
    """ComfyUI comfy/ops.py and comfy/float.py: dequantise, add, divide by the *old* scale, round stochastically."""
    merged = weight.dequantize(torch.float32) + update
    merged = merged if weight.scale is None else merged / weight.scale
    return Fp8Weight(round_stochastically(merged, E4M3FN, torch.Generator().manual_seed(0)), weight.scale)


def musubi_base_weights(weight: Fp8Weight, update: Tensor) -> Fp8Weight:
    """musubi-tuner --base_weights on a scaled file: the update is added to the codes, whose scale nobody applies."""
    codes = (weight.values.to(torch.float32) + update).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Fp8Weight(codes, weight.scale)


def sd_scripts(weight: Fp8Weight, update: Tensor) -> Fp8Weight:
    """sd-scripts flux_merge_lora.py into an fp8 file: add in float, cast back to the file's dtype (no scales there)."""
    return Fp8Weight((weight.dequantize(torch.float32) + update).to(torch.float8_e4m3fn), None)
