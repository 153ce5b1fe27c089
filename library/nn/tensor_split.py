"""A linear layer of which each process of a group has a part: tensor parallelism.

Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053:

    by outputs (dim 0)   y_r = x W_r^T            x is whole, y is a part; the gradient of x is summed over the group
    by inputs  (dim 1)   y = sum_r x_r W_r^T      x is a part, y is summed over the group; its gradient is whole

A pair of the two, q, k and v before and the projection after an attention, works on parts in between and has to be
summed once forward and once backward. The weight of a layer may be several matrices side by side (q, k and v in one;
what attention and an MLP give, concatenated): each is split by itself, so that the parts of a process belong together.
Where the output is small, as that of a modulation is, and needed whole, it is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Parts(NamedTuple):
    """How a linear layer is split; see :class:`Split`."""

    dim: Literal[0, 1]
    blocks: tuple[int, ...]
    gathered: bool = False


@dataclass(frozen=True)
class Split:
    """Which part of a linear layer this process has.

    Attributes:
        dim: of the weight [out, in] that is split: 0 for outputs, 1 for inputs.
        blocks: sizes of the matrices that stand side by side along it; the group's size divides each.
        gathered: of a layer split by outputs, whether it gives the whole output everywhere.
        group: the processes that have the layer together.
    """

    dim: Literal[0, 1]
    blocks: tuple[int, ...]
    gathered: bool
    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Processes of the group."""
        return self.group.size()

    def local(self, full: Tensor, dim: int) -> Tensor:
        """Return this process's part of ``full`` along ``dim``; differentiable, a view if there is one block."""
        parts = [full.narrow(dim, start, count) for start, count in self.pieces(self.group.rank())]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    @torch.no_grad()
    def gather(self, local: Tensor, dim: int) -> Tensor:
        """Return the tensor of which every process gives its ``local`` part along ``dim``; collective."""
        parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, local.contiguous(), group=self.group)
        pieces = [part.split([count // self.size for count in self.blocks], dim) for part in parts]
        return torch.cat([piece for block in zip(*pieces, strict=True) for piece in block], dim)

    def pieces(self, rank: int) -> list[tuple[int, int]]:
        """Return (start, length) of each block's part."""
        found, start = list[tuple[int, int]](), 0
        for block in self.blocks:
            found.append((start + rank * (block // self.size), block // self.size))
            start += block
        return found


def sum_over(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    """Return ``tensor``, contiguous and nobody else's, with the group's sum in it; not recorded by autograd."""
    dist.all_reduce(tensor, group=group)
    return tensor


def entering(x: Tensor, split: Split | None) -> Tensor:
    """Return ``x``, the input of layers so split; the gradient of a whole one is the sum over the group."""
    return x if split is None or split.dim == 1 else _Entering.apply(x, split.group)


def leaving(y: Tensor, split: Split | None) -> Tensor:
    """Return what a layer so split gives, of ``y`` that this process's part gives: the sum over the group, or a part.

    Or, gathered, all parts side by side.
    """
    if split is None:
        return y
    return summed(y, split.group) if split.dim == 1 else gathering(y, split)


def summed(y: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of ``y`` over the group, whose gradient is whole on every process."""
    return _Leaving.apply(y, group)


def gathering(y: Tensor, split: Split | None) -> Tensor:
    """Return the whole of which ``y`` is a part if a layer so split gives that, else ``y``."""
    return y if split is None or not split.gathered else _Gathering.apply(y, split)


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return sum_over(ctx.group, gradients[0].clone(memory_format=torch.contiguous_format)), None


class _Leaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: dist.ProcessGroup) -> Tensor:
        return sum_over(group, y.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gathering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return split.gather(y, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.split.local(gradients[0], -1).contiguous(), None
