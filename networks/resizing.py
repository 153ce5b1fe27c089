"""LoRAs of other ranks: one LoRA cut down, or several joined into one.

Only the factors are touched (``networks.spectrum``), never a layer's [out, in] matrix. What is cut off is the smallest
part of the update there is; a rank as large as the old one changes nothing. Results have alpha = rank: the scale is in
the factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from networks.low_rank import combine_loras
from networks.spectrum import RankRule, Spectrum, decompose_product, rank_by_rule
from networks.weights import LoraWeights


@dataclass(frozen=True)
class ResizedLayer:
    """One layer: ranks before and after, the share of the sum of squares kept, largest over smallest value kept."""

    name: str
    before: int
    after: int
    kept: float
    ratio: float


def resize_lora(
    weights: Mapping[str, LoraWeights],
    new_rank: int | None,
    rule: RankRule | None = None,
    parameter: float = 1.0,
) -> tuple[dict[str, LoraWeights], list[ResizedLayer]]:
    """Return the LoRA with smaller ranks, in float64, and what became of each layer.

    Args:
        weights: module name -> weights.
        new_rank: the rank of every layer, or with ``rule`` the largest one. Never more than a layer has.
        rule, parameter: choose each layer's rank, see :func:`networks.spectrum.rank_by_rule`.
    """
    resized: dict[str, LoraWeights] = {}
    layers: list[ResizedLayer] = []
    for name, module in weights.items():
        spectrum = decompose_product(module)
        chosen = rank_by_rule(spectrum.values, rule, parameter) if rule else len(spectrum.values)
        rank = min(chosen, new_rank or chosen)
        resized[name] = spectrum.lora(rank)
        layers.append(ResizedLayer(name, module.rank, rank, spectrum.kept(rank), _ratio(spectrum, rank)))
    return resized, layers


def join_loras(
    loras: Sequence[tuple[Mapping[str, LoraWeights], float]], new_rank: int | None = None
) -> tuple[dict[str, LoraWeights], list[ResizedLayer]]:
    """Return one LoRA whose update is the sum of ``strength * update``, and what became of each layer.

    Args:
        loras: for each LoRA its weights by module and its strength.
        new_rank: None: the concatenation, exact, its rank the sum of the ranks. Otherwise the closest LoRA of that
            rank: the singular value decomposition of the sum, cut off.
    """
    exact = {name: LoraWeights(w.down.double(), w.up.double(), w.alpha) for name, w in combine_loras(loras).items()}
    if new_rank is not None:
        return resize_lora(exact, new_rank)
    return exact, [ResizedLayer(name, w.rank, w.rank, 1.0, 1.0) for name, w in exact.items()]


def _ratio(spectrum: Spectrum, rank: int) -> float:
    smallest = float(spectrum.values[rank - 1])
    return float(spectrum.values[0]) / smallest if smallest else float("inf")
