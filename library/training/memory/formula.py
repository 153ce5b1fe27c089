"""What a LoRA's step on an image model takes, by a formula: where a step cannot be traced, or before it is.

The formula may be off by 20 %. :func:`model_numbers` counts weights on the meta device, and what a block keeps for the
backward pass in one step of a shallow model on fake tensors, which needs no compiler and no card. :func:`step_parts` is
the arithmetic.

Not in it: the CUDA context, what the allocator loses, what a LoRA's update copies, sampling, validation, encoders.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from library.config.schema import NetworkConfig
from library.models.family import Family
from library.precision.recipe import Recipe
from library.training.memory.block_swap import replace_tensors, swappable
from networks.network import inject_adapter
from networks.options import parse_network_args

_FEW = 2  # blocks of a kind in the shallow model


@dataclass(frozen=True)
class BlockKind:
    """Blocks of one kind."""

    count: int
    kept: int  # bytes that one keeps for the backward pass of a batch of one
    inputs: int  # bytes of what goes in, kept instead where blocks are recomputed


@dataclass(frozen=True)
class ModelNumbers:
    """A model and its step on a batch of one.

    Attributes:
        weights: without the LoRA's.
        matrices: of the weights, those that ``fp8_scaled`` makes fp8.
        lora: numbers of the LoRA.
        swappable: how many blocks may be swapped, and the weights of the largest.
        blocks: of each kind.
        rest: bytes of the step's highest point that no block keeps: outside of the blocks, and for a moment.
    """

    weights: int
    matrices: int
    lora: int
    swappable: tuple[int, int]
    blocks: tuple[BlockKind, ...]
    rest: int


@dataclass(frozen=True)
class StepOptions:
    """What a step is, besides its model."""

    fp8: bool = False  # the base's matrices in fp8
    checkpointing: bool = False
    batch: int = 1
    base_bytes: int = 2  # of a frozen weight
    lora_bytes: int = 4  # of a LoRA's weight
    optimizer_bytes: int = 8  # of state for each trained number; AdamW's two moments in fp32
    swapped: int = 0  # blocks whose weights wait in host memory
    inputs_on_host: bool = False  # of recomputed blocks
    kept: int = 0  # bytes of activations that recomputed blocks keep all the same


def model_numbers(
    family: type[Family],
    arguments: Mapping[str, Any],
    tokens: tuple[int, int],
    rank: int,
    base: torch.dtype = torch.bfloat16,
    autocast: bool = True,
) -> ModelNumbers:
    """Return what a model of ``family`` takes.

    Args:
        arguments: of the transformer's class.
        tokens: of an image (1024 x 1024 pixels are 4096), and of a caption.
        rank: of the LoRA.
        base: dtype of the weights.
        autocast: to 16 bits; without it the weights' dtype is computed in, which must be fp32.
    """
    with torch.device("meta"):
        model, lora = _model(family, arguments, base, rank)
        shallow, _ = _model(family, arguments, base, rank, most_blocks=_FEW)
    sizes = {name: p.numel() for name, p in model.named_parameters() if id(p) not in lora}
    recipe, linear = Recipe(), [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    matrices = {f"{name}.weight" for name in linear if not recipe.excluded_as(name.removesuffix(".base"))}
    with FakeTensorMode(allow_non_fake_inputs=True):
        # fake tensors of the CPU in the place of meta ones, which know no autocast
        replace_tensors(shallow, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
        inputs = family.example_inputs(shallow.config, *tokens)
        step, rest = _step_bytes(shallow, family.blocks(shallow), inputs, autocast)
    most, largest = swappable(family.blocks(model))
    counts = Counter(type(block).__name__ for block in family.blocks(model))
    return ModelNumbers(
        weights=sum(sizes.values()),
        matrices=sum(sizes[name] for name in matrices if name in sizes),
        lora=sum(lora.values()),
        swappable=(most, largest // base.itemsize),
        blocks=tuple(BlockKind(count, *step[kind]) for kind, count in counts.items()),
        rest=rest,
    )


def _model(
    family: type[Family], arguments: Mapping[str, Any], base: torch.dtype, rank: int, most_blocks: int | None = None
) -> tuple[Any, dict[int, int]]:
    """Return the model, of ``most_blocks`` of each kind, and how many numbers each weight of its LoRA has, by id."""
    torch.set_default_dtype(base)
    try:
        model = family.build(arguments, most_blocks)
    finally:
        torch.set_default_dtype(torch.float32)
    options = parse_network_args(NetworkConfig(network_dim=rank, network_alpha=rank), family.targets)
    network = inject_adapter(model, options, family.targets, seed=0)
    return model, {id(p): p.numel() for p in network.parameters()}


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations have made and that are still there.

    ``torch.distributed._tools.MemTracker`` does not do: it hooks the gradient of every parameter and raises on a frozen
    one (PyTorch 2.13).
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, operation: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage._cdata)
        return result

    def _freed(self, storage: int) -> None:
        self.now -= self._sizes.pop(storage)


def _step_bytes(
    model: nn.Module, blocks: list[nn.Module], inputs: dict[str, Any], autocast: bool
) -> tuple[dict[str, tuple[int, int]], int]:
    """Return the bytes that a block of each kind keeps and gets, and those of the highest point that none keeps.

    A forward and a backward pass; gradients of weights are there already, as in every step but the first.

    Args:
        model, blocks, inputs: of fake tensors.
        autocast: to 16 bits.
    """
    found, before = dict[str, tuple[int, int]](), list[int]()

    def enter(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        before.append(live.now)

    def leave(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], _: Any) -> None:
        streams = {id(t): t for t in (*arguments, *named.values()) if isinstance(t, Tensor) and t.requires_grad}
        kept, got = live.now - before[-1], sum(t.nbytes for t in streams.values())
        found[type(module).__name__] = max((kept, got), found.get(type(module).__name__, (0, 0)))

    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    for block in blocks:
        block.register_forward_pre_hook(enter, with_kwargs=True)
        block.register_forward_hook(leave, with_kwargs=True)
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    with _LiveBytes((*model.parameters(), *model.buffers(), *gradients)) as live:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = tree_leaves(model.train()(**inputs))[0]
        loss = output.float().square().mean()
        del output
        loss.backward()
    of_blocks = sum(found[type(block).__name__][0] for block in blocks)
    return found, max(0, live.peak - of_blocks)


def step_parts(model: ModelNumbers, options: StepOptions) -> dict[str, int]:
    """Return what is held at the highest point of a step: bytes by part; ``weights`` are the frozen ones."""
    in_fp8 = model.matrices * (options.base_bytes - 1) if options.fp8 else 0
    weights = model.weights * options.base_bytes - in_fp8
    most, largest = model.swappable
    lora = model.lora * options.lora_bytes
    return {
        "weights": round(weights * (1 - min(options.swapped, most) * largest / model.weights)),
        "LoRA": lora,
        "gradients": lora,
        "optimizer": model.lora * options.optimizer_bytes,
        "activations": _activations(model, options),
    }


def _activations(model: ModelNumbers, options: StepOptions) -> int:
    """Return what is kept for backward, with what the largest block keeps while it is recomputed."""
    kept, recomputed = sum(kind.count * kind.kept for kind in model.blocks), 0
    if options.checkpointing:
        inputs = sum(kind.count * kind.inputs for kind in model.blocks)
        recomputed = max(kind.kept for kind in model.blocks)
        kept = min(kept, (0 if options.inputs_on_host else inputs) + options.kept // options.batch)
    return options.batch * (kept + recomputed + model.rest)
