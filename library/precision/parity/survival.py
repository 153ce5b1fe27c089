"""How much of a LoRA's update is left after a merge into fp8.

    gain   = <M - B, D> / |D|^2              1: all of it, 0: nothing, the share that acts as the update did
    cosine = <M - B, D> / (|M - B| |D|)      1: nothing else was changed; rounding noise makes it small
    output gain = <(M - B) C, D> / <D C, D>  the gain of what it does to the outputs, C the inputs' second moment

with M the merged weight and B the weight without the update as it is served, both as the numbers they stand for, and D
the update. An entry of D survives rounding to nearest only if it takes the weight past the middle of a step. Below
2^-6 the step of e4m3fn is fixed at 2^-9, so in a plain-cast file with weights of std 0.02 an update of 1 % vanishes
whole. Both figures are exact sums over all entries, in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from library.precision.formats import Fp8Format, format_of
from library.precision.quantize import Quantized
from library.precision.recipe import Fp8Recipe

FLAGGED = 0.95  # below that an update has lost enough to be seen

_PIECE = 1 << 22  # entries turned into float64 at a time


@dataclass(frozen=True)
class Survival:
    """What a merge left of an update; see the module's first lines."""

    gain: float
    cosine: float
    output_gain: float | None = None  # None without a moment, or where the update does nothing to the outputs

    @property
    def flagged(self) -> bool:
        """Whether less than 0.95 is left, of the effect on outputs where that is known."""
        return (self.gain if self.output_gain is None else self.output_gain) < FLAGGED


def survival(merged: Tensor, base: Tensor, update: Tensor, moment: Tensor | None = None) -> Survival:
    """Return what is left of ``update`` in ``merged``, all [out, in]; of an update of zeros everything is left.

    Args:
        merged: the merged weight, dequantised.
        base: the weight without the update as it is served, dequantised.
        update: what was to be added.
        moment: [in, in], second moment of the inputs, for the output gain.
    """
    inner = change_energy = update_energy = seen = effect = 0.0
    rows = max(1, _PIECE // merged.shape[1])
    for start in range(0, merged.shape[0], rows):
        piece = slice(start, start + rows)
        change = merged[piece].double() - base[piece].double()
        wanted = update[piece].double()
        inner += float((change * wanted).sum())
        change_energy += float(change.square().sum())
        update_energy += float(wanted.square().sum())
        if moment is not None:
            metered = (update[piece].to(moment) @ moment).double()
            seen += float((change * metered).sum())
            effect += float((wanted * metered).sum())
    if update_energy == 0:
        return Survival(1.0, 1.0)
    cosine = inner / math.sqrt(change_energy * update_energy) if change_energy else 0.0
    return Survival(inner / update_energy, cosine, seen / effect if effect > 0 else None)


def survival_of_rounding(name: str, weight: Tensor, update: Tensor, recipe: Fp8Recipe) -> Survival:
    """Return what would be left if ``weight + update`` were rounded into fp8 by ``recipe``, with fresh scales.

    Args:
        name: of the layer, which stochastic rounding is a function of.
        weight: [out, in], of a file in high precision, or dequantised from one in fp8; the latter is its own rounding.
        update: [out, in].
    """
    base = recipe.quantize(name, weight.float()).dequantize(torch.float32)
    merged = recipe.quantize(name, weight.float() + update.float()).dequantize(torch.float32)
    return survival(merged, base, update)


def saturated(values: Tensor, quantized: Quantized) -> float:
    """Return the share of ``values`` [out, in] that lies outside of what the scales of ``quantized`` can hold."""
    fp8: Fp8Format | None = format_of(quantized.codes.dtype)
    assert fp8 is not None
    limit = fp8.max * (1 + 2.0**-20)  # amax / scale rounds to a hair above the largest number
    scaled = values.float()
    if quantized.scale is not None:
        blocks = quantized.scale.shape[1]
        scaled = scaled.view(scaled.shape[0], blocks, -1) / quantized.scale.unsqueeze(-1)
    return float((scaled.abs() > limit).double().mean())
