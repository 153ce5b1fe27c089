"""Which samples make up which batch of an epoch, as a function of (seed, epoch).

All items of an epoch are permuted, then dealt in that order into the open batch of their bucket; a batch is
given out when it is full. With one bucket this is "permute, then cut": batches of four hold the very
samples, in the very order, of four batches of one, so accumulation and batch size can be exchanged. What
remains in the buckets at the end is given out as smaller batches, so every item is seen once an epoch.

With several processes the plan is filled up to a multiple of their number with its own first batches,
because every process must take the same number of steps. accelerate (``even_batches=False``) deals batch
``i * processes + rank`` of the sampler to ``rank``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch.utils.data import Sampler

from library.errors import UserError
from library.randomness import generator

Size = tuple[int, int]  # width, height in pixels
Bucket = tuple[int, Size, *tuple[Size, ...]]  # number of the dataset, size of the picture, of its control pictures


def plan_epoch(
    buckets: Sequence[Bucket],
    batch_sizes: Mapping[Bucket, int],
    seed: int,
    epoch: int,
    num_processes: int = 1,
) -> list[list[int]]:
    """Return the batches of one epoch, over all processes, as lists of item indices.

    Args:
        buckets: the bucket of each item; only items of one bucket share a batch.
        batch_sizes: items in a batch, for each bucket.
        seed, epoch: what the order follows from.
        num_processes: the plan's length is a multiple of this; its first batches are repeated as needed.
    """
    plan: list[list[int]] = []
    waiting: dict[Bucket, list[int]] = defaultdict(list)
    for index in torch.randperm(len(buckets), generator=generator("epoch order", seed, epoch)).tolist():
        bucket = buckets[index]
        waiting[bucket].append(index)
        if len(waiting[bucket]) == batch_sizes[bucket]:
            plan.append(waiting.pop(bucket))
    plan.extend(waiting.values())
    unpadded = len(plan)
    for position in range(-unpadded % num_processes):
        plan.append(plan[position % unpadded])
    return plan


class EpochBatchSampler(Sampler[list[tuple[int, int]]]):
    """Batch sampler over :func:`plan_epoch`: yields lists of (epoch, index) for :class:`CachedDataset`.

    One pass gives the rest of one epoch, from the position set. There is deliberately no ``batch_size``
    attribute: with one, accelerate would withhold batches that are smaller.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        batch_sizes: Mapping[Bucket, int],
        seed: int,
        num_processes: int = 1,
    ) -> None:
        self.buckets = buckets
        self.batch_sizes = batch_sizes
        self.seed = seed
        self.num_processes = num_processes
        self.drop_last = False  # accelerate asks
        self.epoch = 0
        self.first_batch = 0
        self._planned: tuple[int, list[list[int]]] | None = None
        self._instead: dict[int, int] = {}  # items left out, and those that take their places

    def exclude(self, items: Collection[int]) -> None:
        """Leave ``items`` out; the next item of the same bucket is seen in each one's place.

        Batches keep their number and sizes, so positions mean what they meant, and processes stay in step.

        Raises:
            UserError: nothing of a bucket is left.
        """
        in_bucket: dict[Bucket, list[int]] = defaultdict(list)
        for index, bucket in enumerate(self.buckets):
            in_bucket[bucket].append(index)
        left_out = set(items)
        self._instead = {}
        for item in sorted(left_out):
            same = in_bucket[self.buckets[item]]
            kept = [other for other in same if other not in left_out]
            if not kept:
                width, height = self.buckets[item][1]
                raise UserError(
                    f"nonfinite: no image of {width}x{height} is left that gives finite numbers; "
                    'look at the images and their caches, or set nonfinite = "stop"'
                )
            self._instead[item] = next((other for other in kept if other > item), kept[0])

    def set_position(self, epoch: int, first_batch: int = 0) -> None:
        """Start the next pass in ``epoch`` (from 0) at ``first_batch``, counted over all processes."""
        assert first_batch % self.num_processes == 0, "processes would swap their batches"
        self.epoch, self.first_batch = epoch, first_batch

    def batches_per_epoch(self, epoch: int | None = None) -> int:
        """Batches of a whole epoch over all processes; buckets make it differ between epochs by none."""
        return len(self._plan(self.epoch if epoch is None else epoch))

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch = self.epoch
        for batch in self._plan(epoch)[self.first_batch :]:
            yield [(epoch, self._instead.get(index, index)) for index in batch]

    def __len__(self) -> int:
        """Batches of the next pass, over all processes."""
        return max(0, self.batches_per_epoch() - self.first_batch)

    def _plan(self, epoch: int) -> list[list[int]]:
        if self._planned is None or self._planned[0] != epoch:
            self._planned = (
                epoch,
                plan_epoch(self.buckets, self.batch_sizes, self.seed, epoch, self.num_processes),
            )
        return self._planned[1]
