"""Keys and values of tokens already seen, so that a language model computes each only once.

Memory for all layers is allocated once, [B, Hkv, length, D] each: a head's rows lie together, which is how attention
kernels read them, and a new token is one write, nothing is moved or grown.

Prompts of different lengths share a batch by *left padding*: every row's newest token is in the same column, so a step
of the whole batch writes one column and calls attention once. ``padding`` [B] says how many columns at a row's
beginning hold nothing; a token's position is its column minus that. (With right padding every row would write to a
column of its own.)
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """The cache of one batch.

    Attributes:
        length: columns filled so far.
        capacity: columns there are.
        padding: [B] columns at the beginning of each row that hold no token; None for none in any row.
    """

    def __init__(
        self,
        layers: int,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        padding: Tensor | None = None,
    ) -> None:
        """Allocate keys and values of ``shape`` (batch, heads, capacity, head_dim) for each layer."""
        self._keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.length, self.capacity = 0, shape[2]
        self.padding = padding if padding is not None and bool((padding > 0).any()) else None

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``key`` and ``value`` [B, S, Hkv, D] behind what is there; return all of the layer's, [B, T, Hkv, D].

        What is returned are views. ``length`` counts on only with :meth:`advance`, after the last layer.
        """
        end = self.length + key.shape[1]
        assert end <= self.capacity, f"cache of {self.capacity} columns cannot take {end}"
        keys, values = self._keys[layer], self._values[layer]
        keys[:, :, self.length : end] = key.transpose(1, 2)
        values[:, :, self.length : end] = value.transpose(1, 2)
        return keys[:, :, :end].transpose(1, 2), values[:, :, :end].transpose(1, 2)

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store one token a row, ``key`` and ``value`` [B, Hkv, D]; return all of the layer's, [B, Hkv, T, D].

        As :meth:`extend`, in the layout of attention kernels.
        """
        assert self.length < self.capacity, f"cache of {self.capacity} columns is full"
        keys, values = self._keys[layer], self._values[layer]
        keys.select(2, self.length).copy_(key)
        values.select(2, self.length).copy_(value)
        end = self.length + 1
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def advance(self, tokens: int) -> None:
        """Count ``tokens`` new columns as filled."""
        self.length += tokens

    def rewind(self, length: int) -> None:
        """Forget the columns from ``length`` on; the next tokens go there."""
        assert length <= self.length
        self.length = length

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` columns; what is filled is copied, a layer at a time."""
        for tensors in (self._keys, self._values):
            for layer, old in enumerate(tensors):
                new = old.new_empty(*old.shape[:2], capacity, old.shape[3])
                new[:, :, : self.length] = old[:, :, : self.length]
                tensors[layer] = new
        self.capacity = capacity

    def positions(self, tokens: int) -> Tensor | None:
        """Return the positions [B, tokens] of the next tokens, 0 for padding; None where no row is padded."""
        if self.padding is None:
            return None
        columns = torch.arange(self.length, self.length + tokens, device=self.padding.device)
        return (columns - self.padding[:, None]).clamp_min(0)

    def mask(self, tokens: int) -> Tensor | None:
        """Return who sees whom for the next tokens, bool [B, 1, tokens, T]; None where causality says all.

        A padding column sees itself: a softmax over nothing would be NaN, and a NaN in the cache spreads.
        """
        if self.padding is None:
            return None
        end = self.length + tokens
        keys = torch.arange(end, device=self.padding.device)
        queries = keys[self.length :, None]
        seen = (keys >= self.padding[:, None, None]) & (keys <= queries)
        return (seen | (keys == queries))[:, None]
