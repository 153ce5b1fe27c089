"""Linear layers made ready for generating on a CPU: weights in the order in which its kernels read them.

A token of a language model reads every weight once, and little else: what counts is how much of the memory's bandwidth
a product gets. PyTorch's builds for x86 hand fp32 products to MKL, which on AMD's processors makes products of one row
in one thread. oneDNN shares them among all, and reads a weight that lies in its own blocked order best
(``mkldnn::_reorder_linear_weight``, what TorchInductor does when it freezes a model). On an EPYC, weights that no cache
holds, GB/s of the weight's bytes, two threads, the 49152 x 576 head of a SmolLM2:

    rows of x        1      8     64
    F.linear      11.9    7.2    3.4
    packed        27.3   25.1    6.4        what two threads can read at all: 30
    bf16          16.5   13.9    4.9
    bf16 packed   25.8   26.5    6.1

Packed weights are of no use to anything else: who looks at them (a LoRA that wants its part of q, k and v) has them
unpacked first. FBGEMM's int8 products (``quantized::linear_dynamic``) read a quarter of the bytes as fast and are not
used: they round all inputs by one scale, and the few large ones that language models have leave nothing of the others
(SmolLM2's logits were off by 20 of 35).
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from library.nn.frozen_linear import LinearWrapper


class PackedLinear(nn.Module):
    """``y = x @ W.T + b`` with a fixed weight that only oneDNN can read."""

    def __init__(self, linear: nn.Linear, shared: bool = False) -> None:
        """Take over ``linear``, in fp32 or bf16 on the CPU.

        ``shared``: another module reads the weight too (a tied head); it stays as it is, and oneDNN reads it so.
        """
        super().__init__()
        self.in_features, self.out_features, self.shared = linear.in_features, linear.out_features, shared
        self.bias = None if linear.bias is None else linear.bias.detach()
        weight = linear.weight.detach()
        self.packed = weight if shared else torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., in] to [..., out]; both in the weight's dtype, and not recorded by autograd."""
        return torch.ops.mkldnn._linear_pointwise(x.contiguous(), self.packed, self.bias, "none", [], "")

    def unpacked(self) -> nn.Linear:
        """Return the layer as it was, frozen."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        weight = self.packed if self.shared else self.packed.to_dense()
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias, requires_grad=False)
        return linear.eval()


def pack_linears(model: nn.Module) -> None:
    """Pack the frozen linear layers of ``model`` in place, where they are on a CPU that has the kernels."""
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    for name, layer in [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear]:
        parent, _, leaf = name.rpartition(".")
        is_part = leaf != "base" and isinstance(model.get_submodule(parent), LinearWrapper)  # a LoRA's own
        if not is_part and not layer.weight.requires_grad and _has_kernel(layer.weight):
            model.set_submodule(name, PackedLinear(layer, shared=owners[id(layer.weight)] > 1))


def unpack_linears(model: nn.Module) -> bool:
    """Put ordinary layers in the place of packed ones, in place; return whether there were any."""
    packed = [(name, module) for name, module in model.named_modules() if isinstance(module, PackedLinear)]
    for name, layer in packed:
        model.set_submodule(name, layer.unpacked())
    return bool(packed)


def _has_kernel(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    is_bf16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return is_bf16 or weight.dtype == torch.float32
