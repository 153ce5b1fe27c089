"""What a LoRA left in a served weight: how much of the layer's update, or another one in its place.

The update D of a layer is looked for in E = S - W, the served weight less the reference's as rounded without it:

    share = <E, D> / <D, D>      its standard error, from the rounding's noise: rms(E - share D) / |D|

The share is one where the merge was right, 0 where the update is missing, -1 where its sign is flipped, and alpha /
rank's inverse where that was forgotten. Where it is off, the updates of other layers of that shape are tried, and the
layer's own transposed (which is also what the product is with "up" and "down" exchanged): the one that takes most of E
away, and clearly more than the layer's own does, is what was merged. A factor of the whole weight is taken out first,
for rounding keeps <S, W>.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from library.fidelity.grids import SURE, dot, gain_of, relative
from library.precision.parity.layer_errors import update_retention
from networks.files.weights import AddedWeights

_CLEARLY = 2.0  # times what the layer's own update takes away; updates of layers with the same inputs are alike
_ROWS = 512  # that are looked at of another layer's update

Nearest = Callable[[Tensor], Tensor]
Moved = tuple[str, str, Tensor]  # a key of CAUSES, words, and the update that is in the weight, at its share


@dataclass(frozen=True)
class Share:
    """How much of an update is in a weight.

    Attributes:
        share: of the update. doubt: its standard error. gain: of the whole weight, 1 where it is not clearly another.
        kept: share that is left in the mean when the whole update is merged into the weight's own numbers.
        once: the weight is nearer to the reference with that share, rounded once, than to such a merge.
    """

    share: float
    doubt: float
    gain: float = 1.0
    kept: float | None = None
    once: bool = False


def share_in(numbers: Tensor, high: Tensor, base: Tensor, delta: Tensor, expected: float) -> Share:
    """Return which share of ``delta`` [out, in] is in ``numbers`` beyond ``base``, ``high`` or what it is rounded to.

    ``expected``: relative error of rounding to nearest, which takes up to its square off the whole weight.
    """
    size = dot(delta, delta)
    beside = high - dot(high, delta) / size * delta  # what a share of the update does not change
    gain = gain_of(numbers, beside) / (gain_of(base, beside) or 1.0)
    noise = 1.5 * expected**2 + SURE * expected / math.sqrt(delta.numel())
    gain = gain if abs(gain - 1) > 0.006 + noise and abs(gain) > 0.01 else 1.0
    change = numbers / gain - base
    share = dot(change, delta) / size
    left = change - share * delta
    return Share(share, math.sqrt(dot(left, left) / size / delta.numel()), gain)


def with_merge(found: Share, numbers: Tensor, high: Tensor, base: Tensor, delta: Tensor, nearest: Nearest) -> Share:
    """Add to ``found`` what a merge does to the update, and whether it was one; ``nearest`` rounds to the format."""
    in_file, numbers = nearest(base + delta), numbers / found.gain
    at_share, right = nearest(high + found.share * delta), nearest(high + delta)
    far = [relative(numbers, each) for each in (at_share, in_file, right)]
    return replace(found, kept=update_retention(in_file, base, delta).gain, once=far[0] < 0.98 * min(far[1:]))


def moved_update(change: Tensor, delta: Tensor | None, others: Mapping[str, AddedWeights]) -> Moved | None:
    """Return which other update explains ``change`` = S - W [out, in] much better than the layer's own ``delta``.

    ``others``: updates of other layers, of which those of its shape are tried, by some rows.
    """
    rows = torch.arange(0, len(change), max(1, len(change) // _ROWS))
    part = change[rows]
    energy = dot(part, part)
    most = 0.0 if delta is None else _CLEARLY * _taken(part, delta[rows])[1]
    best: tuple[str, str, Callable[[Tensor], Tensor]] | None = None
    for cause, words, update in _candidates(delta, others, change.shape):
        share, taken = _taken(part, update(rows))
        if abs(share) > 0.2 and taken > most + SURE**2 * max(energy - taken, 0.0) / part.numel():
            best, most = (cause, f"holds {share:.2f} of {words}", update), taken
    if best is None:
        return None
    held = best[2](torch.arange(len(change)))
    return best[0], best[1], _taken(change, held)[0] * held


def _taken(change: Tensor, update: Tensor) -> tuple[float, float]:
    """Return the share of ``update`` in ``change``, and how much of its square that takes away."""
    size = dot(update, update)
    share = dot(change, update) / size if size else 0.0
    return share, share**2 * size


def _candidates(
    delta: Tensor | None, others: Mapping[str, AddedWeights], shape: torch.Size
) -> Iterator[tuple[str, str, Callable[[Tensor], Tensor]]]:
    """Yield cause, words, and what gives some rows of the update."""
    if delta is not None:
        for turned in (delta.reshape(delta.shape[::-1]).t(), delta.t().reshape(delta.shape)):
            yield "lora_transposed", "its update transposed", turned.__getitem__
        if len(delta) % 2 == 0:
            yield "lora_moved", "its update with the halves exchanged", delta.roll(len(delta) // 2, 0).__getitem__
    for name, other in others.items():
        if tuple(other.shape) == tuple(shape):
            yield "lora_moved", f"the update of {name}", partial(_rows_of, other)


def _rows_of(update: AddedWeights, rows: Tensor) -> Tensor:
    return update.of_rows(rows).delta().cpu().float()  # type: ignore[attr-defined]
