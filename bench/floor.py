"""The floor of a LoRA step: its products with frozen weights and its attention, alone.

Whoever trains a LoRA computes these: every frozen linear layer forward (again where a block is recomputed), its input
gradient where something before it is trained, attention forward and backward. What a trainer's step takes above them
is the LoRA's own products, norms, activations, copies, and the optimizer.

A step is watched once (PyTorch shows a dispatch mode every operation, those of backward too); of what it called, the
products with frozen weights and the attention are then run on random tensors of the same shapes, dtypes and layouts
and on the model's own weights, which are too many for a cache. Biases and sums into another tensor are left out.
Weights that are dequantised for a product are not recognised: a quantised model has no floor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.families import LoraStep

_aten = torch.ops.aten
_attention = _aten._scaled_dot_product_flash_attention_for_cpu.default
_attention_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_PRODUCTS = {_aten.mm.default: 0, _aten.addmm.default: 1, _aten.addmm_.default: 1}  # -> place of the left factor
_ONEDNN = torch.ops.mkldnn._linear_pointwise.default

Work = Callable[[], Any]


class FlooredStep(LoraStep):
    """A step on unquantised weights, with its floor."""

    _work: list[Work] | None = None

    @torch.no_grad()
    def floor(self) -> None:
        """Do the floor's work; the first call takes a step and makes the tensors."""
        if self._work is None:
            frozen = {p.untyped_storage().data_ptr() for p in self.model.parameters() if not p.requires_grad}
            with torch.enable_grad(), Watch(frozen) as watch:
                self.step()
            self._work = watch.work
        for work in self._work:
            work()


class Watch(TorchDispatchMode):
    """Collects the floor's work of what is called inside.

    Args:
        frozen: where the memory of each frozen weight begins.
    """

    def __init__(self, frozen: set[int]) -> None:
        super().__init__()
        self.work: list[Work] = []
        self._frozen = frozen

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            left, right = args[_PRODUCTS[func] : _PRODUCTS[func] + 2]
            if self._is_frozen(right):
                self.work.append(_call(torch.mm, torch.randn_like(left), right))
        elif func is _ONEDNN and self._is_frozen(args[1]):
            self.work.append(_call(func, torch.randn_like(args[0]), args[1], None, *args[3:]))
        elif func is _attention:
            self.work.append(_call(func, *map(torch.randn_like, args[:3]), *args[3:], **kwargs))
        elif func is _attention_backward:
            gradient, query, key, value = map(torch.randn_like, args[:4])
            saved = _attention(query, key, value, *args[6:], **kwargs)
            self.work.append(_call(func, gradient, query, key, value, *saved, *args[6:], **kwargs))
        return func(*args, **kwargs)

    def _is_frozen(self, weight: Tensor) -> bool:
        return weight.untyped_storage().data_ptr() in self._frozen


def _call(function: Any, *args: Any, **kwargs: Any) -> Work:
    return lambda: function(*args, **kwargs)
