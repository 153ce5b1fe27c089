"""Linear layers made ready for generating on a CPU: weights in the order in which its kernels read them.

A token of a language model reads every weight once, and little else: what counts is how much of the memory's bandwidth
a product gets. PyTorch's builds for x86 hand fp32 products to MKL, which on AMD's processors makes products of one row
in one thread. oneDNN shares them among all, and reads a weight that lies in its own blocked order best
(``mkldnn::_reorder_linear_weight``, what TorchInductor does when it freezes a model). On an EPYC, weights that no cache
holds, GB/s of the weight's bytes, two threads, the 49152 x 576 head of a SmolLM2:

    rows of x        1      8     64
    F.linear      11.9    7.2    3.4
    packed        27.3   25.1    6.4
    bf16          16.5   13.9    4.9
    bf16 packed   25.8   26.5    6.1

Weights that are quantised have kernels of PyTorch's own, which take bf16 and decode while they read. The same head, one
row, one thread and two, ms:

    fp32 packed   7.9   4.9        int8, a scale a row                    3.6   1.8
    bf16 packed   3.0   2.1        4 bits, a scale and a zero for 32      1.6   0.8

Their time grows with the rows, so that prompts go through the layer that was packed, which dequantises once for all.
Activations are not rounded but to bf16. FBGEMM's products (``quantized::linear_dynamic``) do round them, all by one
scale, and are not used: the few large ones that language models have leave nothing of the others (SmolLM2's logits were
off by 20 of 35).

Packed weights are of no use to anything else: who looks at them (a LoRA that wants its part of q, k and v) does so
within :func:`unpacked`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from library.nn.frozen_linear import LinearWrapper
from library.precision.files.gguf import GgufWeight
from library.precision.files.int8 import Int8Scheme, Int8Weight
from library.precision.linear import QuantizedLinear

_INT8_ROWS, _INT4_ROWS = 16, 128  # above these, dequantising and multiplying in bf16 takes less time
_INT4_OUTPUTS = 16  # their number is a multiple
_ROWS = 4096  # of a weight that are rounded at a time


class PackedLinear(nn.Module, ABC):
    """``y = x @ W.T + b`` with a fixed weight that only one kernel can read; not recorded by autograd."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()

    @abstractmethod
    def unpacked(self) -> nn.Linear:
        """Return the layer as it was, frozen."""


class OneDnnLinear(PackedLinear):
    """A weight in fp32 or bf16 in oneDNN's order."""

    def __init__(self, linear: nn.Linear, shared: bool = False) -> None:
        """Take over ``linear``, on the CPU.

        ``shared``: another module reads the weight too (a tied head); it stays as it is, and oneDNN reads it so.
        """
        super().__init__(linear)
        weight = linear.weight.detach()
        self.shared = shared
        self.packed = weight if shared else torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., in] to [..., out]; both in the weight's dtype."""
        # It falls back to a loop a thousand times slower for an x that is stored by columns.
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), self.packed, self.bias, "none", [], "")

    def unpacked(self) -> nn.Linear:
        """Return the layer as it was, frozen."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        weight = self.packed if self.shared else self.packed.to_dense()
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias, requires_grad=False)
        return linear.eval()


class DecodedLinear(PackedLinear):
    """A quantised weight that is decoded within the product of a few rows; ``source`` multiplies more of them."""

    most_rows: int
    source: QuantizedLinear

    def __init__(self, source: QuantizedLinear) -> None:
        super().__init__(source)
        object.__setattr__(self, "source", source)  # no submodule: the model has this layer in its place

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., in] bf16 to [..., out] bf16."""
        rows = x.reshape(-1, self.in_features).contiguous()
        if len(rows) > self.most_rows:
            return self.source(x)
        out = self._product(rows)
        return (out if self.bias is None else out.add_(self.bias)).view(*x.shape[:-1], self.out_features)

    @abstractmethod
    def _product(self, rows: Tensor) -> Tensor:
        """Return ``rows @ W.T``."""

    def unpacked(self) -> QuantizedLinear:
        """Return the layer as it was."""
        return self.source


class Int8Linear(DecodedLinear):
    """A weight in int8 with a scale a row, or one; it is not copied."""

    most_rows = _INT8_ROWS

    def __init__(self, source: QuantizedLinear, weight: Int8Weight) -> None:
        super().__init__(source)
        self.values, self.scale = weight.values, weight.scale.expand(self.out_features, 1).flatten().bfloat16()

    def _product(self, rows: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(rows, self.values, self.scale)


class Int4Linear(DecodedLinear):
    """A weight of integers of 4 bits with a scale and an offset for each 32 inputs, which are rounded to bf16."""

    most_rows = _INT4_ROWS

    def __init__(self, source: QuantizedLinear, values: Tensor, scale: Tensor, offset: Tensor) -> None:
        super().__init__(source)
        self.packed = torch._convert_weight_to_int4pack_for_cpu(values.int(), 1)
        # the kernel's numbers are (value - 8) * scale + zero
        self.scales = torch.stack((scale, offset + 8 * scale), dim=-1).transpose(0, 1).contiguous().bfloat16()

    def _product(self, rows: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, 32, self.scales)


def pack_linears(model: nn.Module) -> None:
    """Pack the frozen linear layers of ``model`` in place, where they are on a CPU that has the kernels.

    Quantised ones where the rest of the model is in bf16, and where the kernels have their numbers.
    """
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    in_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    for name, layer in _linears(model):
        packed: PackedLinear | None = None
        if isinstance(layer, QuantizedLinear):
            packed = _decoded(layer) if in_bf16 and _has_decoder(layer) else None
        elif not layer.weight.requires_grad and _has_kernel(layer.weight):
            packed = OneDnnLinear(layer, shared=owners[id(layer.weight)] > 1)
        if packed is not None:
            model.set_submodule(name, packed)


@contextmanager
def unpacked(model: nn.Module) -> Iterator[None]:
    """Put ordinary layers in the place of packed ones, in place, and pack again behind."""
    packed = [(name, module) for name, module in model.named_modules() if isinstance(module, PackedLinear)]
    for name, layer in packed:
        model.set_submodule(name, layer.unpacked())
    try:
        yield
    finally:
        if packed:
            pack_linears(model)


def round_to_int8(model: nn.Module) -> None:
    """Make the frozen linear layers of ``model`` int8 with a scale a row, in place, but those of 4 bits with a kernel.

    A tied head becomes a matrix of its own.
    """
    for name, layer in _linears(model):
        if isinstance(layer, QuantizedLinear) and _has_decoder(layer):
            continue
        weight = layer.dequantized(torch.float32) if isinstance(layer, QuantizedLinear) else layer.weight
        rounded = Int8Weight.stack(
            [cast(Int8Weight, Int8Scheme().quantize(part)) for part in weight.detach().split(_ROWS)]
        )
        model.set_submodule(name, QuantizedLinear(rounded, layer.bias, compute="dequant").train(layer.training))


def _linears(model: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Return the plain and quantised linear layers that are no LoRA's own."""
    found = [(name, layer) for name, layer in model.named_modules() if type(layer) in (nn.Linear, QuantizedLinear)]

    def is_part(name: str) -> bool:
        parent, _, leaf = name.rpartition(".")
        return leaf != "base" and isinstance(model.get_submodule(parent), LinearWrapper)

    return [(name, layer) for name, layer in found if not is_part(name)]


def _has_decoder(layer: QuantizedLinear) -> bool:
    """Return whether there is a kernel for the numbers of ``layer``."""
    weight = layer.quantized()
    if weight.tensors()["values"].device.type != "cpu" or torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return False
    if isinstance(weight, GgufWeight):
        return weight.is_int4 and layer.out_features % _INT4_OUTPUTS == 0
    return isinstance(weight, Int8Weight) and not weight.rotates


def _decoded(layer: QuantizedLinear) -> DecodedLinear | None:
    """Return ``layer`` in the form of the kernel that it has."""
    weight = layer.quantized()
    if isinstance(weight, Int8Weight):
        return Int8Linear(layer, weight)
    parts = weight.int4() if isinstance(weight, GgufWeight) else None
    return None if parts is None else Int4Linear(layer, *parts)


def _has_kernel(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    is_bf16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return is_bf16 or weight.dtype == torch.float32
