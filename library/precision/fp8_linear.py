"""A frozen linear layer whose weight stays fp8 in memory, and in the products where the GPU can.

Why fp8 at all: a LoRA's base is frozen, so its weights are only ever read. In e4m3fn they take one byte instead of
bf16's two; FLUX's 24 GB become 12, Qwen-Image's 41 become 20. What a trainer saves depends on how long the weight in
high precision lives. The obvious way, dequantise and call ``F.linear``, lets autograd keep the dequantised copy for the
input gradient, so that between forward and backward the whole model is there in bf16 after all, beside its fp8 self.
Here one autograd function does both passes and keeps *nothing* of the weight's size:

    forward    y  = x (values * scale)^T + b       the weight is dequantised, used and freed
    backward   dx = g (values * scale)             dequantised once more; there is no gradient of a frozen weight

The price is a second dequantisation a step, a pass over memory beside a matrix product.

There are two ways to the product:

*Dequantised* (``dequant``), everywhere: exact to the compute dtype, for every layout of scales. On the CPU the weight
is dequantised and multiplied in chunks of two million numbers: forward by rows, so that each chunk gives finished
outputs; backward by columns, so that each gives finished input gradients and none is summed in bf16. That costs no
time (a chunk is still in the cache when it is used) and bounds the extra memory at 8 MiB in bf16. On a GPU kernels want
to be large: a FLUX or Qwen-Image weight is one chunk.

*In fp8 itself* (``scaled_mm``), on GPUs whose tensor cores have it (compute capability 8.9, Ada, or 9.0 and above,
Hopper and Blackwell): ``torch._scaled_mm`` multiplies the file's fp8 values as they are, at up to twice bf16's rate.

    x[n, i] ~ qx[n, i] * sx[n]      w[o, i] = qw[o, i] * sw[o]
    y[n, o] = sx[n] * sw[o] * sum_i qx[n, i] * qw[o, i]

Both operands have to be fp8, so activations are rounded to e4m3fn on the way in, each row by its own largest value
(dynamic scales, nothing to calibrate), and that rounding costs accuracy: about 2.5 % of each row's length. Scales can
be taken out of the sum only where they do not change along it: one a tensor or a row. Block-scaled weights are
dequantised instead. In the input gradient the weight's row scales sit on the summed index, so they go into the gradient
before it is rounded: ``dx = q(dy * sw) @ qw``. It stays dequantised unless ``fp8_input_gradient`` asks for it. The op
also runs on CPUs, slowly, for tests.

The layer is an ``nn.Linear`` to whoever asks (LoRA, tensor parallelism by type), its weight a parameter of fp8 dtype,
its scale an fp32 buffer. Moving it moves both; casting it (``model.to(torch.bfloat16)``) changes neither, since a cast
without the scale would be a wrong weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from library.errors import UserError
from library.precision.quantize import E4M3FN, FP8_DTYPES, Quantized, dequantize, describe_scales

_ALIGNMENT = 16  # rows and columns of the fp8 operands, a rule of cuBLASLt


def device_has_fp8_matmul(device: torch.device) -> bool:
    """Return whether ``device`` is a CUDA GPU with fp8 tensor cores (compute capability 8.9 or more)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def weight_fits(values: Tensor, scale: Tensor | None) -> bool:
    """Return whether ``values`` [out, in] with ``scale`` can be an operand: e4m3fn, no blocks, aligned sides."""
    one_scale_a_row = scale is None or scale.shape[1] == 1
    return values.dtype == E4M3FN.dtype and one_scale_a_row and all(side % _ALIGNMENT == 0 for side in values.shape)


def scaled_linear(x: Tensor, values: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return ``x @ (values * scale).T + bias`` with ``x`` rounded to fp8.

    Args:
        x: [n, in], bf16, fp16 or fp32.
        values: [out, in] e4m3fn.
        scale: [1 or out, 1] fp32, or None.
        bias: [out] in the dtype of ``x``.

    Returns:
        [n, out] in the dtype of ``x``; summed in fp32.
    """
    rounded, row_scale = _round_rows(x)
    out = _scaled_mm(rounded, values.t(), row_scale, _column_scale(scale, values.shape[0], x.device), x.dtype)
    return out if bias is None else out.add_(bias)


def scaled_input_gradient(gradient: Tensor, values: Tensor, scale: Tensor | None) -> Tensor:
    """Return ``gradient @ (values * scale)`` with the scaled gradient rounded to fp8.

    The op wants its second operand by columns, so the values are transposed: a copy of one byte a weight.

    Args:
        gradient: [n, out].
        values, scale: as for :func:`scaled_linear`.
    """
    scaled = gradient.float() if scale is None else gradient.float() * scale.reshape(1, -1)
    rounded, row_scale = _round_rows(scaled)
    by_columns = values.t().contiguous().t()
    return _scaled_mm(
        rounded, by_columns, row_scale, _column_scale(None, values.shape[1], values.device), gradient.dtype
    )


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
    """Return ``(a * scale_a) @ (b * scale_b)`` in ``dtype``.

    With a scale a row the op gives bf16 only; for other dtypes the sums come out in fp32 and are scaled here.
    """
    if dtype == torch.bfloat16:
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)
    one = torch.ones((), device=a.device)
    out = torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.float32)
    return out.mul_(scale_a).mul_(scale_b).to(dtype)


Fp8Compute = Literal["auto", "dequant", "scaled_mm"]

_CPU_CHUNK = 1 << 21  # 4 MiB in bf16; with AMX smaller ones take 20 % longer, on Zen 5 all up to this cost the same
_GPU_CHUNK = 1 << 27  # 256 MiB in bf16, larger than any weight of FLUX or Qwen-Image


class Fp8Linear(nn.Linear):
    """``y = x @ (weight * scale).T + bias`` with a frozen fp8 ``weight``.

    Attributes:
        weight: [out, in], e4m3fn or e5m2.
        scale: [1 or out, blocks] fp32, or None; see ``library.precision.quantize``.
        bias: [out] in high precision, or None.
        compute: how products are made: ``dequant``, ``scaled_mm``, or ``auto``, which takes ``scaled_mm`` where GPU
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
        """Wrap ``quantized`` and ``bias`` without copying."""
        nn.Module.__init__(self)  # not nn.Linear's: it would allocate a weight
        values, scale = quantized.values, quantized.scale
        assert values.dtype in FP8_DTYPES, f"{values.dtype} is no fp8 dtype"
        self.out_features, self.in_features = values.shape
        # The bias first: diffusers takes the dtype of a model's first parameter for that of activations.
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
        self.weight = nn.Parameter(values, requires_grad=False)
        self.register_buffer("scale", scale)
        self.fp8_input_gradient = fp8_input_gradient
        self.set_compute(compute)

    def set_compute(self, compute: Fp8Compute) -> None:
        """Choose how products are made."""
        if compute == "scaled_mm" and not weight_fits(self._weight, self.scale):
            raise UserError(
                f"fp8_compute = scaled_mm: a {self.out_features} x {self.in_features} weight {self._describe_weight()} "
                "cannot be multiplied in fp8 (e4m3fn, at most a scale a row, sides multiples of 16); set dequant"
            )
        self.compute = compute

    @property
    def _weight(self) -> Tensor:
        """The values, also where a subclass hides ``weight``."""
        weight = self._parameters["weight"]
        assert weight is not None
        return weight

    def quantized(self) -> Quantized:
        """Return values and scale, not copied."""
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
        """Move what ``to``, ``cuda``, ``half``, ... ask for, but let no cast reach values and scale.

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
        quantized = self.quantized()
        return f"{quantized.fp8.name}, {describe_scales(quantized.granularity)}"

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
        """None; the values are in ``quantized()``."""
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
    """``x [n, in] @ (values * scale).T + bias``, differentiable in ``x`` and ``bias``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        in_fp8: bool,
        gradient_in_fp8: bool,
    ) -> Tensor:
        if torch.compiler.is_compiling():
            ctx.save_for_backward(values, scale)  # a compiled graph passes its inputs on, without a copy
        else:
            # Kept by reference, past saved-tensor hooks: activation offloading must not carry off the weights.
            ctx.values, ctx.scale = values, scale
        ctx.gradient_in_fp8 = in_fp8 and gradient_in_fp8
        bias = None if bias is None else bias.to(x.dtype)
        if in_fp8:
            return scaled_linear(x, values, scale, bias)
        return _product_by_rows(x, values, scale, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        values, scale = (ctx.values, ctx.scale) if hasattr(ctx, "values") else ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            if ctx.gradient_in_fp8:
                dx = scaled_input_gradient(gradient, values, scale)
            else:
                dx = _gradient_by_columns(gradient, values, scale)
        dbias = gradient.float().sum(dim=0) if ctx.needs_input_grad[3] else None
        return dx, None, None, dbias, None, None


def _product_by_rows(x: Tensor, values: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    out_features, in_features = values.shape
    step = _step(values, out_features, in_features)
    if torch.compiler.is_compiling() or step >= out_features:
        return torch.nn.functional.linear(x, dequantize(values, scale, x.dtype), bias)
    out = x.new_empty(x.shape[0], out_features)
    for start in range(0, out_features, step):
        rows = slice(start, start + step)
        own = scale if scale is None or scale.shape[0] == 1 else scale[rows]
        weight = dequantize(values[rows], own, x.dtype).t()
        if bias is None:
            torch.mm(x, weight, out=out[:, rows])
        else:
            torch.addmm(bias[rows], x, weight, out=out[:, rows])
    return out


def _gradient_by_columns(gradient: Tensor, values: Tensor, scale: Tensor | None) -> Tensor:
    out_features, in_features = values.shape
    blocks = 1 if scale is None else scale.shape[1]
    block = in_features // blocks
    step = _step(values, in_features, out_features)
    if blocks > 1:
        step = max(1, step // block) * block
    if torch.compiler.is_compiling() or step >= in_features:
        return gradient @ dequantize(values, scale, gradient.dtype)
    dx = gradient.new_empty(gradient.shape[0], in_features)
    for start in range(0, in_features, step):
        columns = slice(start, start + step)
        own = scale if scale is None or blocks == 1 else scale[:, start // block : -(-(start + step) // block)]
        torch.mm(gradient, dequantize(values[:, columns], own, gradient.dtype), out=dx[:, columns])
    return dx


def _step(values: Tensor, side: int, other_side: int) -> int:
    """Return into chunks of how many rows (columns) a side is cut: a multiple of 64 that divides it, if there is one.

    Equal chunks need one matrix product kernel instead of two; oneDNN keeps every kernel it has made.
    """
    chunk = _CPU_CHUNK if values.device.type == "cpu" else _GPU_CHUNK
    most = max(64, chunk // max(1, other_side) // 64 * 64)
    return next((step for step in range(most, most // 2, -64) if side % step == 0), most)
