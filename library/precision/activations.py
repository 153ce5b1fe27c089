"""What a server rounds besides the weights: activations, position tables, timesteps.

Quantised files are multiplied in two ways. Dequantised, activations stay in bf16. In the weights' own format
(``torch._scaled_mm``, ``_int_mm``), activations are rounded first, and servers differ in how:

    row       e4m3fn, a scale a token: its largest magnitude / 448      Tandem, vLLM, torchao, diffusers' ``fp8r`` files
    tensor    e4m3fn, one scale for the whole input                     TransformerEngine's current scaling
    unit      fp8 without a scale, clamped to +-448                     ComfyUI, scaled files
    static    fp8, calibrated: the file's ``input_scale``               ComfyUI, calibrated files
    int8      a scale a token: its largest / 127, after the weight's    ComfyUI, int8 files
              rotation
    nvfp4     e2m1, a scale in e4m3fn for 16 inputs, one for all        ComfyUI, nvfp4 files on Blackwell
              (its largest / 2688, or the file's ``input_scale``)
    mxfp8     e4m3fn, a power of two for 32 inputs                      ComfyUI, mxfp8 files on Blackwell

Rounding the input and multiplying the rounded numbers in high precision gives what the product of the format gives up
to the order of its sums, so any of these can be looked at, and trained against, on any device. ComfyUI:
``comfy/ops.py`` (``mixed_precision_ops``, ``fp8_linear``), ``comfy/quant_ops.py``; the arithmetic is comfy-kitchen's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from library.nn.frozen_linear import LinearWrapper
from library.precision.checkpoint import ServedInput
from library.precision.files.base import QuantizedWeight
from library.precision.files.fp8 import Fp8Weight
from library.precision.files.nvfp4 import gap_above
from library.precision.fp8_numbers import E4M3FN, Fp8Format, dequantize, power_of_two
from library.precision.linear import QuantizedLinear
from library.precision.names import ActivationRounding, LayoutKind

_TINY = 1e-12  # an input of zeros has scale 1e-12 instead of 0
_INT8, _E2M1 = 127.0, 6.0


@dataclass(frozen=True)
class InputRounding:
    """How one layer's inputs are rounded.

    Attributes:
        how: the word. scale: that was calibrated for them.
        weight: that the server multiplies them with, where the layer's own is in high precision: its rotation counts.
    """

    how: ActivationRounding
    scale: Tensor | None = None
    weight: QuantizedWeight | None = None


def round_activations(
    x: Tensor, how: ActivationRounding, scale: Tensor | None = None, fp8: Fp8Format = E4M3FN
) -> Tensor:
    """Return ``x`` [..., in] as it is after rounding, in its own dtype.

    Args:
        x: activations, not NaN; for ``int8`` rotated as the weight is.
        how: see the module's first lines.
        scale: for ``static``, and for ``nvfp4`` where the file has one; one number.
        fp8: the format of ``unit`` and ``static``, which is the weight's.
    """
    if how == "int8":
        step = (x.abs().amax(dim=-1, keepdim=True).float() / _INT8).clamp_min(_TINY)
        return (x.float() / step).round_().mul_(step).to(x.dtype)
    if how in ("nvfp4", "mxfp8"):
        return _by_blocks(x.float(), how, scale).to(x.dtype)
    values = x.float()
    if how == "unit":
        factor = values.new_ones(())
    elif how == "static":
        assert scale is not None, "a static scale comes from the file"
        factor = scale.to(values.device, torch.float32).reshape(())
    else:
        magnitudes = values.abs()
        largest = magnitudes.amax(dim=-1, keepdim=True) if how == "row" else magnitudes.amax()
        factor = (largest / fp8.max).clamp_min(_TINY)
    return _to_fp8(values / factor, fp8).mul_(factor).to(x.dtype)


def _to_fp8(values: Tensor, fp8: Fp8Format) -> Tensor:
    """Return ``values`` [..., in] fp32 as the nearest number of ``fp8``, saturating."""
    rounded = values.clamp(-fp8.max, fp8.max).to(fp8.dtype)
    return dequantize(rounded.reshape(-1, values.shape[-1]), None, torch.float32).view(values.shape)


def _by_blocks(x: Tensor, how: Literal["nvfp4", "mxfp8"], scale: Tensor | None) -> Tensor:
    """Return ``x`` [..., in] fp32 rounded with a scale for each 16 or 32 inputs; ``scale``: nvfp4's of the tensor."""
    run = 16 if how == "nvfp4" else 32
    width = x.shape[-1]  # filled up with zeros, as comfy-kitchen does
    runs = torch.nn.functional.pad(x, (0, -width % run)).unflatten(-1, (-1, run))
    largest = runs.abs().amax(dim=-1, keepdim=True)
    if how == "mxfp8":
        step = power_of_two(largest / E4M3FN.max, -149, 127)
        return _to_fp8((runs / step).flatten(-2), E4M3FN).view(runs.shape).mul_(step).flatten(-2)[..., :width]
    whole = largest.amax() / (_E2M1 * E4M3FN.max) if scale is None else scale.to(x.device, torch.float32).reshape(())
    step = (largest / _E2M1 / whole.clamp_min(_TINY)).clamp_max(E4M3FN.max).to(E4M3FN.dtype).float() * whole
    units = (runs / torch.where(step > 0, step, torch.inf)).clamp_(-_E2M1, _E2M1)  # too small for a scale: zeros
    gap = gap_above(units.abs())
    return (units / gap).round_().mul_(gap).mul_(step).flatten(-2)[..., :width]


def round_heads(x: Tensor) -> Tensor:
    """Return queries, keys or values [B, S, H, D] as attention in fp8 has them: e4m3fn, a scale a sample and head.

    FlashAttention 3 takes one ``q_descale``, ``k_descale`` and ``v_descale`` a sample and head of keys; its paper (Shah
    et al. 2024, arXiv 2407.08608) has one a block, SageAttention 2 (arXiv 2411.10958) fp8 for the values alone. The
    probabilities, which kernels round too, stay as they are.
    """
    values = x.float()
    factor = (values.abs().amax(dim=(1, 3), keepdim=True) / E4M3FN.max).clamp_min(_TINY)
    rounded = (values / factor).clamp(-E4M3FN.max, E4M3FN.max).to(E4M3FN.dtype)
    return (rounded.float() * factor).to(x.dtype)


class FakeQuantLinear(LinearWrapper):
    """A linear layer whose input is rounded as a server's product rounds it.

    The gradient passes as if nothing had been rounded (straight-through; Bengio et al. 2013, arXiv 1308.3432), so a
    LoRA can be trained beside the rounding it will meet.
    """

    def __init__(self, base: nn.Module, rounding: InputRounding) -> None:
        super().__init__(base)
        self.rounding = rounding
        self.register_buffer("input_scale", rounding.scale, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]``."""
        is_quantised = isinstance(self.base, QuantizedLinear)
        weight = self.base.quantized() if is_quantised else self.rounding.weight  # type: ignore[operator]
        how, rotates = self.rounding.how, weight is not None and self.rounding.how == "int8"
        x = weight.rotate(x) if rotates else x  # type: ignore[union-attr]
        fp8 = weight.fp8 if isinstance(weight, Fp8Weight) and how in ("unit", "static") else E4M3FN
        rounded = round_activations(x.detach(), how, self.input_scale, fp8)  # type: ignore[arg-type]
        rounded = x + (rounded - x).detach() if x.requires_grad else rounded
        if rotates and is_quantised:
            return self.base(rounded, rotated=True)
        return self.base(weight.rotate_back(rounded) if rotates else rounded)  # type: ignore[union-attr]


def roundings(
    layers: Iterable[str],
    served: Mapping[str, ServedInput],
    how: ActivationRounding | Literal["auto"],
    layouts: Collection[LayoutKind] | None = None,
) -> dict[str, InputRounding]:
    """Return layer -> how its inputs are rounded; layers whose inputs are not are left out.

    Args:
        layers: that may be.
        served: layer -> what the file says of its inputs.
        how: in all of them (``static``: in those that have a calibrated scale), or "auto": in each as its file's server
            does.
        layouts: for "auto", the conventions that count; None: all.
    """
    found: dict[str, InputRounding] = {}
    for name in layers:
        served_input = served.get(name)
        served_how = served_input.how if served_input and (layouts is None or served_input.layout in layouts) else None
        chosen = served_how if how == "auto" else how
        scale = served_input.scale if served_input and chosen in ("static", "nvfp4") else None
        if chosen and (chosen != "static" or scale is not None):
            found[name] = InputRounding(chosen, scale)
    return found


def round_inputs(model: nn.Module, roundings: Mapping[str, InputRounding]) -> None:
    """Let linear layers of ``model`` round their inputs, in place; before a LoRA is put in, which sees them unrounded.

    Args:
        model: any.
        roundings: layer -> how.
    """
    for name, rounding in roundings.items():
        model.set_submodule(name, FakeQuantLinear(model.get_submodule(name), rounding))


def round_timesteps(sigmas: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a trainer or server makes of ``sigmas`` that carries timesteps in ``dtype``.

    The timestep is rounded, multiplied by 1000 and rounded again before its sines are taken: in bf16 0.711 becomes
    712 / 1000. In fp8, which ends at 448, it is rounded once, before. fp32 changes nothing.
    """
    if dtype == torch.float32:
        return sigmas
    if dtype.itemsize == 1:
        return sigmas.to(dtype).to(sigmas.dtype)
    return ((sigmas.to(dtype) * 1000).to(dtype).float() / 1000).to(sigmas.dtype)
