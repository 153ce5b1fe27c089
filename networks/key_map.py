"""One model, two namings: a table of modules in diffusers' names against the original checkpoint's.

A row pairs an original module (``double_blocks.{i}.img_attn.qkv``) with the diffusers modules stacked in it
(``to_q``, ``to_k``, ``to_v``), ``{i}`` being the block's index. Stacking is by output rows, counted in
multiples of the module's input columns: (1, 1, 1) for q, k, v. ``halves_swapped`` marks modulations whose
two halves (shift, scale) come in the other order.

File formats write names with dots or, like kohya, with underscores; both are found by :meth:`KeyMap.find`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeyRow:
    """One original module and the diffusers modules stacked in it: templates with ``{i}`` for the block.

    Attributes:
        original: the original module's name. parts: the diffusers modules, in the order of their rows.
        rows: each part's output rows as a multiple of the input columns; empty where there is one part.
        halves_swapped: the part's two row halves come in the other order.
        transposed: published files keep the weight as [in, out] (transformers' Conv1D).
    """

    original: str
    parts: tuple[str, ...]
    rows: tuple[int, ...] = ()
    halves_swapped: bool = False
    transposed: bool = False

    def part_rows(self, out_features: int, in_features: int) -> list[int]:
        """Return how many output rows of the original module belong to each part.

        Raises:
            ValueError: the parts do not add up to ``out_features``.
        """
        rows = [multiple * in_features for multiple in self.rows] or [out_features]
        if sum(rows) != out_features:
            raise ValueError(f"{out_features} output rows, {sum(rows)} expected for {in_features} input columns")
        return rows

    def swap(self, up: Tensor) -> Tensor:
        """Return ``up`` with its row halves exchanged if the row asks for it; twice is nothing."""
        return torch.cat(up.chunk(2)[::-1]) if self.halves_swapped else up


@dataclass(frozen=True)
class KeyPlace:
    """A name found in a :class:`KeyMap`: its row, its block, and the part (None: the original module)."""

    row: KeyRow
    block: str
    part: int | None

    @property
    def original(self) -> str:
        """Full name of the original module."""
        return self.row.original.replace("{i}", self.block)

    @property
    def modules(self) -> list[str]:
        """Full diffusers names of all parts of the original module."""
        return [part.replace("{i}", self.block) for part in self.row.parts]


@dataclass(frozen=True)
class KeyMap:
    """All linear layers of a family in both namings."""

    rows: tuple[KeyRow, ...]

    def find(self, name: str) -> KeyPlace | None:
        """Return the place of a module name in either naming, with dots or underscores, or None."""
        normal = name.replace(".", "_")
        for pattern, row, part in self._patterns:
            if match := pattern.fullmatch(normal):
                return KeyPlace(row, match[1] if pattern.groups else "", part)
        return None

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], KeyRow, int | None]]:
        renamed = [row for row in self.rows if row.original not in row.parts]  # the others' names say the part
        templates: list[tuple[str, KeyRow, int | None]] = [(row.original, row, None) for row in renamed]
        templates += [(part, row, index) for row in self.rows for index, part in enumerate(row.parts)]
        return [
            (re.compile(re.escape(t.replace(".", "_")).replace(r"\{i\}", r"(\d+)")), row, part)
            for t, row, part in templates
        ]
