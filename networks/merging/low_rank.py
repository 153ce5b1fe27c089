"""Sums, norms, spectra and other ranks of low-rank updates, without forming the [out, in] matrix.

*Sum* of strengths s_k times scales c_k = alpha_k / rank_k, exactly, as a LoRA of the summed rank:

    sum_k s_k c_k B_k A_k = [s_1 c_1 B_1 | s_2 c_2 B_2 | ...] [A_1; A_2; ...]

*Norm*, with the Gram matrices of B's columns and A's rows:

    |B A|_F^2 = trace(A^T B^T B A) = sum((B^T B) * (A A^T))

so a 12288 x 3072 layer costs two products of rank x rank. In float64 the sum of squares is good to 1e-16, the norm of
a difference of two equal updates therefore to 1e-8 of theirs: below fp32's own rounding.

*Spectrum* M = U diag(s) V^T: the closest matrix of rank r (Frobenius norm) keeps the r largest s (Eckart, Young), and
with them the share that their squares have in |M|_F^2, the energy. Two ways there, each of which avoids the work that
need not be done:

- a product B A of rank r (a LoRA): B = Q1 R1 and A^T = Q2 R2, so that B A = Q1 (R1 R2^T) Q2^T, and only the r x r
  core has to be decomposed. In float64.
- a full matrix of which few directions are wanted: the randomised range finder of Halko, Martinsson and Tropp
  (https://arxiv.org/abs/0909.4061, algorithm 4.4). Matrix products of a few hundred columns instead of a decomposition
  of a 3072 x 12288 matrix. With four power iterations the share of energy it loses against the exact answer is below
  1e-3 even where singular values fall slowly. Where a quarter of the directions or more is wanted it would not be
  faster, and the matrix is decomposed exactly.

- a Kronecker product w1 (x) w2 (a LoKr): its singular values are the products of theirs, its singular vectors the
  Kronecker products of theirs (Van Loan, https://doi.org/10.1016/S0377-0427(00)00393-9). Since |w1 (x) w2| = |w1| |w2|,
  the LoKr of a smaller rank that is closest has the w2 that is closest to its w2.

The *Kronecker product closest to a matrix* is a matter of rank 1: rearranged so that each block is a row, w1 (x) w2 is
the outer product of w1 and w2 (Van Loan and Pitsianis 1993, https://doi.org/10.1007/978-94-015-8196-7_17).

*Resizing and joining* LoRAs: what is cut off is the smallest part of the update there is; a rank as large as the old
one changes nothing. Results have alpha = rank: the scale is in the factors. Rules for the rank have the names and
meanings of sd-scripts' ``networks/resize_lora.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from library.errors import UserError
from networks.files.weights import AdapterWeights, AddedWeights, CombinedWeights, LohaWeights, LokrWeights, LoraWeights


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
    exact = [weights.up.to(torch.promote_types(weights.up.dtype, torch.float32)) for weights, _ in parts]
    ups = [up * ratio for up, ratio in zip(exact, ratios, strict=True)]
    return LoraWeights(down, torch.cat(ups, dim=1), float(rank))


def combine_loras(loras: Sequence[tuple[Mapping[str, AdapterWeights], float]]) -> dict[str, Any]:
    """Return module name -> what all LoRAs change there together; a LoRA of strength 0 is left out.

    Args:
        loras: for each LoRA its weights by module and its strength.

    Returns:
        A LoRA where all are LoRAs, see :func:`combine`, else a combination.
    """
    parts: dict[str, list[tuple[Any, float]]] = {}
    for weights, strength in loras:
        for name, module in weights.items() if strength else ():
            listed = parts.setdefault(name, [])
            listed.append((module, strength))
            if module.shape != (first := listed[0][0].shape):
                raise UserError(
                    f"{name}: LoRAs for layers of {first} and {module.shape}; merge one into the model first"
                )
    are_loras = {name: all(isinstance(w, LoraWeights) for w, _ in listed) for name, listed in parts.items()}
    return {n: (combine if are_loras[n] else CombinedWeights.of_parts)(listed) for n, listed in parts.items()}


def update_norm(weights: LoraWeights | LokrWeights | LohaWeights) -> float:
    """Return the Frobenius norm of an update."""
    if isinstance(weights, LokrWeights):  # a row of the product is one of the outer product of two rows
        squares = [side(torch.float64).square().sum(1) for side in (weights.w1, weights.w2)]
        rows = torch.kron(*squares)[weights.tensors.get("rows", ...)]
        return abs(weights.scale) * float(rows.sum()) ** 0.5
    lora = weights.as_lora() if isinstance(weights, LohaWeights) else weights
    up, down = lora.up.double(), lora.down.double()
    square = float(((up.t() @ up) * (down @ down.t())).sum())
    return abs(lora.scale) * max(square, 0.0) ** 0.5


def relative_difference(one: LoraWeights, other: LoraWeights) -> float:
    """Return |one - other| / |one| of two updates of the same layer; 0 if both are zero. Good to 1e-8.

    Where both have the same A, as a file and what it was written from do, a product of their rank does.
    """
    first, second = (LoraWeights(w.down.cpu().double(), w.up.cpu().double(), w.alpha) for w in (one, other))
    if first.down.shape == second.down.shape and torch.equal(first.down, second.down):
        if first.scale == second.scale and torch.equal(first.up, second.up):
            return 0.0
        change = LoraWeights(first.down, first.up * first.scale - second.up * second.scale, float(first.rank))
    else:
        change = combine([(first, 1.0), (second, -1.0)])
    difference, size = update_norm(change), update_norm(first)
    return difference / size if size else (float("inf") if difference else 0.0)


RankRule = Literal["sv_fro", "sv_cumulative", "sv_ratio"]

_EXACT_BELOW = 512  # smaller sides are decomposed exactly in well under a second
_EXACT_SHARE = 4  # and so is a matrix of which a quarter of the directions is wanted
_OVERSAMPLING = 16
_POWER_ITERATIONS = 4


class Spectrum(NamedTuple):
    """``left @ diag(values) @ right``: [out, k], [k] falling, [k, in]; ``energy`` is that of the whole matrix."""

    left: Tensor
    values: Tensor
    right: Tensor
    energy: float

    @classmethod
    def of(cls, matrix: Tensor) -> Self:
        """Return all of the spectrum of ``matrix`` [out, in]."""
        u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
        return cls(u, values, vh, float(values.square().sum()))

    def kept(self, rank: int) -> float:
        """Return the share of the energy in the ``rank`` largest singular values; 1.0 of a matrix of zeros."""
        return min(1.0, float(self.values[:rank].double().square().sum()) / self.energy) if self.energy else 1.0

    def lora(self, rank: int) -> LoraWeights:
        """Return the first ``rank`` directions as a LoRA of scale 1, the singular values shared by both factors."""
        root = self.values[:rank].sqrt()
        return LoraWeights(root[:, None] * self.right[:rank], self.left[:, :rank] * root, float(min(rank, len(root))))


def decompose_product(weights: LoraWeights) -> Spectrum:
    """Return the spectrum of a LoRA's update, in float64, without forming it."""
    left, left_core = torch.linalg.qr(weights.up.double())
    right, right_core = torch.linalg.qr(weights.down.double().t())
    u, values, vh = torch.linalg.svd(left_core @ right_core.t())
    k = len(values)
    values = values * abs(weights.scale)
    u = u if weights.scale >= 0 else -u
    return Spectrum(left @ u[:, :k], values, vh[:k] @ right.t(), float(values.square().sum()))


Choose = Callable[[Tensor], int]  # the rank, from falling singular values


def decompose_kronecker(weights: LokrWeights, choose: Choose) -> Spectrum:
    """Return the directions that ``choose`` wants of a LoKr's update, in float64; of a joined layer as a whole."""
    one, two = (torch.linalg.svd(side(torch.float64), full_matrices=False) for side in (weights.w1, weights.w2))
    values, order = torch.kron(one.S, two.S).mul_(abs(weights.scale)).sort(descending=True)
    order = order[: choose(values)]
    i, j = order // len(two.S), order % len(two.S)
    left = (one.U[:, None, i] * two.U[None, :, j]).flatten(0, 1)
    right = (one.Vh[i, :, None] * two.Vh[j, None, :]).flatten(1)
    left = left if weights.scale >= 0 else -left
    return Spectrum(left, values[: len(order)], right, float(values.square().sum()))


def smaller_lokr(weights: LokrWeights, choose: Choose) -> tuple[LokrWeights, ResizedLayer]:
    """Return the closest LoKr with a w2 of the rank that ``choose`` wants of w2's singular values, and what became.

    alpha / rank is the old scale, which was 1 where nothing was of low rank. w2 stays whole where its factors would be
    no smaller, or peft and musubi-tuner would make it whole: from a rank of half its larger side on.
    """
    w1, w2 = weights.w1(torch.float64), weights.w2(torch.float64)
    spectrum = Spectrum.of(w2)
    values = spectrum.values
    rank, most = choose(values), weights.tensors["lokr_w2_b"].shape[0] if "lokr_w2_b" in weights.tensors else 0
    if rank >= (most or min(max(w2.shape) / 2, w2.numel() / sum(w2.shape))):
        return weights, ResizedLayer("", most, most, 1.0, _ratio(values, most or len(values)))
    w2_lora = spectrum.lora(rank)
    tensors = {"lokr_w1": w1, "lokr_w2_a": w2_lora.up, "lokr_w2_b": w2_lora.down}
    tensors |= {name: tensor for name, tensor in weights.tensors.items() if name == "rows"}
    layer = ResizedLayer("", most, rank, spectrum.kept(rank), _ratio(values, rank))
    return LokrWeights(tensors, weights.scale * rank), layer


def nearest_kronecker(matrix: Tensor, rows: int, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return w1 [rows, columns] and w2, of one norm, whose Kronecker product is closest to ``matrix`` [out, in]."""
    out, width = matrix.shape
    blocks = matrix.reshape(rows, out // rows, columns, width // columns).transpose(1, 2).flatten(2).flatten(0, 1)
    outer = decompose(blocks, 1, generator).lora(1)
    return outer.up.flatten().reshape(rows, columns), outer.down.flatten().reshape(out // rows, width // columns)


def decompose(matrix: Tensor, rank: int, generator: torch.Generator) -> Spectrum:
    """Return the ``rank`` largest directions of ``matrix`` [out, in] in its dtype (fp32 or wider).

    Args:
        matrix: on any device.
        rank: directions wanted; no more than there are.
        generator: on the CPU; draws the random directions of the approximate way.
    """
    side = min(matrix.shape)
    energy = _sum_of_squares(matrix)
    if side <= _EXACT_BELOW or rank * _EXACT_SHARE >= side:
        u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    else:
        u, values, vh = _randomised(matrix, rank + _OVERSAMPLING, generator)
    return Spectrum(u[:, :rank], values[:rank], vh[:rank], energy)


def rank_by_rule(values: Tensor, rule: RankRule, parameter: float) -> int:
    """Return the rank that ``rule`` chooses for falling singular values; at least 1.

    Args:
        values: [k].
        rule: ``sv_fro``: the fewest whose Frobenius norm is at least ``parameter`` of the whole (the share of energy is
            its square); ``sv_cumulative``: the fewest whose sum is at least ``parameter`` of the sum of all;
            ``sv_ratio``: those larger than the largest one divided by ``parameter``.
    """
    values = values.double()
    if rule == "sv_fro":
        squares = values.square().cumsum(0)
        return _first_reaching(squares, parameter**2 * float(squares[-1]))
    if rule == "sv_cumulative":
        sums = values.cumsum(0)
        return _first_reaching(sums, parameter * float(sums[-1]))
    return max(1, int((values > values[0] / parameter).sum()))


def _first_reaching(sums: Tensor, target: float) -> int:
    """Return how many terms a rising sum needs to reach ``target``; all if it never does; at least 1."""
    # rounding in the sum must not ask for one more direction of size zero
    reached = sums >= target * (1 - 1e-12)
    return int(reached.int().argmax()) + 1 if bool(reached.any()) else len(sums)


def _sum_of_squares(matrix: Tensor) -> float:
    """Return |matrix|_F^2, summed in float64 without a float64 copy of the matrix."""
    return sum(float(rows.double().square().sum()) for rows in matrix.split(256))


def _randomised(matrix: Tensor, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return an approximate decomposition with ``columns`` directions."""
    if matrix.shape[0] < matrix.shape[1]:
        u, values, vh = _randomised(matrix.t(), columns, generator)
        return vh.t(), values, u.t()
    start = torch.randn(matrix.shape[1], columns, generator=generator, dtype=torch.float32)
    basis = torch.linalg.qr(matrix @ start.to(matrix))[0]
    for _ in range(_POWER_ITERATIONS):
        basis = torch.linalg.qr(matrix.t() @ basis)[0]
        basis = torch.linalg.qr(matrix @ basis)[0]
    u, values, vh = torch.linalg.svd(basis.t() @ matrix, full_matrices=False)
    return basis @ u, values, vh


@dataclass(frozen=True)
class ResizedLayer:
    """One layer: ranks before and after (0: full matrices), share of the sum of squares and range of values kept."""

    name: str
    before: int
    after: int
    kept: float
    ratio: float


def resize_lora(
    weights: Mapping[str, AdapterWeights],
    new_rank: int | None,
    rule: RankRule | None = None,
    parameter: float = 1.0,
    kind: str = "",
) -> tuple[dict[str, AdapterWeights], list[ResizedLayer]]:
    """Return LoRAs, or LoKrs, with smaller ranks, in float64, and what became of each layer.

    Layers with the same A are parts of one that was trained on a joined layer (FLUX's qkv), and stay that: their
    updates are decomposed as one, as sd-scripts does, and keep one A. So are rows of one LoKr.

    Args:
        weights: module name -> weights.
        new_rank: the rank of every layer, or with ``rule`` the largest one; a LoKr's is that of w2. Never more than a
            layer has.
        rule, parameter: choose each layer's rank, see :func:`networks.merging.low_rank.rank_by_rule`.
        kind: "lora": LoRAs are made of LoKrs and LoHas, too.

    Raises:
        UserError: an adapter of another kind.
    """

    def choose(values: Tensor) -> int:
        chosen = rank_by_rule(values, rule, parameter) if rule else len(values)
        return min(chosen, new_rank or chosen)

    resized: dict[str, AdapterWeights] = {}
    layers: list[ResizedLayer] = []
    for names in _together(weights):
        first = weights[names[0]]
        if isinstance(first, LokrWeights) and kind != "lora":
            smaller, layer = smaller_lokr(first, choose)
            for name in names:
                rows = {key: t for key, t in weights[name].tensors.items() if key == "rows"}
                resized[name] = LokrWeights({**smaller.tensors, **rows}, smaller.alpha)
                layers.append(replace(layer, name=name))
            continue
        spectrum = _spectrum(names[0], [weights[name] for name in names], choose, kind)
        rank = len(spectrum.values) if isinstance(first, LokrWeights) else choose(spectrum.values)
        whole = spectrum.lora(rank)
        ends = [module.shape[0] for module in map(weights.__getitem__, names)]
        picked = [weights[name].tensors.get("rows") for name in names]
        parts = whole.up.split(ends) if picked[0] is None else [whole.up[rows] for rows in picked]
        for name, up in zip(names, parts, strict=True):
            resized[name] = LoraWeights(whole.down, up, whole.alpha)
            layers.append(ResizedLayer(name, first.rank, rank, spectrum.kept(rank), _ratio(spectrum.values, rank)))
    return resized, layers


def _spectrum(name: str, parts: Sequence[AdapterWeights], choose: Choose, kind: str) -> Spectrum:
    """Return the spectrum of what ``parts`` of a joined layer, or a layer alone, change together."""
    first = parts[0]
    if isinstance(first, LokrWeights):
        return decompose_kronecker(first, choose)
    if isinstance(first, LohaWeights) and kind == "lora":
        return decompose_product(first.as_lora())
    if isinstance(first, CombinedWeights):
        return Spectrum.of(first.delta(torch.float64))
    if not isinstance(first, LoraWeights):
        remedy = "give --network_type lora" if isinstance(first, LohaWeights) else "merge it into a model instead"
        raise UserError(f"{name}: is a {first.title}, which has no smaller ranks; {remedy}")
    return decompose_product(LoraWeights(first.down, torch.cat([part.tensors["up"] for part in parts]), first.alpha))


def _together(weights: Mapping[str, AdapterWeights]) -> list[list[str]]:
    """Return the names of modules, those together that have one A, which is not zero, and one alpha, or one LoKr."""
    groups: dict[object, list[str]] = {}
    for name, module in weights.items():
        key: object = name
        if isinstance(module, LoraWeights) and bool(module.down.any()):
            data = module.down.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            key = (module.alpha, module.down.dtype, module.down.shape, data)
        elif "rows" in module.tensors:
            key = tuple(id(tensor) for part, tensor in module.tensors.items() if part != "rows")
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def join_loras(
    loras: Sequence[tuple[Mapping[str, AdapterWeights], float]], new_rank: int | None = None
) -> tuple[Mapping[str, AdapterWeights], list[ResizedLayer]]:
    """Return one LoRA whose update is the sum of ``strength * update``, and what became of each layer.

    Args:
        loras: for each LoRA, LoKr or LoHa its weights by module and its strength.
        new_rank: None: the concatenation, exact, its rank the sum of the ranks; what is alone in its layer stays of its
            kind. Otherwise the closest LoRA of that rank: the singular value decomposition of the sum, cut off.

    Raises:
        UserError: DoRAs, or without ``new_rank`` adapters of several kinds.
    """
    summed: dict[str, AddedWeights] = {name: w.to(torch.float64) for name, w in combine_loras(loras).items()}
    parts = {name: w.parts if isinstance(w, CombinedWeights) else ((w, 1.0),) for name, w in summed.items()}
    if other := [name for name in parts if not all(isinstance(part, AddedWeights) for part, _ in parts[name])]:
        raise UserError(f"{other[0]}: a DoRA depends on the base's weights; give --model to merge it into")
    if new_rank is not None:
        return resize_lora(summed, new_rank, kind="lora")
    if any(len(each) > 1 for each in parts.values()) or len({each[0][0].kind for each in parts.values()}) > 1:
        raise UserError("--method concat: puts LoRAs side by side, no other kinds; give --method svd and --new_rank")
    alone = {name: part.scaled(strength) for name, ((part, strength),) in parts.items()}
    return alone, [ResizedLayer(name, w.rank, w.rank, 1.0, 1.0) for name, w in alone.items()]


def _ratio(values: Tensor, rank: int) -> float:
    smallest = float(values[rank - 1])
    return float(values[0]) / smallest if smallest else float("inf")
