"""What other programs do when a LoRA is merged into an fp8 file, written out from their published behaviour."""

from __future__ import annotations

import torch
from torch import Tensor

from library.precision.quantize import E4M3FN, Quantized, round_stochastically


def comfyui(weight: Quantized, update: Tensor) -> Quantized:
    """ComfyUI comfy/ops.py and comfy/float.py: dequantise, add, divide by the *old* scale, round stochastically."""
    merged = weight.dequantize(torch.float32) + update
    merged = merged if weight.scale is None else merged / weight.scale
    return Quantized(round_stochastically(merged, E4M3FN, torch.Generator().manual_seed(0)), weight.scale)


def musubi_base_weights(weight: Quantized, update: Tensor) -> Quantized:
    """musubi-tuner --base_weights on a scaled file: the update is added to the codes, whose scale nobody applies."""
    codes = (weight.values.to(torch.float32) + update).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Quantized(codes, weight.scale)


def sd_scripts(weight: Quantized, update: Tensor) -> Quantized:
    """sd-scripts flux_merge_lora.py into an fp8 file: add in float, cast back to the file's dtype (no scales there)."""
    return Quantized((weight.dequantize(torch.float32) + update).to(torch.float8_e4m3fn), None)
