"""LoRAs of layers that are one module in the original checkpoint: made one, and taken apart again.

Layouts of the original checkpoint have one module where diffusers has q, k, v (and the MLP). LoRAs A_i [r, in],
B_i [out_i, r] of n parts become A = [A_1; ...; A_n] and B = diag(B_1, ..., B_n) of rank n r: exactly the same update.
The scale alpha / rank stays when alpha grows by the same factor. Parts that differ in rank, or are missing, are filled
up with zero rows in A, which reading recognises and removes again; parts that differ in scale get it folded into B. A
fused LoRA that was trained as one (kohya's) has a dense B: every part then takes the same A and its rows of B.
Products and rotations of other kinds cannot be joined, so those keep diffusers' names; ComfyUI applies each to its rows
of the original qkv, diffusers loads DoRA, as peft's, and none of the others. Of those that were trained on a joined
layer (LyCORIS in sd-scripts), each part takes its rows (``of_rows``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from library.models.layer_names import KeyPlace, KeyRow
from networks.files.weights import AdapterWeights, LoraWeights, bias_of, same_down


def fuse_parts(row: KeyRow, parts: Mapping[int, LoraWeights]) -> LoraWeights:
    """Return one LoRA of the original module with the same update.

    Args:
        row: the original module's row.
        parts: part index -> weights; parts without a LoRA may be missing.
    """
    first = next(iter(parts.values()))
    if len(row.parts) == 1:
        return LoraWeights(first.down, row.swap(first.up), first.alpha)
    if len(parts) == len(row.parts) and all(same_down(first, part) for part in parts.values()):
        return LoraWeights(first.down, torch.cat([parts[i].up for i in range(len(parts))]), first.alpha)
    in_features = first.down.shape[1]
    rows = [multiple * in_features for multiple in row.rows]
    rank = max(part.rank for part in parts.values())
    count = len(row.parts)
    one_scale = len({part.scale for part in parts.values()}) == 1
    down = first.down.new_zeros(count * rank, in_features)
    up = first.up.new_zeros(sum(rows), count * rank)
    for i, part in parts.items():
        top, left = sum(rows[:i]), i * rank
        down[left : left + part.rank] = part.down
        up[top : top + rows[i], left : left + part.rank] = part.up if one_scale else part.up.float() * part.scale
    if one_scale and all(part.rank == rank for part in parts.values()):
        return LoraWeights(down, up, first.alpha * count)  # alpha / rank keeps its bits
    return LoraWeights(down, up, (first.scale if one_scale else 1.0) * count * rank)


def split_parts(row: KeyRow, joined: AdapterWeights, columns: int | None = None) -> dict[int, AdapterWeights]:
    """Return part index -> the change of its rows, of an adapter of the original module.

    Parts of a block-diagonal LoRA whose down-projection is all zero were never there and are left out. ``columns`` are
    the module's, where ``joined`` does not show them.

    Raises:
        ValueError: the shapes are not those of this module, or the rows' changes depend on one another.
    """
    out, columns = joined.shape[0], joined.shape[1] or columns
    if len(row.parts) == 1:
        return {0: joined.of_rows(row.swap(torch.arange(out))) if row.halves_swapped else joined}
    ends = row.part_rows(out, out // sum(row.rows) if columns is None else columns)
    parts = {i: joined.of_rows(rows) for i, rows in enumerate(torch.arange(out).split(ends))}
    count, rank = len(ends), joined.rank // len(ends)
    loras = {i: part for i, part in parts.items() if isinstance(part, LoraWeights)}
    if not loras or joined.rank % count or not all(_only_block(p.up, i * rank, rank) for i, p in loras.items()):
        return parts
    found: dict[int, AdapterWeights] = {}
    for i, part in loras.items():
        block = slice(i * rank, (i + 1) * rank)
        filled = part.down[block].any(dim=1)
        if kept := int(filled.sum()):
            alpha = part.alpha * kept / part.rank
            found[i] = LoraWeights(part.down[block][filled], part.up[:, block][:, filled].contiguous(), alpha)
    return found


def placed(place: KeyPlace, read: AdapterWeights | None, biases: Mapping[str, Tensor]) -> dict[str, AdapterWeights]:
    """Return diffusers module name -> what a file has for its rows of the module at ``place``.

    Args:
        place: where the file's module is in the model.
        read: its adapter, if it has one.
        biases: of :data:`networks.files.weights.BIASES`; the names of what they become end in ".bias".

    Raises:
        ValueError: as of :func:`split_parts`; or biases that are no vectors of one length.
    """
    scale, columns = (1.0, None) if read is None else (read.scale, read.shape[1])
    found: dict[str, AdapterWeights] = {} if read is None else {"": read}
    found |= {".bias": bias_of(biases, scale)} if biases else {}
    if place.part is not None:
        return {place.modules[place.part] + end: weights for end, weights in found.items()}
    parts = {end: split_parts(place.row, weights, columns) for end, weights in found.items()}
    return {place.modules[part] + end: rows for end, split in parts.items() for part, rows in split.items()}


def _only_block(up: torch.Tensor, start: int, rank: int) -> bool:
    """Whether ``up`` is zero outside the columns ``start`` to ``start + rank``."""
    return not bool(up[:, :start].any()) and not bool(up[:, start + rank :].any())
