"""One module's LoRA in memory: what files are read into and written from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LoraWeights:
    """The update ``alpha / rank * up @ down`` of one linear layer.

    Attributes:
        down: [rank, in]. up: [out, rank]. Any floating dtype, the same device.
        alpha: numerator of the scale.
    """

    down: Tensor
    up: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        """Rows of ``down``."""
        return self.down.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Output rows and input columns of the layer."""
        return self.up.shape[0], self.down.shape[1]

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    def delta(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the update, [out, in], computed in ``dtype``."""
        return torch.mm(self.up.to(dtype), self.down.to(dtype)).mul_(self.scale)

    def apply(self, weight: Tensor, strength: float) -> Tensor:
        """Return ``weight`` [out, in] fp32 plus ``strength`` times the update."""
        return weight + self.delta(torch.float32).mul_(strength)


def names_in_short(names: Sequence[str], shown: int = 5) -> str:
    """Return the first few names and how many more there are."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
