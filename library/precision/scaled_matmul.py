"""Matrix products in fp8 itself, on GPUs whose tensor cores have it: ``torch._scaled_mm``.

    x[n, i] ~ qx[n, i] * sx[n]      w[o, i] = qw[o, i] * sw[o]
    y[n, o] = sx[n] * sw[o] * sum_i qx[n, i] * qw[o, i]

The weight is what the file holds. The activations are rounded to e4m3fn on the way in, each row by its own
largest value (dynamic scales, nothing to calibrate), and that rounding is the price: about 2.5 % of each
row's length, where the dequantising path is exact to the compute dtype. In the input gradient the weight's
row scales sit on the summed index, so they go into the gradient before it is rounded: ``dx = q(dy * sw) @
qw``.

One call form is used for weights with one scale and with a scale a row: a [n, 1] and a [1, o] fp32 scale. A
scale that changes along the inputs of a row cannot be taken out of the sum, so block-scaled weights are
dequantised instead. Needs compute capability 8.9 (Ada) or 9.0 and above (Hopper, Blackwell); the op also
runs on CPUs, slowly, for tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from library.precision.formats import E4M3FN

_ALIGNMENT = 16  # rows and columns of the fp8 operands, a rule of cuBLASLt


def device_has_fp8_matmul(device: torch.device) -> bool:
    """Return whether ``device`` is a CUDA GPU with fp8 tensor cores (compute capability 8.9 or more)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def weight_fits(codes: Tensor, scale: Tensor | None) -> bool:
    """Return whether ``codes`` [out, in] with ``scale`` can be an operand: e4m3fn, no blocks, aligned sides."""
    one_scale_a_row = scale is None or scale.shape[1] == 1
    return codes.dtype == E4M3FN.dtype and one_scale_a_row and all(side % _ALIGNMENT == 0 for side in codes.shape)


def scaled_linear(x: Tensor, codes: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return ``x @ (codes * scale).T + bias`` with ``x`` rounded to fp8.

    Args:
        x: [n, in], bf16, fp16 or fp32.
        codes: [out, in] e4m3fn.
        scale: [1 or out, 1] fp32, or None.
        bias: [out] in the dtype of ``x``.

    Returns:
        [n, out] in the dtype of ``x``; summed in fp32.
    """
    rounded, row_scale = _round_rows(x)
    out = _scaled_mm(rounded, codes.t(), row_scale, _column_scale(scale, codes.shape[0], x.device), x.dtype)
    return out if bias is None else out.add_(bias)


def scaled_input_gradient(gradient: Tensor, codes: Tensor, scale: Tensor | None) -> Tensor:
    """Return ``gradient @ (codes * scale)`` with the scaled gradient rounded to fp8.

    The op wants its second operand by columns, so the codes are transposed: a copy of one byte a weight.

    Args:
        gradient: [n, out].
        codes, scale: as for :func:`scaled_linear`.
    """
    scaled = gradient.float() if scale is None else gradient.float() * scale.reshape(1, -1)
    rounded, row_scale = _round_rows(scaled)
    by_columns = codes.t().contiguous().t()
    return _scaled_mm(rounded, by_columns, row_scale, _column_scale(None, codes.shape[1], codes.device), gradient.dtype)


def _round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x`` [n, k] as e4m3fn and the scale [n, 1] fp32 that undoes it."""
    largest = x.abs().amax(dim=-1, keepdim=True).float()
    scale = (largest / E4M3FN.max).clamp_min(torch.finfo(torch.float32).tiny)
    return (x / scale).clamp(-E4M3FN.max, E4M3FN.max).to(E4M3FN.dtype), scale


def _column_scale(scale: Tensor | None, columns: int, device: torch.device) -> Tensor:
    """Return the weight's scale as [1, columns] fp32."""
    if scale is None:
        return torch.ones(1, columns, device=device)
    return scale.reshape(1, -1).expand(1, columns).contiguous()


def _scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Call the op. Row-wise scales give bf16 only, which loses nothing that rounding to fp8 had left."""
    out = torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
    return out.to(dtype)
