"""What an error of one layer's weight does to its outputs, what a merge leaves of a LoRA, and what makes up for both.

*Output error.* With rows x of inputs, or their second moment C, and a weight error E [out, in]:

    |error|^2 = mean |x E^T|^2 = trace(E C E^T)        relative to mean |x W^T|^2 = trace(W C W^T)

Rows that nothing was fitted to give an honest measure; the moment is what is minimised.

*Update retention*: how much of a LoRA's update D is left after a merge into fp8, with M the merged weight and B the
weight without the update as it is served, both dequantised:

    gain   = <M - B, D> / |D|^2              1: all of it, 0: nothing, the share that acts as the update did
    cosine = <M - B, D> / (|M - B| |D|)      1: nothing else was changed; rounding noise makes it small
    output gain = <(M - B) C, D> / <D C, D>  the gain of what it does to the outputs

An entry of D survives rounding to nearest only if it takes the weight past the middle of a step. Below 2^-6 the step of
e4m3fn is fixed at 2^-9, so in a plain-cast file with weights of std 0.02 an update of 1 % vanishes whole. All are exact
sums over all entries, in float64.

*Low-rank residual correction*: B [out, r] and A [r, in] that minimise E|x (T - B A)^T|^2 =
trace((T - B A) C (T - B A)^T), with T [out, in] the error to undo. This is reduced-rank regression. With C = L L^T the
best B A L is the truncated SVD of T L (Eckart-Young); its left factor U are the r leading eigenvectors of T C T^T, and

    B = U,   A = U^T T L L^-1 = U^T T

so neither a root nor an inverse of C is needed. QERA (https://arxiv.org/abs/2410.06040, theorem 1) gives this solution
with C^(1/2) for quantisation errors; refitting a LoRA puts the LoRA's own update into T. With A given (EoRA, LoftQ and
others fit one side at a time) the best B is least squares, B = T C A^T (A C A^T)^-1. Large layers find U by subspace
iteration, whose error is in directions that matter least: T C T^T is never formed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.nn.frozen_linear import FrozenLinear
from library.precision.linear import QuantizedLinear
from library.precision.parity.activations import LayerInputs
from library.randomness import generator


def output_energy(weight: Tensor, inputs: LayerInputs) -> float:
    """Return the mean squared length of ``x @ weight.T``: over the held-out rows, or by the moment without any."""
    if inputs.rows.shape[0]:
        return float((inputs.rows @ weight.float().t()).double().square().sum()) / inputs.rows.shape[0]
    return moment_energy(weight, inputs.moment)


def moment_energy(weight: Tensor, moment: Tensor) -> float:
    """Return ``trace(weight @ moment @ weight.T)``; never below 0."""
    weight = weight.to(moment.dtype)
    return max(0.0, float((weight @ moment).mul_(weight).double().sum()))


def relative_output_error(error: Tensor, weight: Tensor, inputs: LayerInputs) -> float:
    """Return the rms of ``x @ error.T`` over that of ``x @ weight.T``; 0 of 0 is 0."""
    energy = output_energy(error, inputs)
    return math.sqrt(energy / output_energy(weight, inputs)) if energy else 0.0


DAMPING = 0.01


def damped(moment: Tensor, damping: float, dtype: torch.dtype) -> Tensor:
    """Return ``moment`` in ``dtype`` plus ``damping`` times its mean diagonal on the diagonal.

    GPTQ's way (https://arxiv.org/abs/2210.17323, section 3.3): directions that the calibration has hardly seen count
    like inputs of that size, so that nothing is fitted to the sample's noise. A moment of zeros becomes the identity.
    """
    result = moment.to(dtype, copy=True)
    mean = float(result.diagonal().mean())
    result.diagonal().add_(damping * mean if mean > 0 else 1.0)
    return result


FLAGGED = 0.95  # below that an update has lost enough to be seen

_CHUNK = 1 << 22  # entries turned into float64 at a time


@dataclass(frozen=True)
class UpdateRetention:
    """What a merge left of an update; see the module's first lines."""

    gain: float
    cosine: float
    output_gain: float | None = None  # None without a moment, or where the update does nothing to the outputs

    @property
    def flagged(self) -> bool:
        """Whether less than 0.95 is left, of the effect on outputs where that is known."""
        return (self.gain if self.output_gain is None else self.output_gain) < FLAGGED


def update_retention(merged: Tensor, base: Tensor, update: Tensor, moment: Tensor | None = None) -> UpdateRetention:
    """Return what is left of ``update`` in ``merged``, all [out, in]; of an update of zeros everything is left.

    Args:
        merged: the merged weight, dequantised.
        base: the weight without the update as it is served, dequantised.
        update: what was to be added.
        moment: [in, in], second moment of the inputs, for the output gain.
    """
    inner = change_energy = update_energy = crossed = effect = 0.0
    rows = max(1, _CHUNK // merged.shape[1])
    for start in range(0, merged.shape[0], rows):
        chunk = slice(start, start + rows)
        change = merged[chunk].double() - base[chunk].double()
        wanted = update[chunk].double()
        inner += float((change * wanted).sum())
        change_energy += float(change.square().sum())
        update_energy += float(wanted.square().sum())
        if moment is not None:
            metered = (update[chunk].to(moment) @ moment).double()
            crossed += float((change * metered).sum())
            effect += float((wanted * metered).sum())
    if update_energy == 0:
        return UpdateRetention(1.0, 1.0)
    cosine = inner / math.sqrt(change_energy * update_energy) if change_energy else 0.0
    return UpdateRetention(inner / update_energy, cosine, crossed / effect if effect > 0 else None)


@contextmanager
def replaced(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Run ``model`` with other ``tensors``, by the names of its parameters and buffers, inside the block.

    A quantised weight [out, in] becomes one in the dtype it is given in; what a layer is wrapped in (a LoRA, rounding
    of its inputs) stays around it.
    """
    layers: dict[str, nn.Module] = {}
    values: list[tuple[Tensor, Tensor]] = []
    try:
        for name, tensor in tensors.items():
            path, _, leaf = name.rpartition(".")
            while isinstance(getattr(model.get_submodule(path), "base", None), nn.Module):
                path += ".base"
            owner: Any = model.get_submodule(path)
            if leaf == "weight" and isinstance(owner, QuantizedLinear):
                layers[path] = owner
                model.set_submodule(path, _with_weight(owner, tensor))
            else:
                old = getattr(owner, leaf)
                values.append((old, old.data))
                old.data = tensor.to(old.dtype).to(old.device)
        yield
    finally:
        for old, data in values:
            old.data = data
        for path, layer in layers.items():
            model.set_submodule(path, layer)


def _with_weight(layer: nn.Module, weight: Tensor) -> nn.Module:
    bias = getattr(layer, "bias", None)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return FrozenLinear.adopt(linear)


_EXACT = 256  # rows up to which all eigenvectors are computed, in 20 ms; 768 take 0.3 s, 3072 take 20 s
_ITERATIONS, _OVERSAMPLING = 12, 32


def fit_low_rank(target: Tensor, moment: Tensor, rank: int, damping: float = DAMPING) -> tuple[Tensor, Tensor]:
    """Return (up [out, rank], down [rank, in]), fp32, whose product is nearest to ``target`` on the inputs.

    Args:
        target: [out, in], what is to be made up for.
        moment: [in, in], second moment of the inputs.
        rank: at most min(out, in); columns beyond it are zero.
        damping: see ``errors.damped``.
    """
    out_features, in_features = target.shape
    exact = out_features <= _EXACT
    dtype = torch.float64 if exact else torch.float32
    target, metric = target.to(dtype), damped(moment, damping, dtype)
    possible = min(rank, out_features, in_features)
    leading = _eigenvectors(target, metric, possible) if exact else _by_iteration(target, metric, possible)
    down = leading.t() @ target
    # Both factors of the same size, as an SVD shared between them: the files' dtypes round both alike.
    sizes = down.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny).sqrt()
    up, down = leading * sizes, down / sizes.unsqueeze(1)
    missing = rank - possible
    return F.pad(up, (0, missing)).float(), F.pad(down, (0, 0, 0, missing)).float()


def fit_up(target: Tensor, moment: Tensor, down: Tensor, damping: float = DAMPING) -> Tensor:
    """Return the up-projection [out, rank], fp32, that with ``down`` [rank, in] is nearest to ``target`` [out, in]."""
    metric = damped(moment, damping, torch.float32)
    metered = down.float() @ metric  # [rank, in]
    gram = (metered @ down.float().t()).double()
    gram.diagonal().add_(1e-10 * gram.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny))
    crossed = (target.float() @ metered.t()).double()
    return torch.linalg.solve(gram, crossed.t()).t().float()


def _eigenvectors(target: Tensor, metric: Tensor, count: int) -> Tensor:
    """Return the leading eigenvectors of target metric target^T, [out, count]."""
    gram = target @ metric @ target.t()
    return torch.linalg.eigh(gram + gram.t()).eigenvectors.flip(1)[:, :count]


def _by_iteration(target: Tensor, metric: Tensor, count: int) -> Tensor:
    """The same, by subspace iteration with a few spare columns (Halko et al. 2011, algorithm 4.4)."""
    columns = min(count + _OVERSAMPLING, *target.shape)
    start = torch.randn(target.shape[0], columns, generator=generator("subspace", *target.shape))
    basis = torch.linalg.qr(start.to(target.device)).Q
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(target @ (metric @ (target.t() @ basis))).Q
    projected = basis.t() @ target
    small = (projected @ metric @ projected.t()).double()
    within = torch.linalg.eigh(small + small.t()).eigenvectors.flip(1)[:, :count]
    return basis @ within.to(basis.dtype)
