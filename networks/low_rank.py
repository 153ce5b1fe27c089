"""Arithmetic on low-rank updates that never forms the [out, in] matrix.

Sum: strengths s_k, scales c_k = alpha_k / rank_k,

    sum_k s_k c_k B_k A_k = [s_1 c_1 B_1 | s_2 c_2 B_2 | ...] [A_1; A_2; ...]

which is a LoRA of the summed rank, exactly. Norm: with the Gram matrices of B's columns and A's rows,

    |B A|_F^2 = trace(A^T B^T B A) = sum((B^T B) * (A A^T))

so a 12288 x 3072 layer costs two products of rank x rank. In float64 the sum of squares is good to 1e-16, the norm of
a difference of two equal updates therefore to 1e-8 of theirs: below fp32's own rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from networks.weights import LoraWeights


def combine(parts: Sequence[tuple[LoraWeights, float]]) -> LoraWeights:
    """Return one LoRA whose update is the sum of ``strength * update`` over ``parts``.

    Args:
        parts: LoRAs of one layer, each with its strength; not empty.

    Returns:
        The concatenation, its rank the sum of the ranks. Where all parts have the same strength times scale the
        factors keep their bits and dtype; otherwise each part's factor goes into its B, in fp32 at least.
    """
    ratios = [strength * weights.scale for weights, strength in parts]
    rank = sum(weights.rank for weights, _ in parts)
    down = torch.cat([weights.down for weights, _ in parts])
    if len(set(ratios)) == 1:
        return LoraWeights(down, torch.cat([weights.up for weights, _ in parts], dim=1), ratios[0] * rank)
    ups = [_at_least_fp32(weights.up) * ratio for (weights, _), ratio in zip(parts, ratios, strict=True)]
    return LoraWeights(down, torch.cat(ups, dim=1), float(rank))


def combine_loras(loras: Sequence[tuple[Mapping[str, LoraWeights], float]]) -> dict[str, LoraWeights]:
    """Return module name -> the sum of all LoRAs' updates there; a LoRA of strength 0 is left out.

    Args:
        loras: for each LoRA its weights by module and its strength.
    """
    parts: dict[str, list[tuple[LoraWeights, float]]] = {}
    for weights, strength in loras:
        for name, module in weights.items() if strength else ():
            parts.setdefault(name, []).append((module, strength))
    return {name: combine(listed) for name, listed in parts.items()}


def update_norm(weights: LoraWeights) -> float:
    """Return the Frobenius norm of ``scale * up @ down``."""
    up, down = weights.up.double(), weights.down.double()
    square = float(((up.t() @ up) * (down @ down.t())).sum())
    return abs(weights.scale) * max(square, 0.0) ** 0.5


def relative_difference(one: LoraWeights, other: LoraWeights) -> float:
    """Return |one - other| / |one| of two updates of the same layer; 0 if both are zero. Good to 1e-8."""
    exact = [LoraWeights(w.down.double(), w.up.double(), w.alpha) for w in (one, other)]
    difference = update_norm(combine([(exact[0], 1.0), (exact[1], -1.0)]))
    size = update_norm(exact[0])
    return difference / size if size else (float("inf") if difference else 0.0)


def _at_least_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
