"""Which layers are worth keeping in bf16, when the file may grow by so much.

What a layer contributes to the error of the model is measured by putting it alone back into high precision: the mean
squared change of the output, over the output's own. Rounding errors of different layers are independent, so these add
up to about the whole error, and a reference run of the bf16 model, which may not fit into memory, is not needed. A
layer costs one byte a weight more in bf16; by benefit for each byte they are taken until the budget is spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from library.nn.frozen_linear import FrozenLinear
from library.precision.parity.activations import replace_module


@dataclass(frozen=True)
class Candidate:
    """A layer, or several that a file stores as one tensor: the benefit of keeping it, and the bytes that costs."""

    name: str
    benefit: float
    extra_bytes: int

    @property
    def benefit_per_megabyte(self) -> float:
        """Benefit for each 2^20 bytes."""
        return self.benefit / (self.extra_bytes / 2**20)


def choose_kept(candidates: Iterable[Candidate], budget_bytes: int) -> list[Candidate]:
    """Return the candidates to keep, best per byte first; one that no longer fits is passed over, not the rest."""
    chosen: list[Candidate] = []
    left = budget_bytes
    for candidate in sorted(candidates, key=lambda c: (-c.benefit_per_megabyte, c.name)):
        if candidate.benefit > 0 and candidate.extra_bytes <= left:
            chosen.append(candidate)
            left -= candidate.extra_bytes
    return chosen


@torch.no_grad()
def measure_contributions(
    model: nn.Module,
    layers: Sequence[Sequence[str]],
    high_weight: Callable[[str], Tensor],
    outputs: Callable[[], Tensor],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[float]:
    """Return for each group of layers its share of the squared output, changed by putting it back to high precision.

    Args:
        model: quantised; it is left as it was.
        layers: module names, those that are kept or rounded together in one group.
        high_weight: returns a layer's weight [out, in] in high precision, in the dtype to compute in.
        outputs: runs the model on the calibration and returns what it gives, in one tensor.
        progress: called with (groups done, groups in all).
    """
    before = outputs().double()
    energy = float(before.square().sum())
    shares = []
    for number, names in enumerate(layers):
        replaced = {name: model.get_submodule(name) for name in names}
        try:
            for name, layer in replaced.items():
                replace_module(model, name, _with_weight(layer, high_weight(name)))
            change = outputs().double() - before
        finally:
            for name, layer in replaced.items():
                replace_module(model, name, layer)
        shares.append(float(change.square().sum()) / energy if energy else 0.0)
        progress(number + 1, len(layers))
    return shares


def _with_weight(layer: nn.Module, weight: Tensor) -> nn.Module:
    bias = getattr(layer, "bias", None)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return FrozenLinear.adopt(linear)
