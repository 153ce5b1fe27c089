"""A LoRA refitted to the base it will be served with, without training.

Trained beside the weight W, a LoRA's layer computes x (W + D)^T with D = scale * B A. Served on W_q, the same weight in
fp8, it computes x (W_q + D)^T. The update that comes nearest to the first on the second solves

    minimise  E |x (W + D - W_q - scale * B' A')^T|^2

in closed form at any rank (``library.precision.parity.layer_errors``). Tried are the LoRA as it is, B refitted beside
the same A, and both refitted, each with several dampings; what is best on rows of held-out calibration data is taken,
so a layer that has seen too few rows to be fitted keeps the LoRA it had. The rank, alpha / rank and with them every key
of the file stay. With a correction rank the rank grows by it: either the LoRA stays and a low-rank residual correction
of the rounding error is appended, or all is fitted at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from library.precision.parity.activations import LayerInputs
from library.precision.parity.layer_errors import fit_low_rank, fit_up, output_energy
from networks.files.weights import LoraWeights

_DAMPINGS = (0.01, 0.1, 1.0)


@dataclass(frozen=True)
class Refit:
    """One layer's update for the served weight.

    Attributes:
        weights: the chosen update; None where the layer has none and is not corrected.
        method: "kept", "B", "A and B", "remainder" or "all at once".
        before, after: rms error of the layer's output over the rms of the output wanted, with the LoRA as it was and
            with ``weights``; on held-out rows where there are any.
        effect: the LoRA's own share of the output, in the same measure.
    """

    weights: LoraWeights | None
    method: str
    before: float
    after: float
    effect: float


def refit_layer(
    lora: LoraWeights | None,
    weight: Tensor,
    served: Tensor,
    inputs: LayerInputs,
    *,
    correction_rank: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Refit:
    """Return the update that makes ``served`` compute what ``weight`` with ``lora`` computes.

    Args:
        lora: the layer's update; None for a layer without.
        weight: [out, in], that the LoRA was trained beside.
        served: [out, in], the dequantised weight it will be served with.
        inputs: of the layer, from ``collect_inputs``.
        correction_rank: rank to add; without one a layer that has no LoRA gets none.
        dtype: that the factors will be stored in; they are compared as rounded to it.
    """
    weight, served = weight.float(), served.float()
    update = torch.zeros_like(weight) if lora is None else lora.delta().to(weight.device)
    wanted = weight + update
    size = output_energy(wanted, inputs)

    def relative(error: Tensor) -> float:
        return (output_energy(error, inputs) / size) ** 0.5 if size else 0.0

    target = wanted - served
    before = relative(target - update)
    best = Refit(lora, "kept", before, before, relative(update))
    for method, candidate in _candidates(lora, target, update, inputs.moment, correction_rank):
        stored = LoraWeights(candidate.down.to(dtype), candidate.up.to(dtype), candidate.alpha)
        after = relative(target - stored.delta())
        if after < best.after:
            best = Refit(stored, method, before, after, best.effect)
    return best


def _candidates(
    lora: LoraWeights | None, target: Tensor, update: Tensor, moment: Tensor, correction_rank: int
) -> Iterator[tuple[str, LoraWeights]]:
    """Yield methods and what they give; ``target`` is what is wanted beside the served weight."""
    if lora is None and not correction_rank:
        return
    for damping in _DAMPINGS:
        if lora is None:
            yield "remainder", _scaled(*fit_low_rank(target, moment, correction_rank, damping), 1.0)
            continue
        joint = fit_low_rank(target, moment, lora.rank + correction_rank, damping)
        yield "all at once" if correction_rank else "A and B", _scaled(*joint, lora.scale)
        down, up = lora.down.to(target), lora.up.to(target)
        if correction_rank:
            more = _scaled(*fit_low_rank(target - update, moment, correction_rank, damping), lora.scale)
            up, down = torch.cat([up, more.up], dim=1), torch.cat([down, more.down])
            yield "remainder", LoraWeights(down, up, lora.scale * down.shape[0])
        else:
            yield "B", LoraWeights(down, fit_up(target, moment, down, damping) / lora.scale, lora.alpha)


def _scaled(up: Tensor, down: Tensor, scale: float) -> LoraWeights:
    """Return factors whose product times ``scale`` is ``up @ down``, with alpha / rank = ``scale``."""
    root = abs(scale) ** 0.5
    return LoraWeights(down / root, up * (root / scale), scale * down.shape[0])
