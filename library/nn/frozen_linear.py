"""Linear layers with frozen weights: nothing is saved for backward, and several of them share one input.

``y = x W^T + b`` with W and b fixed needs neither x nor W from autograd: the input gradient is ``dy W``, and the layer
holds W already. :class:`FrozenLinear` asks the *layer* for its weight when it needs it, in backward again. So

* under autocast no cast copy of a weight lives from forward to backward;
* a weight may lie elsewhere between the two (``library.training.memory.block_swap`` moves it): autograd, which would
  hold a view of the memory where the weight lay in forward, never sees it.

Attention projects q, k and v from the same hidden states. Three frozen base matrices stay three products, but the
low-rank layers around them can share one: a wrapper that can (``networks.adapters.lora.LoRALinear``) offers
``forward_together``, found here by name, so that this layer of the code knows nothing of LoRA. What precedes a linear
layer (its *prologue*: norm with modulation, an activation) is cheap to compute and wide to save; such a wrapper saves
the prologue's inputs instead and recomputes it in backward: :func:`project_recomputed`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def has_input_gradient(layer: nn.Module) -> bool:
    """Return whether :func:`input_gradient` can be had of ``layer``: a frozen nn.Linear, or one that adds it itself."""
    if hasattr(layer, "add_input_gradient"):
        return True
    return type(layer) in (nn.Linear, FrozenLinear) and not any(p.requires_grad for p in layer.parameters())


@torch.no_grad()
def output(layer: nn.Module, x: Tensor) -> Tensor:
    """Return ``layer(x)`` of a frozen layer, [n, in] -> [n, out], in the dtype of ``x``; not recorded by autograd."""
    if type(layer) in (nn.Linear, FrozenLinear):
        assert isinstance(layer, nn.Linear)
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return F.linear(x, layer.weight.to(x.dtype), bias)
    return layer(x)


@torch.no_grad()
def input_gradient(layer: Any, gradient: Tensor) -> Tensor:
    """Return ``gradient @ weight``: [n, out] -> [n, in], with the weight as the layer holds it now."""
    if hasattr(layer, "add_input_gradient"):
        return layer.add_input_gradient(gradient, gradient.new_zeros(len(gradient), layer.in_features))
    return gradient @ layer.weight.to(gradient.dtype)


@torch.no_grad()
def add_input_gradient(layer: Any, gradient: Tensor, into: Tensor) -> Tensor:
    """Add ``gradient @ weight`` to ``into`` in place: [n, out] and [n, in]; return ``into``."""
    if hasattr(layer, "add_input_gradient"):
        return layer.add_input_gradient(gradient, into)
    return into.addmm_(gradient, layer.weight.to(gradient.dtype))


class LinearWrapper(nn.Module):
    """A layer around a linear one, ``base``: any module with ``in_features``, ``out_features`` and a forward."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    @property
    def in_features(self) -> int:
        """Input columns of the base."""
        return self.base.in_features  # type: ignore[return-value]

    @property
    def out_features(self) -> int:
        """Output rows of the base."""
        return self.base.out_features  # type: ignore[return-value]

    @property
    def weight(self) -> Tensor:
        """The base's weight: diffusers reads its dtype in places."""
        return self.base.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """The base's bias."""
        return self.base.bias  # type: ignore[return-value]


class FrozenLinear(nn.Linear):
    """An ``nn.Linear`` with fixed weights; same names, same numbers, nothing kept for backward."""

    @classmethod
    def adopt(cls, linear: nn.Linear) -> FrozenLinear:
        """Return a layer that shares weight and bias with ``linear``."""
        ours = cls.__new__(cls)
        nn.Module.__init__(ours)  # not nn.Linear's: it would allocate a weight
        ours.in_features, ours.out_features = linear.in_features, linear.out_features
        ours.weight, ours.bias = linear.weight, linear.bias
        return ours.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]`` in the dtype of ``x``, or autocast's where autocast is on."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if torch.compiler.is_compiling():
            return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        rows = _FrozenProduct.apply(x.reshape(-1, x.shape[-1]), self)
        return rows.view(*x.shape[:-1], self.out_features)


class _FrozenProduct(torch.autograd.Function):
    """``layer(x)``, differentiable in ``x`` alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        return output(layer, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return input_gradient(ctx.layer, gradients[0]), None


def project_together(linears: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Return ``[linear(x) for linear in linears]``, sharing the down-projection where the layers offer it.

    Args:
        linears: layers that map ``[..., in]`` to ``[..., out_i]``; any mix of plain and LoRA-wrapped ones.
        x: their common input, ``[..., in]``.

    Returns:
        One tensor ``[..., out_i]`` per layer, in the given order. Equal to separate calls up to rounding.
    """
    groups: dict[type[nn.Module], list[int]] = {}
    for position, linear in enumerate(linears):
        if hasattr(type(linear), "forward_together"):
            groups.setdefault(type(linear), []).append(position)
    outputs: dict[int, Tensor] = {}
    for kind, positions in groups.items():
        together = kind.forward_together([linears[i] for i in positions], x)  # type: ignore[attr-defined]
        outputs.update(zip(positions, together, strict=True))
    return [outputs[i] if i in outputs else linear(x) for i, linear in enumerate(linears)]


def project_recomputed(linears: Sequence[nn.Module], prologue: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Return :func:`project_together` of ``prologue(*inputs)``, recomputed in backward where the layers can.

    Args:
        linears: as there.
        prologue: cheap and differentiable, drawing no random numbers.
        inputs: its arguments; these are saved for backward.
    """
    kind = type(linears[0])
    if hasattr(kind, "forward_together") and all(type(linear) is kind for linear in linears):
        return kind.forward_together(linears, *inputs, prologue=prologue)
    return project_together(linears, prologue(*inputs))
