"""Batches of a tokenised corpus as a function of the position in training.

An epoch cuts the corpus into windows of ``context`` tokens, from a start that differs by epoch, and shuffles them. The
batch of (micro-batch, process) is a function of seed and position alone: resuming is a number, processes share no
windows, and it does not matter how many of them there were before.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from library.errors import UserError
from library.llm.token_shards import TokenShards
from library.randomness import derive_seed, python_random


class TokenBatches:
    """Shuffled windows of a split for one of ``world`` processes."""

    def __init__(
        self, shards: TokenShards, context: int, batch_size: int, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        """Plan the epochs.

        Raises:
            UserError: the corpus is shorter than two windows.
        """
        # one window is given up, so that the start can move, and the last token is only a target
        self.windows = (shards.tokens - 1) // context - 1
        if self.windows < 1:
            raise UserError(
                f"{shards.folder}: {shards.tokens} tokens are fewer than two windows of {context}; lower context or "
                "add text"
            )
        self._shards, self._context, self._size, self._seed = shards, context, batch_size, seed
        self._rank, self._world = rank, world
        self._epoch, self._offset, self._order = -1, 0, np.empty(0, np.int64)

    def epoch(self, index: int) -> int:
        """Return the epoch in which micro-batch ``index`` begins."""
        return index * self._world * self._size // self.windows

    def batch(self, index: int) -> Tensor:
        """Return this process's micro-batch ``index`` (from 0), int64 [batch, context + 1]; targets are one further."""
        first = (index * self._world + self._rank) * self._size
        rows = [self._window(first + i) for i in range(self._size)]
        return torch.from_numpy(np.stack(rows))

    def from_position(self, index: int, pinned: bool = False) -> Iterator[Tensor]:
        """Yield batches without end from micro-batch ``index`` on; the next one is read while one is in use."""

        def read(i: int) -> Tensor:
            batch = self.batch(i)
            return batch.pin_memory() if pinned else batch

        with ThreadPoolExecutor(1) as reader:
            coming = reader.submit(read, index)
            while True:
                batch, index = coming.result(), index + 1
                coming = reader.submit(read, index)
                yield batch

    def _window(self, sample: int) -> np.ndarray:
        epoch, place = divmod(sample, self.windows)
        if epoch != self._epoch:
            drawn = np.random.default_rng(derive_seed(self._seed, "window order", epoch))
            self._order = drawn.permutation(self.windows)
            self._offset = python_random(self._seed, "window offset", epoch).randrange(self._context)
            self._epoch = epoch
        return self._shards.read(self._offset + int(self._order[place]) * self._context, self._context + 1)


def held_out_batches(
    shards: TokenShards, context: int, batch_size: int, most_tokens: int, rank: int = 0, world: int = 1
) -> Iterator[Tensor]:
    """Yield this process's share of the split's first windows in order, int64 [up to batch, context + 1].

    Raises:
        UserError: the split is shorter than one window.
    """
    windows = min((shards.tokens - 1) // context, max(1, most_tokens // context))
    if windows < 1:
        raise UserError(f"{shards.folder}: {shards.tokens} held-out tokens are less than a window of {context}")
    own = range(rank, windows, world)
    for begin in range(0, len(own), batch_size):
        rows = [shards.read(window * context, context + 1) for window in own[begin : begin + batch_size]]
        yield torch.from_numpy(np.stack(rows))
