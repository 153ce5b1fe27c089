"""A frozen linear layer whose weight stays in memory as its file has it, and in the products where the GPU can.

Why: a LoRA's base is frozen, so its weights are only ever read. In 8 bits they take one byte instead of bf16's two; in
4 a half. FLUX's 24 GB become 12 or 7. What a trainer saves depends on how long the weight in high precision lives. The
obvious way, dequantise and call ``F.linear``, lets autograd keep the dequantised copy for the input gradient, so that
between forward and backward the whole model is there in bf16 after all, beside its quantised self. Here one autograd
function does both passes and keeps *nothing* of the weight's size:

    forward    y  = x W^T + b       the weight is dequantised, used and freed
    backward   dx = g W             dequantised once more; there is no gradient of a frozen weight

The price is a second dequantisation a step, a pass over memory beside a matrix product.

There are two ways to the product:

*Dequantised* (``dequant``), everywhere: exact to the compute dtype, for every format. A format that rotates its weights
has the inputs rotated instead, which is a small product beside the large one. On the CPU the weight is dequantised and
multiplied in chunks of two million numbers: forward by rows, so that each chunk gives finished outputs; backward by
columns, so that each gives finished input gradients and none is summed in bf16. That costs no time (a chunk is still in
the cache when it is used) and bounds the extra memory at 8 MiB in bf16. On a GPU kernels want to be large: a FLUX or
Qwen-Image weight is one chunk.

*As it is stored* (``quantised``), on GPUs that are faster so (``QuantizedWeight.multiplies_on``): in fp8 where tensor
cores have it, at up to twice bf16's rate, and in int8 by comfy-kitchen. Activations are then rounded too, row by row
with scales of their own (nothing to calibrate). The input gradient stays dequantised: made in fp8 it takes longer, as
the weight has to be transposed each time.

The layer is an ``nn.Linear`` to whoever asks (LoRA, tensor parallelism by type), the weight's values its parameter
``weight``, its scales buffers. Moving it moves all; casting it (``model.to(torch.bfloat16)``) changes none, since a
cast of one without the other would be a wrong weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from library.errors import UserError
from library.precision.files.base import QuantizedWeight

Compute = Literal["auto", "dequant", "quantised"]

_CPU_CHUNK = 1 << 21  # 4 MiB in bf16; with AMX smaller ones take 20 % longer, on Zen 5 all up to this cost the same
_CPU_TOKENS = 128  # rotated at a time at least, or a quarter of all, anew for each chunk of the weight
_GPU_CHUNK = 1 << 27  # 256 MiB in bf16, larger than any weight of FLUX or Qwen-Image
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class QuantizedLinear(nn.Linear):
    """``y = x @ W.T + bias`` with a frozen ``W`` in a quantised format.

    Attributes:
        weight: the field ``values`` of the weight; its other tensors are buffers under their fields' names.
        bias: [out] in high precision, or None.
        compute: how products are made: ``dequant``, ``quantised``, or ``auto``, which takes ``quantised``
            where GPU and weight allow.
    """

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
        *,
        compute: Compute = "auto",
    ) -> None:
        """Wrap ``weight`` and ``bias`` without copying."""
        nn.Module.__init__(self)  # not nn.Linear's: it would allocate a weight
        # The bias first: diffusers takes the dtype of a model's first parameter for that of activations.
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
        self.set_quantized(weight)
        self.set_compute(compute)

    def set_quantized(self, weight: QuantizedWeight) -> None:
        """Put ``weight`` in the place of the layer's own; not copied."""
        self.out_features, self.in_features = weight.shape
        tensors = weight.tensors()
        self.outline = weight.to("meta")  # what of it is no tensor
        self.register_parameter("weight", nn.Parameter(tensors.pop("values"), requires_grad=False))
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def set_compute(self, compute: Compute) -> None:
        """Choose how products are made.

        Raises:
            UserError: the weight cannot be multiplied as it is stored.
        """
        if compute == "quantised" and not self.quantized().is_operand:
            raise UserError(
                f"quantised_compute = quantised: a {self.out_features} x {self.in_features} weight "
                f"({self.outline.scheme.describe()}) cannot be multiplied as it is stored (at most a scale a row, "
                "aligned sides); set dequant"
            )
        self.compute = compute

    @property
    def _weight(self) -> Tensor:
        """The values, also where a subclass hides ``weight``."""
        weight = self._parameters["weight"]
        assert weight is not None
        return weight

    def quantized(self) -> QuantizedWeight:
        """Return the weight, not copied."""
        return self.outline.with_tensors(self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        fields: dict[str, Any] = {"values": self._weight, **self._buffers}
        return {name: fields[name] for name in self.outline.tensors()}

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] in ``dtype``."""
        return self.quantized().dequantize(dtype)

    def forward(self, x: Tensor, rotated: bool = False) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]`` in the dtype of ``x``, or autocast's where autocast is on.

        ``rotated``: ``x`` is as the weight's ``rotate`` returns it.
        """
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        rows = x.reshape(-1, self.in_features)
        outline = self.outline.unrotated() if rotated else self.outline
        way, tensors = self._way(x.device), self._tensors()
        if torch.is_grad_enabled() and (rows.requires_grad or (self.bias is not None and self.bias.requires_grad)):
            out = _Product.apply(rows, self.bias, (outline, way), *tensors.values())
        else:  # autograd functions that save a weight for nothing cannot be compiled
            out = _multiplied(rows, outline.with_tensors(tensors), self.bias, way)
        return out.view(*x.shape[:-1], self.out_features)

    def input_gradient(self, gradient: Tensor) -> Tensor:
        """Return ``gradient @ W``: [n, out] -> [n, in]; what backward of :meth:`forward` does."""
        return _input_gradient(gradient, self.quantized())

    def add_input_gradient(self, gradient: Tensor, into: Tensor) -> Tensor:
        """Add ``gradient @ W`` to ``into`` [n, in] in place, within the product where the weight is one chunk."""
        weight = self.quantized()
        whole = _step(gradient.device, self.in_features, self.out_features, weight.column_block) >= self.in_features
        if weight.rotates or not whole:
            return into.add_(_input_gradient(gradient, weight))
        return into.addmm_(gradient, weight.operand(gradient.dtype))

    def _way(self, device: torch.device) -> Compute:
        if self.compute != "auto":
            return self.compute
        return "quantised" if self.quantized().multiplies_on(device) else "dequant"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Move what ``to``, ``cuda``, ``half``, ... ask for, but let no cast reach the weight's tensors.

        They are shown to ``fn`` as integers, which every cast leaves alone.
        """
        tensors = self._tensors()
        del self._parameters["weight"]
        for name in tensors.keys() - {"values"}:
            del self._buffers[name]
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters["weight"] = tensors["values"]  # type: ignore[assignment]
            self._buffers.update({name: tensor for name, tensor in tensors.items() if name != "values"})
        for name, tensor in tensors.items():
            moved = fn(tensor.detach().view(_OF_SIZE[tensor.element_size()])).view(tensor.dtype)
            if name != "values":
                self._buffers[name] = moved
            elif moved.device != tensor.device or moved.data_ptr() != tensor.data_ptr():
                self._parameters["weight"] = nn.Parameter(moved, requires_grad=False)
        return self

    def extra_repr(self) -> str:
        """Show sizes and format in ``print(model)``."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, {self.outline.scheme.describe()}, compute={self.compute}"


class QuantizedLinearOfHiddenDtype(QuantizedLinear):
    """A :class:`QuantizedLinear` whose ``weight`` reads as None.

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


def ddp_ignored_names(model: nn.Module) -> list[str]:
    """Return the names of all frozen parameters and of all buffers of ``model``.

    gloo cannot broadcast fp8, and every process has loaded the frozen weights itself: before wrapping in DDP
    call ``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model,
    ddp_ignored_names(model))``.
    """
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    return frozen + [name for name, _ in model.named_buffers()]


class _Product(torch.autograd.Function):
    """``x [n, in] @ W.T + bias``, differentiable in ``x`` and ``bias``.

    ``how``: the weight without its tensors, and how it is multiplied.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, how: tuple[QuantizedWeight, Compute], *tensors: Tensor
    ) -> Tensor:
        if torch.compiler.is_compiling():
            ctx.save_for_backward(*tensors)  # a compiled graph passes its inputs on, without a copy
        else:
            # Kept by reference, past saved-tensor hooks: activation offloading must not carry off the weights.
            ctx.tensors = tensors
        ctx.outline, way = how
        return _multiplied(x, _with_tensors(ctx.outline, tensors), bias, way)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        tensors = ctx.tensors if hasattr(ctx, "tensors") else ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _input_gradient(gradient, _with_tensors(ctx.outline, tensors))
        dbias = gradient.float().sum(dim=0) if ctx.needs_input_grad[1] else None
        return dx, dbias, None, *(None for _ in tensors)


def _with_tensors(outline: QuantizedWeight, tensors: tuple[Tensor, ...]) -> QuantizedWeight:
    return outline.with_tensors(dict(zip(outline.tensors(), tensors, strict=True)))


def _multiplied(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, way: Compute) -> Tensor:
    bias = None if bias is None else bias.to(x.dtype)
    if way == "quantised":
        return weight.product(x, bias)
    return _product_by_rows(x, weight, bias)


def _product_by_rows(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    out_features, in_features = weight.shape
    step = _step(x.device, out_features, in_features)
    if torch.compiler.is_compiling() or step >= out_features:
        return torch.nn.functional.linear(weight.rotate(x), weight.operand(x.dtype), bias)
    out = x.new_empty(x.shape[0], out_features)
    tokens = max(_CPU_TOKENS, x.shape[0] // 4) if weight.rotates and x.device.type == "cpu" else x.shape[0]
    for start in range(0, out_features, step):
        rows = slice(start, start + step)
        part = weight.part(rows).operand(x.dtype).t()
        for first in range(0, x.shape[0], tokens):
            turned, target = weight.rotate(x[first : first + tokens]), out[first : first + tokens, rows]
            if bias is None:
                torch.mm(turned, part, out=target)
            else:
                torch.addmm(bias[rows], turned, part, out=target)
    return out


def _input_gradient(gradient: Tensor, weight: QuantizedWeight) -> Tensor:
    out_features, in_features = weight.shape
    step = _step(gradient.device, in_features, out_features, weight.column_block)
    if torch.compiler.is_compiling() or step >= in_features:
        return weight.rotate_back(gradient @ weight.operand(gradient.dtype))
    dx = gradient.new_empty(gradient.shape[0], in_features)
    for start in range(0, in_features, step):
        columns = slice(start, min(start + step, in_features))
        part, target = weight.part(columns=columns), dx[:, columns]
        torch.mm(gradient, part.operand(gradient.dtype), out=target)
        if part.rotates:
            target.copy_(part.rotate_back(target))
    return dx


def _step(device: torch.device, side: int, other_side: int, block: int = 1) -> int:
    """Return into chunks of how many rows (columns) a side is cut: a multiple of 64 that divides it, if there is one.

    Equal chunks need one matrix product kernel instead of two; oneDNN keeps every kernel it has made. They are whole
    numbers of ``block``.
    """
    chunk = _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK
    unit = math.lcm(64, block)
    most = max(unit, chunk // max(1, other_side) // unit * unit)
    return next((step for step in range(most, most // 2, -unit) if side % step == 0), most)
