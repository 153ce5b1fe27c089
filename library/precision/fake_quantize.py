"""What a server rounds besides the weights: activations, position tables, timesteps.

fp8 files are multiplied in two ways. Dequantised, activations stay in bf16. In fp8 (``torch._scaled_mm``), activations
are rounded to e4m3fn first, and servers differ in the scale they round with:

    row       one a token, its largest magnitude / 448           Tandem's ``scaled_mm``, vLLM, torchao
    tensor    one for the whole input, from its largest          TransformerEngine's current scaling
    unit      none: clamped to +-448 and rounded                  ComfyUI's ``--fast fp8_matrix_mult``
    static    calibrated, from the file's ``input_scale``         ComfyUI with a calibrated file

Rounding the input and multiplying the rounded numbers in high precision gives what the fp8 product gives up to the
order of its fp32 sums, so any of these can be looked at, and trained against, on any device. ComfyUI: ``comfy/ops.py``
(``fp8_linear``, ``mixed_precision_ops``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from library.nn.rope import Table
from library.precision.fp8_numbers import E4M3FN, dequantize

ActivationRounding = Literal["row", "tensor", "unit", "static"]
_TINY = 1e-12  # an input of zeros has scale 1e-12 instead of 0


def round_activations(x: Tensor, how: ActivationRounding, scale: Tensor | None = None) -> Tensor:
    """Return ``x`` [..., in] as it is after rounding to e4m3fn, in its own dtype.

    Args:
        x: activations, not NaN.
        how: which scale; see the module's first lines.
        scale: for ``static``, one number.
    """
    values = x.float()
    if how == "unit":
        factor = values.new_ones(())
    elif how == "static":
        assert scale is not None, "a static scale comes from the file"
        factor = scale.to(values.device, torch.float32).reshape(())
    else:
        magnitudes = values.abs()
        largest = magnitudes.amax(dim=-1, keepdim=True) if how == "row" else magnitudes.amax()
        factor = (largest / E4M3FN.max).clamp_min(_TINY)
    values = (values / factor).clamp(-E4M3FN.max, E4M3FN.max).to(E4M3FN.dtype)
    flat = values.reshape(-1, values.shape[-1])
    return (dequantize(flat, None, torch.float32).view(values.shape) * factor).to(x.dtype)


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


class FakeQuantLinear(nn.Module):
    """A linear layer whose input is rounded as a server's fp8 product rounds it.

    The gradient passes as if nothing had been rounded (straight-through; Bengio et al. 2013, arXiv 1308.3432), so a
    LoRA can be trained beside the rounding it will meet.
    """

    def __init__(self, base: nn.Module, how: ActivationRounding, scale: Tensor | None = None) -> None:
        super().__init__()
        self.base, self.how = base, how
        self.register_buffer("input_scale", scale, persistent=False)
        self.in_features, self.out_features = base.in_features, base.out_features

    @property
    def weight(self) -> Tensor:
        """The base's weight: diffusers reads its dtype in places."""
        return self.base.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """The base's bias."""
        return self.base.bias  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]``."""
        rounded = round_activations(x.detach(), self.how, self.input_scale)  # type: ignore[arg-type]
        return self.base(x + (rounded - x).detach() if x.requires_grad else rounded)


def fake_quantize_inputs(
    model: nn.Module,
    names: Mapping[str, Tensor | None],
    how: ActivationRounding,
) -> None:
    """Let the linear layers ``names`` of ``model`` round their inputs, in place.

    Args:
        model: before a LoRA is put in, so that the LoRA sees unrounded activations.
        names: layer -> its static scale, or None.
        how: which scale; layers without a static one are left alone under ``static``.
    """
    for name, scale in names.items():
        if how != "static" or scale is not None:
            model.set_submodule(name, FakeQuantLinear(model.get_submodule(name), how, scale))


@contextmanager
def rounded_positions(model: nn.Module, kind: type[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Round the cosines and sines of every module of ``kind`` in ``model`` to ``dtype`` inside the block."""

    def rounded(module: nn.Module, inputs: Any, table: Table) -> Table:
        cos, sin = table
        return cos.to(dtype).float(), sin.to(dtype).float()

    handles = [m.register_forward_hook(rounded) for m in model.modules() if isinstance(m, kind)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
