"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864) in the two layouts in use.

A head of width D is D/2 pairs of numbers; the pair i of a token at position p is turned by the angle
p * frequency[i]. The layouts differ only in which numbers form a pair:

- *interleaved*: (0, 1), (2, 3), ... as in the paper; FLUX, Qwen-Image, the original Llama weights.
- *half-split*: (0, D/2), (1, D/2 + 1), ...; Llama as published for transformers.

:func:`half_split_order` is the permutation between them: weights permuted by it turn one form into the other,
and attention scores do not notice. Tables hold one cosine and one sine per pair, [S, D/2], in fp32; angles
are computed in float64, since at position 10^5 an fp32 angle has lost three digits. The rotation itself is
computed in fp32 and rounded once to the dtype of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Table = tuple[Tensor, Tensor]  # cos, sin: each [S, D/2], fp32


@dataclass(frozen=True)
class Llama31Scaling:
    """Llama 3.1's stretching of low frequencies; defaults are those of Llama 3.1 (3.2 uses factor 32).

    Wavelengths below ``original_context / high_frequency_factor`` stay, those above
    ``original_context / low_frequency_factor`` are stretched by ``factor``, those between blend linearly.
    """

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023, https://arxiv.org/abs/2306.15595): every frequency divided."""

    factor: float


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071): slow pairs stretched, fast ones kept.

    A pair that turns ``beta_fast`` times or more over ``original_context`` keeps its frequency, one that turns
    ``beta_slow`` times or less is divided by ``factor``; between, by the pair's number, they blend linearly.
    ``truncate`` widens that range to whole pairs. Queries and keys grow by ``attention_factor``, the paper's 0.1 ln(s)
    + 1 by default.
    """

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


RopeScaling = LinearScaling | YarnScaling | Llama31Scaling


def rope_frequencies(dim: int, theta: float = 10000.0, scaling: RopeScaling | None = None) -> Tensor:
    """Return theta^(-2i/dim) for each pair i, float64 [dim/2], changed by ``scaling``."""
    if dim % 2:
        raise ValueError(f"a rotary width must be even, not {dim}")
    # Written as 1 / theta^(2i/dim), the form of the published code, so that the last bit agrees too.
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    match scaling:
        case LinearScaling():
            return frequencies / scaling.factor
        case YarnScaling():
            kept = _kept_by_yarn(dim, theta, scaling)
        case Llama31Scaling():
            kept = _kept_by_llama(frequencies, scaling)
        case _:
            return frequencies
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def _kept_by_yarn(dim: int, theta: float, scaling: YarnScaling) -> Tensor:
    """Return how far each pair keeps its frequency, 1 to 0, float64 [dim/2]."""

    def pair_that_turns(times: float) -> float:
        return dim * math.log(scaling.original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    span = last - first or 0.001  # as published
    return 1.0 - ((torch.arange(dim // 2, dtype=torch.float64) - first) / span).clamp(0.0, 1.0)


def _kept_by_llama(frequencies: Tensor, scaling: Llama31Scaling) -> Tensor:
    """Return how much of each of ``frequencies`` [D/2] stays (``apply_scaling`` in meta-llama/llama-models)."""
    turns = scaling.original_context * frequencies / (2 * math.pi)  # turns made over the original context
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    return ((turns - scaling.low_frequency_factor) / span).clamp(0.0, 1.0)


def rope_table(positions: Tensor, frequencies: Tensor) -> Table:
    """Return (cos, sin), each fp32 [S, D/2], of ``positions`` [S] under ``frequencies`` [D/2]."""
    angles = torch.outer(positions.to(frequencies.dtype), frequencies)
    return angles.cos().float(), angles.sin().float()


def multi_axis_table(positions: Tensor, axes_dims: Sequence[int], theta: float = 10000.0) -> Table:
    """Return (cos, sin), each fp32 [S, sum(axes_dims)/2], for tokens at ``positions`` [S, axes].

    Each axis (FLUX: index, row, column) owns its own slice of the head, ``axes_dims[a]`` wide, with its own
    frequencies. Computed in float64 where the device has it (MPS has not: fp32).
    """
    device = positions.device
    precision = torch.float32 if device.type == "mps" else torch.float64
    with torch.device("cpu" if device.type == "mps" else device):
        frequencies = [rope_frequencies(dim, theta).to(device, precision) for dim in axes_dims]
    tables = [rope_table(positions[:, axis], each) for axis, each in enumerate(frequencies)]
    return torch.cat([cos for cos, _ in tables], dim=-1), torch.cat([sin for _, sin in tables], dim=-1)


class MultiAxisRope(nn.Module):
    """:func:`multi_axis_table` as a module without parameters, in place of diffusers' ``FluxPosEmbed``."""

    def __init__(self, axes_dims: Sequence[int], theta: float = 10000.0) -> None:
        super().__init__()
        self.axes_dims = tuple(axes_dims)
        self.theta = theta

    def forward(self, positions: Tensor) -> Table:
        """Return the table of ``positions`` [S, axes]."""
        return multi_axis_table(positions, self.axes_dims, self.theta)


class RopeTables:
    """Tables of the positions 0, 1, 2, ... for all layers of a model, made when needed and doubled when outgrown."""

    def __init__(self, dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        self.dim, self.theta, self.scaling = dim, theta, scaling
        self._tables: dict[torch.device, Table] = {}

    def table(self, length: int, device: torch.device) -> Table:
        """Return (cos, sin), each fp32 [at least ``length``, D/2], on ``device``."""
        known = self._tables.get(device)
        if known is None or known[0].shape[0] < length:
            known = self._tables[device] = self._made(1 << (length - 1).bit_length(), device)
        return known

    def _made(self, rows: int, device: torch.device) -> Table:
        """Return a table of ``rows`` positions."""
        # computed on the CPU: not every device has float64; kept for training too, which takes no inference tensors
        with torch.device("cpu"), torch.inference_mode(False):
            cos, sin = rope_table(torch.arange(rows), rope_frequencies(self.dim, self.theta, self.scaling))
            if isinstance(self.scaling, YarnScaling):
                cos, sin = cos * self.scaling.attention_factor, sin * self.scaling.attention_factor
            return cos.to(device), sin.to(device)


def _broadcast(table: Table) -> Table:
    """Insert the heads axis: [..., S, D/2] -> [..., S, 1, D/2] against x [B, S, H, D/2]."""
    return table[0].unsqueeze(-2), table[1].unsqueeze(-2)


def rotate_interleaved(x: Tensor, table: Table) -> Tensor:
    """Rotate neighbouring pairs of ``x`` [B, S, H, D] by ``table`` [S, D/2]; shape and dtype stay.

    A pair is a complex number and a turn is a product: one pass over memory instead of the five that slicing and
    stacking take (forward and backward of FLUX's 640 x 12 x 128 in fp32: 0.3 ms against 4.6 ms, one CPU core).
    Compilers fuse the written-out form and cannot generate complex code, so they get that one.
    """
    cos, sin = _broadcast(table)
    if torch.compiler.is_compiling():
        real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=-1)
        return turned.flatten(-2).to(x.dtype)
    return _Turn.apply(_turn_pairs, x, cos, sin)


class _Turn(torch.autograd.Function):
    """``turn(x, cos, sin)``; going back is turning the other way, so of all that only the table is kept."""

    @staticmethod
    def forward(ctx: Any, turn: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.turn = turn
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return None, ctx.turn(gradients[0], cos, -sin), None, None


def _turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format).unflatten(-1, (-1, 2))
    torch.view_as_complex(pairs).mul_(torch.complex(cos, sin))
    return pairs.flatten(-2).to(x.dtype)


def rotate_half_split(x: Tensor, table: Table) -> Tensor:
    """Rotate pairs (i, i + D/2) of ``x`` [B, S, H, D] by ``table``, [S, D/2] or [B, S, D/2]; shape and dtype stay."""
    cos, sin = _broadcast(table)
    if torch.compiler.is_compiling():
        real, imaginary = x.float().chunk(2, dim=-1)
        turned = torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=-1)
        return turned.to(x.dtype)
    return _Turn.apply(_turn_halves, x, cos, sin)


def _turn_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    real, imaginary = x.float().chunk(2, dim=-1)
    turned = x.new_empty(x.shape, dtype=torch.float32)
    first, second = turned.chunk(2, dim=-1)
    torch.mul(real, cos, out=first).addcmul_(imaginary, sin, value=-1)
    torch.mul(imaginary, cos, out=second).addcmul_(real, sin)
    return turned.to(x.dtype)


def turn_unevenly(x: Tensor, table: Table) -> Tensor:
    """Return ``x`` [B, S, H, D] with pairs (i, i + D/2) mixed by a table of whole heads, [S, D] or [B, S, D].

    ERNIE-Image was trained so: each angle stands twice in its table, as neighbours, and so the two numbers of a pair
    take different ones (``apply_rotary_emb`` in diffusers' ``transformer_ernie_image.py``). That is no rotation.
    """
    cos, sin = _broadcast(table)
    first, second = x.float().chunk(2, dim=-1)
    return torch.addcmul(torch.cat((-second, first), dim=-1) * sin, x.float(), cos).to(x.dtype)


def whole_head(table: Table) -> Table:
    """Return the half-split ``table`` of one token, [1, D/2] or [B, 1, D/2], in the form :func:`turn_token` takes."""
    cos, sin = table
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def turn_token(x: Tensor, table: Table) -> Tensor:
    """Rotate pairs (i, i + D/2) of ``x`` [B, H, D], one token a row, by a table of :func:`whole_head`; no gradient.

    The same as :func:`rotate_half_split` in three operations on the whole head: a decoding step makes them once a layer
    for each token, and there calling counts for more than computing.
    """
    cos, sin = table
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


def half_split_order(dim: int) -> Tensor:
    """Return the permutation [dim] that makes of interleaved ``x`` the half-split ``x[..., order]``."""
    return torch.cat((torch.arange(0, dim, 2), torch.arange(1, dim, 2)))
