"""``blocks_to_swap``: keep the frozen weights of some transformer blocks in host memory, copy them in as they run.

The frozen weights never change, so data goes one way only. Every swapped block has its *home* in (pinned) host
memory; a *ring* of two slots on the device takes whichever blocks run now and next. While a block computes, a side
stream copies the one that follows into the slot of the one that came before: upwards in forward, downwards in
backward. Nothing is copied back, and nothing at the turn from forward to backward or from a step to the next, since
the blocks of the turn lie in the ring already. LoRA weights, biases, norms and all else stay on the device.

    home      0   1   2   3   4 ...      host, one buffer a block
                  |   |
    ring        [ 1 ][ 2 ]               device: 1 computes, 2 arrives; then 3 goes where 1 was

*Counting.* N is that of the kohya trainers: with N swapped, the device holds as many blocks as there are minus N, the
ring included. Where a model has several kinds of blocks, N is shared evenly among them, counted in blocks of the
largest kind: of FLUX (19 double, 38 single, a double 2.4 times as large as a single) N // 2 double blocks and 2 (N - N
// 2) single ones leave the device; two of each kind stay, so FLUX's largest N is 35. Swapped blocks are spread evenly
among those that stay: those compute while a copy is under way.

*How a block finds its weights.* Parameters stay the same objects; ``.data`` points to the slot while the block is in
the ring and to its home otherwise, so names, state dicts and saving see all weights at all times. What must never
happen is that autograd keeps the slot's memory for backward. LoRA layers and ``FrozenLinear`` (put in for the other
linear layers of a swapped block) ask for the weight again in backward, ``QuantizedLinear`` keeps the parameter object.

*Streams.* The copy waits for an event on the compute stream, recorded when everything that reads the slot had been
queued; the compute stream waits for the copy's event before a block runs. The host waits for neither. On a CPU the
same code copies at once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from library.errors import UserError
from library.nn.frozen_linear import FrozenLinear
from library.training.memory.budget import GIB

RING = 2  # slots: the block that runs and the one that arrives
_ALIGNMENT = 256  # bytes; what the CUDA allocator gives, and more than any kernel asks for
_SMALLEST = 1 << 16  # bytes; smaller tensors (biases, norms) stay on the device


def swap_blocks(model: nn.Module, blocks: Sequence[nn.Module], swapped: int, device: torch.device) -> list[Ring]:
    """Place ``model``, which lies on the CPU, on ``device``, but for the frozen weights of ``swapped`` blocks.

    Call it after LoRA injection and before anything wraps the model; do not move the model afterwards.

    Args:
        model: the transformer, on the CPU.
        blocks: its blocks in running order; blocks of one kind form one ring.
        swapped: N, in kohya's counting.
        device: where the model computes.

    Returns:
        A ring of each kind of block that is swapped.

    Raises:
        UserError: ``swapped`` is more than the model allows.
    """
    kinds = kinds_of(blocks)
    counts = swapped_per_kind(kind_sizes(blocks), swapped)
    chosen = [_spread(kind, count) for kind, count in zip(kinds, counts, strict=True)]
    for block in (block for ring in chosen for block in ring):
        _keep_weights_from_autograd(block)
    tensors = [[_movable(block) for block in ring] for ring in chosen]
    movable = {id(tensor) for ring in tensors for block in ring for tensor in block}
    replace_tensors(model, lambda tensor: tensor.detach().to(device), movable)
    return [Ring(ring, weights, device) for ring, weights in zip(chosen, tensors, strict=True) if ring]


def replace_tensors(model: nn.Module, made: Callable[[Tensor], Tensor], staying: Collection[int] = ()) -> None:
    """Put ``made(tensor)`` in the place of every parameter and buffer but those ``staying``, by identity."""
    new: dict[int, Tensor] = {}
    for module in model.modules():
        table: Any
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or id(tensor) in staying:
                    continue
                if id(tensor) not in new:
                    other = made(tensor)
                    trained = isinstance(tensor, nn.Parameter)
                    new[id(tensor)] = nn.Parameter(other, tensor.requires_grad) if trained else other
                table[name] = new[id(tensor)]


def describe_rings(rings: Sequence[Ring]) -> str:
    """Say how many blocks and bytes lie in host memory."""
    homes = [home.nbytes for ring in rings for home in ring.homes]
    slots = sum(slot.nbytes for ring in rings for slot in ring.slots)
    host = f"{len(homes)} blocks ({sum(homes) / GIB:.1f} GiB) in host memory"
    return f"block swap: {host}, ring of {slots / GIB:.1f} GiB on the device"


def swapped_per_kind(sizes: Sequence[tuple[int, int]], swapped: int) -> list[int]:
    """Return how many blocks of each kind leave the device; ``sizes`` as of :func:`kind_sizes`.

    Raises:
        UserError: less than the ring would be left of a kind; the message names the largest possible number.
    """
    most = most_swapped(sizes)
    if swapped > most:
        raise UserError(f"blocks_to_swap: {swapped} is more than this model allows; set at most {most}")
    return _shares(swapped, sizes)


def most_swapped(sizes: Sequence[tuple[int, int]]) -> int:
    """Return the largest N for which the ring is left of each kind."""
    return sum(most for _, most in _turns(sizes))


def kinds_of(blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return the blocks of each class, those of classes with the same tensors together, in running order."""
    tensors: dict[type[nn.Module], tuple[object, ...]] = {}
    kinds: dict[tuple[object, ...], list[nn.Module]] = {}
    for block in blocks:
        if type(block) not in tensors:
            tensors[type(block)] = tuple((tensor.dtype, tensor.shape) for tensor in _movable(block))
        kinds.setdefault(tensors[type(block)], []).append(block)
    return list(kinds.values())


def kind_sizes(blocks: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """Return of each kind how many blocks there are, and how many weights of one could move."""
    return [(len(kind), sum(tensor.numel() for tensor in _movable(kind[0]))) for kind in kinds_of(blocks)]


def swappable(blocks: Sequence[nn.Module]) -> tuple[int, int]:
    """Return how many of ``blocks`` may be swapped at most, and the bytes that each takes off the device."""
    largest = max(kinds_of(blocks), key=lambda kind: sum(tensor.numel() for tensor in _movable(kind[0])))
    return most_swapped(kind_sizes(blocks)), sum(tensor.nbytes for tensor in _movable(largest[0]))


def _shares(swapped: int, sizes: Sequence[tuple[int, int]]) -> list[int]:
    """Return N shared evenly among kinds, in blocks; what does not divide, or one has not, the last ones give."""
    turns = _turns(sizes)
    each, rest = divmod(swapped, len(sizes))
    wanted = [each + (kind >= len(sizes) - rest) for kind in range(len(sizes))]
    shares = [min(share, most) for share, (_, most) in zip(wanted, turns, strict=True)]
    for kind in reversed(range(len(sizes))):
        shares[kind] += min(swapped - sum(shares), turns[kind][1] - shares[kind])
    return [share * blocks for share, (blocks, _) in zip(shares, turns, strict=True)]


def _turns(sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return of each kind how many blocks it gives for one of the largest, and how often before its ring is left."""
    largest = max(weights for _, weights in sizes)
    several = [max(1, round(largest / max(1, weights))) for _, weights in sizes]
    return [(blocks, max(0, count - RING) // blocks) for blocks, (count, _) in zip(several, sizes, strict=True)]


class Ring:
    """Blocks of one kind that share two slots on the device.

    Attributes:
        homes: one host buffer of bytes a block.
        slots: device buffers of the same size.
        slot_blocks: which block each slot holds, or will hold once its copy is through.
        copies: how many blocks were copied to the device so far.
    """

    def __init__(self, blocks: Sequence[nn.Module], tensors: list[list[Tensor]], device: torch.device) -> None:
        """Move ``tensors`` (those of each block) into homes and set the hooks that follow the run."""
        layout, *others = (_layout(block) for block in tensors)
        assert all(each == layout for each in others), "blocks of a kind have the same tensors"
        self._tensors = tensors
        self._device, self._on_gpu = device, device.type == "cuda"
        self.homes, self._at_home = list[Tensor](), list[list[Tensor]]()
        # one after the other: a block's memory is free before the next's home
        for block, block_tensors in enumerate(tensors):
            self.homes.append(torch.empty(layout[-1][1], dtype=torch.uint8))
            self._at_home.append(_views(self.homes[block], block_tensors, layout))
            for view, tensor in zip(self._at_home[block], block_tensors, strict=True):
                view.copy_(tensor.data)
            self._point(block, self._at_home[block])
        if self._on_gpu:
            _lock_pages(self, self.homes)
        self.slots = [torch.empty_like(self.homes[0], device=device) for _ in range(RING)]
        self._in_slot = [_views(slot, tensors[0], layout) for slot in self.slots]
        self.slot_blocks: list[int | None] = [None] * RING
        self.copies = 0
        self._last, self._step = 0, 1  # the block that ran last, and the direction of the run
        self._stream: torch.cuda.Stream | None = None
        self._arrived: list[torch.cuda.Event] = []
        if self._on_gpu:
            self._stream = torch.cuda.Stream(device)
            self._arrived = [torch.cuda.Event() for _ in range(RING)]
            for slot in self.slots:
                slot.record_stream(self._stream)
        for block in range(RING):
            self._load(block, block)
        for index, module in enumerate(blocks):
            module.register_forward_pre_hook(functools.partial(_before_forward, self, index))
            module.register_forward_hook(functools.partial(_after_forward, self, index))

    def enter(self, block: int, forward_only: bool = False) -> None:
        """Let ``block`` run: its weights are on the device for all work queued from here on; send for the next one.

        Args:
            block: its place among the blocks of the ring.
            forward_only: no backward follows, so after the last block comes the first.
        """
        last = len(self.homes) - 1
        if block != self._last:
            self._step = 1 if block > self._last else -1
        if block in (0, last):  # from the ends the run can only turn
            self._step = 1 if block == 0 else -1
        self._last = block
        if block not in self.slot_blocks:
            self._load(block, self._slot_for(block))
        slot = self.slot_blocks.index(block)
        if self._on_gpu:
            torch.cuda.current_stream(self._device).wait_event(self._arrived[slot])
        self._point(block, self._in_slot[slot])
        following = 0 if forward_only and block == last else block + self._step
        if following not in self.slot_blocks:
            self._load(following, 1 - slot)

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Let the blocks' parameters be their homes inside, to be written to; the ring is filled again afterwards."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)  # nothing reads or fills a slot any more
        blocks = [block for block in self.slot_blocks if block is not None]
        self.slot_blocks = [None] * RING
        for block, views in enumerate(self._at_home):
            self._point(block, views)
        yield
        for slot, block in enumerate(blocks):
            self._load(block, slot)

    def _slot_for(self, block: int) -> int:
        """Return the slot whose block is farther from ``block``: the nearer one may be running still."""
        return max(range(RING), key=lambda slot: abs((self.slot_blocks[slot] or 0) - block))

    def _load(self, block: int, slot: int) -> None:
        """Queue the copy of ``block`` into ``slot``; the block there before goes home, which moves no bytes."""
        leaving = self.slot_blocks[slot]
        if leaving is not None:
            self._point(leaving, self._at_home[leaving])
        self.slot_blocks[slot] = None  # until its copy is queued: an error leaves no block with another's weights
        self._queue_copy(block, slot)
        self.slot_blocks[slot] = block
        self.copies += 1

    def _queue_copy(self, block: int, slot: int) -> None:
        if not self._on_gpu:
            self.slots[slot].copy_(self.homes[block])
            return
        read = torch.cuda.Event()
        read.record(torch.cuda.current_stream(self._device))  # whatever reads the slot so far is queued before this
        assert self._stream is not None
        self._stream.wait_event(read)
        with torch.cuda.stream(self._stream):
            self.slots[slot].copy_(self.homes[block], non_blocking=True)
            self._arrived[slot].record(self._stream)

    def _point(self, block: int, views: list[Tensor]) -> None:
        for tensor, view in zip(self._tensors[block], views, strict=True):
            _place(tensor, view)


def _place(tensor: Tensor, data: Tensor) -> None:
    """Let ``tensor`` have the memory of ``data``, on whichever device that is."""
    tensor.data = data
    if isinstance(tensor, FakeTensor):  # has a device of its own, which stays
        tensor.fake_device = data.device


def _before_forward(ring: Ring, block: int, module: nn.Module, inputs: Any) -> None:
    ring.enter(block, forward_only=not torch.is_grad_enabled())


def _after_forward(ring: Ring, block: int, module: nn.Module, inputs: Any, outputs: Any) -> Any:
    if not torch.is_grad_enabled():
        return outputs
    single = isinstance(outputs, Tensor)
    passed = _EnterInBackward.apply(ring, block, *((outputs,) if single else outputs))
    return passed[0] if single else passed


class _EnterInBackward(torch.autograd.Function):
    """Pass a block's outputs through; in backward, once all their gradients are there, let the block in."""

    @staticmethod
    def forward(ctx: Any, ring: Ring, block: int, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.ring, ctx.block = ring, block
        ctx.set_materialize_grads(False)
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.ring.enter(ctx.block)
        return None, None, *gradients


def _spread(blocks: list[nn.Module], count: int) -> list[nn.Module]:
    """Return the blocks that live in host memory: ``count`` off the device, and the ring's, spread evenly."""
    if count == 0:
        return []
    homes = count + RING
    return [blocks[(2 * i + 1) * len(blocks) // (2 * homes)] for i in range(homes)]


def _keep_weights_from_autograd(block: nn.Module) -> None:
    for name, module in list(block.named_modules()):
        if type(module) is nn.Linear and not module.weight.requires_grad:
            block.set_submodule(name, FrozenLinear.adopt(module))


def _movable(block: nn.Module) -> list[Tensor]:
    """Return the frozen weights of ``block`` that are worth moving: the large ones of its linear layers.

    A model so small that none is large has all its matrices moved.
    """
    matrices = [
        tensor
        for module in block.modules()
        if hasattr(module, "in_features") and hasattr(module, "out_features")
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if not tensor.requires_grad and tensor.ndim > 1
    ]
    return [tensor for tensor in matrices if tensor.nbytes >= _SMALLEST] or matrices


def _layout(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Return (start, end) in bytes of each tensor in its block's buffer."""
    places, at = [], 0
    for tensor in tensors:
        places.append((at, at + tensor.nbytes))
        at += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places


def _views(buffer: Tensor, tensors: list[Tensor], layout: list[tuple[int, int]]) -> list[Tensor]:
    pairs = zip(tensors, layout, strict=True)
    return [buffer[start:end].view(tensor.dtype).view(tensor.shape) for tensor, (start, end) in pairs]


def _lock_pages(owner: object, buffers: list[Tensor]) -> None:
    """Page-lock ``buffers`` as long as ``owner`` lives, so that copies from them run beside the host.

    They are registered where they lie: ``pin_memory`` would round each up to a power of two, up to twice the bytes.

    Raises:
        UserError: the system does not lock that much memory.
    """
    runtime: Any = torch.cuda.cudart()
    for buffer in buffers:
        if int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)) != 0:
            total = sum(each.nbytes for each in buffers)
            raise UserError(
                f"blocks_to_swap: {total / GIB:.1f} GiB of host memory cannot be page-locked; swap fewer blocks or "
                "raise the limit (ulimit -l)"
            )
        weakref.finalize(owner, runtime.cudaHostUnregister, buffer.data_ptr()).atexit = False
