"""What a model keeps of its blocks from forward to backward, and what it computes again (gradient checkpointing).

Without it every block keeps some thirty times its input. Here a block keeps its input, and runs once more in backward
(Chen et al. 2016, arXiv 1604.06174). Between the two lie three choices, and they go together:

    every     only one of n neighbouring blocks is computed again, the others keep everything
    keep      as much is kept all the same as so many bytes hold: of all blocks the outputs of attention, which are
              dearest to make again for their size, then of some blocks everything
    offload   kept inputs go to host memory as soon as the block has run, and come back one block ahead of backward

A :class:`Recomputation` is the function that diffusers' models and ``TransformerLM`` call their blocks through. PyTorch
does the work: ``torch.utils.checkpoint`` without re-entrance, its selective contexts, saved-tensor hooks.

Tensors that autograd keeps for backward, waiting in host memory.

``pack`` and ``unpack`` are hooks for ``torch.autograd.graph.saved_tensors_hooks``. On a GPU a tensor is copied out on a
side stream while the next block computes, into page-locked memory, and its place on the device is free once nothing
else holds it. Backward wants tensors in the opposite order: when one is asked for, the copy of the one before begins,
so that it arrives while this one is used. The host waits for nothing. On a CPU the same code copies at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from library.nn.norms import Kept

_aten = torch.ops.aten
ATTENTION = frozenset(
    {
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


@dataclass
class _Cost:
    """Bytes that a block keeps, None where that was not seen yet: attention's outputs, everything."""

    attention: int | None = None
    everything: int | None = None


class Recomputation:
    """Runs blocks so that backward computes them again; one object a model.

    Attributes:
        blocks: how many blocks the model has.
        every: of so many neighbouring blocks one is computed again.
        keep_bytes: what a forward pass may keep that could be computed again.
        offload: where inputs wait; None leaves them on the device.
    """

    def __init__(self, blocks: int, every: int = 1, keep_bytes: int = 0, offload: HostOffload | None = None) -> None:
        self.blocks, self.every, self.keep_bytes, self.offload = blocks, every, keep_bytes, offload
        self._places: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._costs: dict[tuple[Any, ...], _Cost] = {}  # a block's kind and the sizes of its inputs -> what it keeps
        self._left = 0

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return ``block(*args, **kwargs)``; see the class."""
        place = self._places.setdefault(block, len(self._places))
        if place == 0:
            self._left = self.keep_bytes
        if place % self.every:
            return block(*args, **kwargs)
        if not self.keep_bytes:
            return self._again(block, args, kwargs)
        sizes = tuple(each.shape for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        cost = self._costs.setdefault((type(block), *sizes), _Cost())
        later = (self.blocks - 1 - place) // self.every
        if cost.everything is None or cost.everything + later * (cost.attention or 0) <= self._left:
            return self._keeping_everything(block, cost, args, kwargs)
        if cost.attention is None or cost.attention <= self._left:
            return self._keeping_attention(block, cost, args, kwargs)
        return self._again(block, args, kwargs)

    def _again(self, block: nn.Module, args: Any, kwargs: Any, **how: Any) -> Any:
        if getattr(block, "keeps_modulation", False):
            kwargs = {**kwargs, "kept": Kept()}
        hooks = nullcontext() if self.offload is None else saved_tensors_hooks(self.offload.pack, self.offload.unpack)
        with hooks:
            return checkpoint(block.__call__, *args, use_reentrant=False, **how, **kwargs)

    def _keeping_attention(self, block: nn.Module, cost: _Cost, args: Any, kwargs: Any) -> Any:
        cost.attention = 0
        contexts = functools.partial(create_selective_checkpoint_contexts, _policy(cost))
        made = self._again(block, args, kwargs, context_fn=contexts)
        self._left -= cost.attention
        return made

    def _keeping_everything(self, block: nn.Module, cost: _Cost, args: Any, kwargs: Any) -> Any:
        """Run a block without recomputation; the first of its kind is how its cost is learnt.

        That one may be over the limit: backward computes one block again at a time and holds as much for it anyway.
        """
        kept: dict[int, int] = {}

        def look(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                storage = tensor.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(look, lambda tensor: tensor):
            made = block(*args, **kwargs)
        cost.everything = sum(kept.values())
        self._left -= cost.everything
        return made


def _policy(cost: _Cost) -> Callable[..., CheckpointPolicy]:
    """Return what tells of each operation whether its output is kept; adds to ``cost`` what attention's take."""

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation not in ATTENTION:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not context.is_recompute:
            cost.attention = (cost.attention or 0) + args[0].nbytes  # the output is as large as the queries
        return CheckpointPolicy.MUST_SAVE

    return policy


_SMALLEST = 1 << 20  # bytes; smaller tensors stay where they are
_AHEAD = 2  # tensors on their way while one is used: a double block of FLUX has two inputs


@dataclass(eq=False)
class _Away:
    """A tensor in host memory.

    Attributes:
        host: its values. left: when the copy out is through. back: the tensor on the device again, or None so far.
        came: when the copy back is through.
    """

    host: Tensor
    place: int
    left: torch.cuda.Event | None = None
    back: Tensor | None = None
    came: torch.cuda.Event | None = None


class HostOffload:
    """Keeps tensors of ``device`` in host memory between forward and backward."""

    def __init__(self, device: torch.device, smallest: int = _SMALLEST) -> None:
        self.device, self.smallest = device, smallest
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._away: WeakValueDictionary[int, _Away] = WeakValueDictionary()  # by place; the graph keeps them
        self._next = 0

    def pack(self, tensor: Tensor) -> Tensor | _Away:
        """Begin to move ``tensor`` out; return what stands for it. Parameters and small tensors stay."""
        if isinstance(tensor, nn.Parameter) or tensor.device.type != self.device.type or tensor.nbytes < self.smallest:
            return tensor
        on_gpu = self._stream is not None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        away = _Away(host, self._next)
        self._next += 1
        self._away[away.place] = away
        if self._stream is None:
            host.copy_(tensor)
            return away
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            away.left = torch.cuda.Event()
            away.left.record(self._stream)
        tensor.record_stream(self._stream)  # its memory is not given to anyone before the copy is through
        return away

    def unpack(self, away: Tensor | _Away) -> Tensor:
        """Return the tensor on the device again, and begin to bring back those that are wanted next."""
        if isinstance(away, Tensor):
            return away
        self._away.pop(away.place, None)
        self._bring_back(away)
        for place in range(away.place - 1, away.place - 1 - _AHEAD, -1):
            if place in self._away:
                self._bring_back(self._away[place])
        assert away.back is not None
        if away.came is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(away.came)
            away.back.record_stream(current)
        back, away.back = away.back, None  # asked for again (a graph that is kept), it comes once more
        return back

    def _bring_back(self, away: _Away) -> None:
        if away.back is not None:
            return
        if self._stream is None:
            away.back = away.host.clone()
            return
        assert away.left is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(away.left)
            away.back = torch.empty_like(away.host, device=self.device)
            away.back.copy_(away.host, non_blocking=True)
            away.came = torch.cuda.Event()
            away.came.record(self._stream)
