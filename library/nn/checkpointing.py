"""Activation checkpointing: which of a block's activations are saved for backward, recomputed, or offloaded.

Without it every block saves some thirty times its input. Checkpointed, a block saves its input alone and runs once more
in backward (Chen et al. 2016, arXiv 1604.06174). Between the two lie these choices, and they go together:

    pairs     two neighbouring blocks are one: half the inputs are saved, each block still runs once more, and two
              blocks' activations are there at a time. The last blocks stand alone (:func:`neighbours`)
    budget    so many bytes are saved all the same (selective checkpointing): of all blocks the outputs of attention,
              which cost most to recompute for their size, then everything of some blocks
    offload   saved inputs go to host memory as soon as the block has run, and come back one block ahead of backward

Compiled blocks save attention's outputs from within what is compiled: there PyTorch's compiler recomputes the rest.

:class:`ActivationCheckpointing` is the function that diffusers' models and ``TransformerLM`` call their blocks through.
PyTorch does the work: ``torch.utils.checkpoint`` without re-entrance, its selective contexts, saved-tensor hooks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from library.errors import undone
from library.nn.norms import ModulationCache

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
    """Bytes that a block saves, None where not measured yet: attention's outputs, everything."""

    attention: int | None = None
    everything: int | None = None


class ActivationCheckpointing:
    """Calls a model's blocks, in forward order; one object a model.

    Attributes:
        blocks: how many blocks the model has.
        pairs: block -> the one that follows it, which runs within the same checkpoint.
        chained_args: names of a block's arguments that the outputs of the one before are, in the order of these.
        budget_bytes: what a forward pass may save that could be recomputed.
        offload: where inputs wait; None leaves them on the device.
        draws: whether blocks draw random numbers, the same again in backward. If not, the generators' state is left
            alone: a CUDA graph may not ask for it.
    """

    def __init__(
        self,
        blocks: int,
        budget_bytes: int = 0,
        offload: HostOffload | None = None,
        pairs: Mapping[nn.Module, nn.Module] | None = None,
        chained_args: tuple[str, ...] = (),
        draws: bool = True,
    ) -> None:
        self._options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
        self.blocks, self.budget_bytes, self.offload = blocks, budget_bytes, offload
        self.pairs, self.chained_args = dict(pairs or {}), chained_args
        self._run_ahead: nn.Module | None = None  # the second of a pair, whose outputs have been returned already
        self._indices: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._costs: dict[tuple[Any, ...], _Cost] = {}  # by a block's class and the shapes of its inputs
        self._left = 0  # of the budget

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return ``block(*args, **kwargs)``; see the class.

        Of a pair the first call returns what both blocks give, and the second hands that through.
        """
        if block is self._run_ahead:
            self._run_ahead = None
            given = _by_name(block, args, kwargs)
            outputs = tuple(given[name] for name in self.chained_args)
            return outputs if len(outputs) > 1 else outputs[0]
        if (following := self.pairs.get(block)) is not None:
            self._run_ahead = following
            return self._checkpoint_pair(block, following, _by_name(block, args, kwargs))
        index = self._indices.setdefault(block, len(self._indices))
        if index == 0:
            self._left = self.budget_bytes
        if not self.budget_bytes:
            return self._checkpoint(block, args, kwargs)
        shapes = tuple(each.shape for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        cost = self._costs.setdefault((type(block), *shapes), _Cost())
        later = self.blocks - 1 - index
        if cost.everything is None or cost.everything + later * (cost.attention or 0) <= self._left:
            return self._save_everything(block, cost, args, kwargs)
        if cost.attention is None or cost.attention <= self._left:
            return self._save_attention(block, cost, args, kwargs)
        return self._checkpoint(block, args, kwargs)

    def _checkpoint(self, block: nn.Module, args: Any, kwargs: Any, **options: Any) -> Any:
        if getattr(block, "caches_modulation", False):
            kwargs = {**kwargs, "modulation_cache": ModulationCache()}
        hooks = nullcontext() if self.offload is None else saved_tensors_hooks(self.offload.pack, self.offload.unpack)
        with hooks:
            return checkpoint(block.__call__, *args, **self._options, **options, **kwargs)

    def _checkpoint_pair(self, first: nn.Module, second: nn.Module, given: Mapping[str, Any]) -> Any:
        caches = [
            {"modulation_cache": ModulationCache()} if getattr(block, "caches_modulation", False) else {}
            for block in (first, second)
        ]

        def both(*values: Any) -> Any:
            named = dict(zip(given, values, strict=True))
            outputs = first(**{**named, **caches[0]})
            passed_on = zip(self.chained_args, outputs if isinstance(outputs, tuple) else (outputs,), strict=True)
            return second(**{**named, **dict(passed_on), **caches[1]})

        return checkpoint(both, *given.values(), **self._options)

    def _save_attention(self, block: nn.Module, cost: _Cost, args: Any, kwargs: Any) -> Any:
        if (options := getattr(block, "compile_options", None)) is not None:
            run = _compiled(_keep_attention_inside, **options)
            output, cost.attention = _saving(block, lambda: run(block, args, kwargs), tree_leaves((args, kwargs)))
            self._left -= cost.attention
            return output
        cost.attention = 0
        contexts = functools.partial(create_selective_checkpoint_contexts, _attention_policy(cost))
        output = self._checkpoint(block, args, kwargs, context_fn=contexts)
        self._left -= cost.attention
        return output

    def _save_everything(self, block: nn.Module, cost: _Cost, args: Any, kwargs: Any) -> Any:
        """Run a block without checkpointing; the first of its kind is how its cost is measured.

        That one may exceed the budget: backward recomputes one block at a time and holds as much for it anyway.
        """
        output, cost.everything = _saving(block, lambda: block(*args, **kwargs))
        self._left -= cost.everything
        return output


_compiled = functools.cache(torch.compile)  # each call of it would be kept for ever


def _saving(block: nn.Module, run: Callable[[], Any], inputs: Sequence[Any] = ()) -> tuple[Any, int]:
    """Return ``run()``, and the bytes that autograd keeps of it, but for ``inputs`` and the weights of ``block``."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    others = (*block.parameters(), *block.buffers(), *(each for each in inputs if isinstance(each, Tensor)))
    for tensor in others:
        saved.pop(tensor.untyped_storage()._cdata, None)
    return output, sum(saved.values())


# A block of FLUX or Qwen-Image saves ten times its input for its backward pass. Backward begins at the last block,
# while every input is there; as many blocks later, and some for the gradients that came meanwhile, a second block has
# room beside the first.
ALONE = 12


def neighbours(blocks: Sequence[nn.Module], alone: int = ALONE) -> dict[nn.Module, nn.Module]:
    """Return every first of two neighbouring blocks of one class -> the second, but for the last ``alone`` blocks."""
    pairs, at = dict[nn.Module, nn.Module](), len(blocks) - alone - 1
    while at > 0:
        alike = type(blocks[at - 1]) is type(blocks[at])
        if alike:
            pairs[blocks[at - 1]] = blocks[at]
        at -= 2 if alike else 1
    return pairs


def _by_name(block: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return a call's arguments by their names."""
    given = dict(inspect.signature(type(block).forward).bind(block, *args, **kwargs).arguments)
    given.pop("self")
    return given


def _attention_policy(cost: _Cost) -> Callable[..., CheckpointPolicy]:
    """Return the policy that saves attention's outputs alone; adds their bytes to ``cost``."""

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation not in ATTENTION:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not context.is_recompute:
            cost.attention = (cost.attention or 0) + args[0].nbytes  # the output is as large as the queries
        return CheckpointPolicy.MUST_SAVE

    return policy


def _only_attention(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


_ATTENTION_KEPT = functools.partial(create_selective_checkpoint_contexts, _only_attention)
_ATTENTION_KEPT.cache_hash = "attention's outputs"  # type: ignore[attr-defined]  # without it no compiled code is kept


def _keep_attention_inside(block: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run a block as one checkpoint, to be compiled with it: the compiler plans what is recomputed in backward."""
    return checkpoint(block, *args, use_reentrant=False, context_fn=_ATTENTION_KEPT, **kwargs)


_SMALLEST = 1 << 20  # bytes; smaller tensors stay where they are
_PREFETCH = 2  # tensors on their way back while one is used: a double block of FLUX has two inputs


@dataclass(eq=False)
class _Offloaded:
    """A tensor in host memory, ``index`` in the order of offloading; the events tell when each copy is through."""

    host: Tensor
    index: int
    copied_out: torch.cuda.Event | None = None
    on_device: Tensor | None = None  # brought back
    copied_back: torch.cuda.Event | None = None


class HostOffload:
    """Saved-tensor hooks that hold tensors of ``device`` in host memory from forward to backward.

    On a GPU a tensor is copied out on a side stream while the next block computes, into pinned memory, and its device
    memory is free once nothing else holds it. Backward wants tensors in the opposite order: when one is asked for, the
    copies of those before it begin. The host waits for nothing. On a CPU the same code copies at once.
    """

    def __init__(self, device: torch.device, smallest: int = _SMALLEST) -> None:
        self.device, self.smallest = device, smallest
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._offloaded: WeakValueDictionary[int, _Offloaded] = WeakValueDictionary()  # the graph holds them
        self._next = 0

    def pack(self, tensor: Tensor) -> Tensor | _Offloaded:
        """Begin to copy ``tensor`` out; return its placeholder. Parameters and small tensors stay."""
        if isinstance(tensor, nn.Parameter) or tensor.device.type != self.device.type or tensor.nbytes < self.smallest:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._stream is not None)
        entry = _Offloaded(host, self._next)
        self._next += 1
        self._offloaded[entry.index] = entry
        if self._stream is None:
            host.copy_(tensor)
            return entry
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            entry.copied_out = torch.cuda.Event()
            entry.copied_out.record(self._stream)
        tensor.record_stream(self._stream)  # its memory is not reused before the copy is through
        return entry

    def unpack(self, entry: Tensor | _Offloaded) -> Tensor:
        """Return the tensor on the device again, and prefetch those that backward wants next."""
        if isinstance(entry, Tensor):
            return entry
        self._offloaded.pop(entry.index, None)
        self._copy_back(entry)
        for index in range(entry.index - 1, entry.index - 1 - _PREFETCH, -1):
            if index in self._offloaded:
                self._copy_back(self._offloaded[index])
        assert entry.on_device is not None
        if entry.copied_back is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(entry.copied_back)
            entry.on_device.record_stream(current)
        tensor, entry.on_device = entry.on_device, None  # asked for again (retain_graph), it is copied once more
        return tensor

    def _copy_back(self, entry: _Offloaded) -> None:
        if entry.on_device is not None:
            return
        if self._stream is None:
            entry.on_device = entry.host.clone()
            return
        assert entry.copied_out is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(entry.copied_out)
            entry.on_device = torch.empty_like(entry.host, device=self.device)
            entry.on_device.copy_(entry.host, non_blocking=True)
            entry.copied_back = torch.cuda.Event()
            entry.copied_back.record(self._stream)


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Inside the block nothing is recorded, and every submodule is in eval mode; then it is in its own again."""
    training = [child for module in modules for child in module.modules() if child.training]

    def train() -> None:
        for child in training:
            child.training = True

    with undone("the layers' eval mode", train):
        for module in modules:
            module.eval()
        with torch.no_grad():
            yield
