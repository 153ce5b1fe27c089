"""A frozen linear layer whose weight stays fp8 in memory.

Forward turns the weight into the compute dtype, uses it and lets it go; backward, which needs it once more
for the input gradient, turns it again. Nothing of the weight's size lives in between: autograd is told
neither of the weight (the layer already holds it) nor of a dequantised copy. The trainers that let autograd
keep that copy hold the whole model in bf16 from forward to backward, and so peak above plain bf16 training.

On the CPU the weight is dequantised and multiplied in pieces of two million numbers: forward by rows, so that
each piece gives finished outputs; backward by columns, so that each gives finished input gradients and none
is summed in bf16. That costs no time (a piece is still in the cache when it is used) and bounds the extra
memory at 8 MiB in bf16. On a GPU kernels want to be large: a FLUX or Qwen-Image weight is one piece.

The layer is an ``nn.Linear`` to whoever asks (LoRA, tensor parallelism by type), its weight a parameter of
fp8 dtype, its scale an fp32 buffer. Moving it moves both; casting it (``model.to(torch.bfloat16)``) changes
neither, since a cast without the scale would be a wrong weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from library.errors import UserError
from library.precision.formats import format_of
from library.precision.quantize import Quantized, dequantize
from library.precision.scaled_matmul import (
    device_has_fp8_matmul,
    scaled_input_gradient,
    scaled_linear,
    weight_fits,
)

Fp8Compute = Literal["auto", "dequant", "scaled_mm"]

_CPU_PIECE = 1 << 21  # 4 MiB in bf16; with AMX smaller ones take 20 % longer, on Zen 5 all up to this cost the same
_GPU_PIECE = 1 << 27  # 256 MiB in bf16, larger than any weight of FLUX or Qwen-Image


class Fp8Linear(nn.Linear):
    """``y = x @ (weight * scale).T + bias`` with a frozen fp8 ``weight``.

    Attributes:
        weight: [out, in], e4m3fn or e5m2.
        scale: [1 or out, blocks] fp32, or None; see ``library.precision.quantize``.
        bias: [out] in high precision, or None.
        compute: how products are made: ``dequant``, ``scaled_mm``, or ``auto``, which takes ``scaled_mm``
            where GPU
            and weight allow.
        fp8_input_gradient: with ``scaled_mm``, make the input gradient in fp8 as well.
    """

    scale: Tensor | None

    def __init__(
        self,
        quantized: Quantized,
        bias: Tensor | None = None,
        *,
        compute: Fp8Compute = "auto",
        fp8_input_gradient: bool = False,
    ) -> None:
        """Wrap ``quantized`` and ``bias`` without copying.

        Raises:
            UserError: ``scaled_mm`` is asked of a weight it cannot take.
        """
        nn.Module.__init__(self)  # not nn.Linear's: it would allocate a weight
        codes, scale = quantized.codes, quantized.scale
        assert format_of(codes.dtype) is not None, f"{codes.dtype} is no fp8 dtype"
        self.out_features, self.in_features = codes.shape
        # The bias first: diffusers takes the dtype of a model's first parameter for that of activations.
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("scale", scale)
        self.fp8_input_gradient = fp8_input_gradient
        self.set_compute(compute)

    def set_compute(self, compute: Fp8Compute) -> None:
        """Choose how products are made.

        Raises:
            UserError: ``scaled_mm`` is asked of a weight it cannot take.
        """
        if compute == "scaled_mm" and not weight_fits(self._weight, self.scale):
            raise UserError(
                f"fp8_compute = scaled_mm: a {self.out_features} x {self.in_features} weight {self._describe_weight()} "
                "cannot be multiplied in fp8 (e4m3fn, at most a scale a row, sides multiples of 16); set dequant"
            )
        self.compute = compute

    @property
    def _weight(self) -> Tensor:
        """The codes, also where a subclass hides ``weight``."""
        weight = self._parameters["weight"]
        assert weight is not None
        return weight

    def quantized(self) -> Quantized:
        """Return codes and scale, not copied."""
        return Quantized(self._weight, self.scale)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] in ``dtype``."""
        return dequantize(self._weight, self.scale, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]`` in the dtype of ``x``, or autocast's where autocast is on."""
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        in_fp8 = self._computes_in_fp8(x.device)
        rows = x.reshape(-1, self.in_features)
        out = _Fp8Product.apply(rows, self._weight, self.scale, self.bias, in_fp8, self.fp8_input_gradient)
        return out.view(*x.shape[:-1], self.out_features)

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Return ``gradient @ (weight * scale)``: [n, out] -> [n, in]; what backward of :meth:`forward` does."""
        if self.fp8_input_gradient and self._computes_in_fp8(gradient.device):
            return scaled_input_gradient(gradient, self._weight, self.scale)
        return _gradient_by_columns(gradient, self._weight, self.scale)

    def _computes_in_fp8(self, device: torch.device) -> bool:
        fits = device_has_fp8_matmul(device) and weight_fits(self._weight, self.scale)
        return self.compute == "scaled_mm" or (self.compute == "auto" and fits)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fp8Linear:
        """Move what ``to``, ``cuda``, ``half``, ... ask for, but let no cast reach codes and scale.

        Both are shown to ``fn`` as integers, which every cast leaves alone.
        """
        weight, scale = self._parameters.pop("weight"), self._buffers.pop("scale")
        assert weight is not None
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters["weight"], self._buffers["scale"] = weight, scale
        moved = _moved(fn, weight, torch.uint8)
        if moved.device != weight.device or moved.data_ptr() != weight.data_ptr():
            self._parameters["weight"] = nn.Parameter(moved, requires_grad=False)
        if scale is not None:
            self._buffers["scale"] = _moved(fn, scale, torch.int32)
        return self

    def _describe_weight(self) -> str:
        fp8 = format_of(self._weight.dtype)
        assert fp8 is not None
        if self.scale is None:
            return f"{fp8.name}, no scale"
        rows, blocks = self.scale.shape
        if blocks > 1:
            return f"{fp8.name}, scale per block of {self.in_features // blocks}"
        return f"{fp8.name}, scale per {'row' if rows > 1 else 'tensor'}"

    def extra_repr(self) -> str:
        """Show sizes and format in ``print(model)``."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {self._describe_weight()}, compute={self.compute}"


class Fp8LinearOfHiddenDtype(Fp8Linear):
    """An :class:`Fp8Linear` whose ``weight`` reads as None.

    transformers' T5 casts what it gives to ``wo`` to the dtype of ``wo.weight`` if that is a tensor: with
    fp8 weights the activations would become fp8 (``T5DenseGatedActDense.forward``).
    """

    @property
    def weight(self) -> None:  # type: ignore[override]
        """None; the codes are in ``quantized()``."""
        return

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register also the name that a property of this class has."""
        if name == "weight":
            self._parameters[name] = param
        else:
            super().register_parameter(name, param)


def make_cpu_kernels(model: nn.Module, dtype: torch.dtype) -> None:
    """Have the kernels that ``model``'s fp8 layers need on the CPU compiled now, and not within the first step.

    Args:
        model: with its weights on the CPU; elsewhere nothing happens.
        dtype: of the activations.
    """
    seen = set()
    for layer in model.modules():
        if isinstance(layer, Fp8Linear) and layer._weight.device.type == "cpu":
            kind = (layer._weight.shape, layer._weight.dtype, None if layer.scale is None else layer.scale.shape)
            if kind not in seen:
                seen.add(kind)
                _product_by_rows(torch.zeros(1, layer.in_features, dtype=dtype), layer._weight, layer.scale, None)
                _gradient_by_columns(torch.zeros(1, layer.out_features, dtype=dtype), layer._weight, layer.scale)


def ddp_ignored_names(model: nn.Module) -> list[str]:
    """Return the names of all frozen parameters and of all buffers of ``model``.

    gloo cannot broadcast fp8, and every process has loaded the frozen weights itself: before wrapping in DDP
    call ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model,
    ddp_ignored_names(model))``.
    """
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return frozen + [name for name, _ in model.named_buffers()]


def _moved(fn: Callable[[Tensor], Tensor], tensor: Tensor, as_dtype: torch.dtype) -> Tensor:
    return fn(tensor.detach().view(as_dtype)).view(tensor.dtype)


class _Fp8Product(torch.autograd.Function):
    """``x [n, in] @ (codes * scale).T + bias``, differentiable in ``x`` and ``bias``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        codes: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        in_fp8: bool,
        gradient_in_fp8: bool,
    ) -> Tensor:
        if torch.compiler.is_compiling():
            ctx.save_for_backward(codes, scale)  # a compiled graph passes its inputs on, without a copy
        else:
            # Kept by reference, past saved-tensor hooks: activation offloading must not carry off the weights.
            ctx.codes, ctx.scale = codes, scale
        ctx.gradient_in_fp8 = in_fp8 and gradient_in_fp8
        bias = None if bias is None else bias.to(x.dtype)
        if in_fp8:
            return scaled_linear(x, codes, scale, bias)
        return _product_by_rows(x, codes, scale, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        codes, scale = (ctx.codes, ctx.scale) if hasattr(ctx, "codes") else ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            if ctx.gradient_in_fp8:
                dx = scaled_input_gradient(gradient, codes, scale)
            else:
                dx = _gradient_by_columns(gradient, codes, scale)
        dbias = gradient.float().sum(dim=0) if ctx.needs_input_grad[3] else None
        return dx, None, None, dbias, None, None


def _product_by_rows(x: Tensor, codes: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    out_features, in_features = codes.shape
    step = _step(codes, out_features, in_features)
    if torch.compiler.is_compiling() or step >= out_features:
        return torch.nn.functional.linear(x, dequantize(codes, scale, x.dtype), bias)
    out = x.new_empty(x.shape[0], out_features)
    for start in range(0, out_features, step):
        rows = slice(start, start + step)
        own = scale if scale is None or scale.shape[0] == 1 else scale[rows]
        weight = dequantize(codes[rows], own, x.dtype).t()
        if bias is None:
            torch.mm(x, weight, out=out[:, rows])
        else:
            torch.addmm(bias[rows], x, weight, out=out[:, rows])
    return out


def _gradient_by_columns(gradient: Tensor, codes: Tensor, scale: Tensor | None) -> Tensor:
    out_features, in_features = codes.shape
    blocks = 1 if scale is None else scale.shape[1]
    block = in_features // blocks
    step = _step(codes, in_features, out_features)
    if blocks > 1:
        step = max(1, step // block) * block
    if torch.compiler.is_compiling() or step >= in_features:
        return gradient @ dequantize(codes, scale, gradient.dtype)
    dx = gradient.new_empty(gradient.shape[0], in_features)
    for start in range(0, in_features, step):
        columns = slice(start, start + step)
        own = scale if scale is None or blocks == 1 else scale[:, start // block : -(-(start + step) // block)]
        torch.mm(gradient, dequantize(codes[:, columns], own, gradient.dtype), out=dx[:, columns])
    return dx


def _step(codes: Tensor, side: int, other_side: int) -> int:
    """Return into pieces of how many rows (columns) a side is cut: a multiple of 64 that divides it, if there is one.

    Equal pieces need one matrix product kernel instead of two; oneDNN keeps every kernel it has made.
    """
    piece = _CPU_PIECE if codes.device.type == "cpu" else _GPU_PIECE
    most = max(64, piece // max(1, other_side) // 64 * 64)
    return next((step for step in range(most, most // 2, -64) if side % step == 0), most)
