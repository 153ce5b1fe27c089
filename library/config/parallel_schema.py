"""The section of all trainers that says how several processes share the work (docs/distributed.md)."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from library.config.section import Positive, Section
from library.errors import UserError


class ParallelConfig(Section):
    """How the processes of a run share the work; started with torchrun --nproc-per-node N."""

    shard: Positive = Field(
        1, description="processes that split the weights among them (FSDP2); 1: each holds them all (DDP)"
    )
    dp: Positive | None = Field(
        None, description="replicas that split the batches; with shard, groups of shard processes (HSDP); default: all"
    )

    @property
    def is_sharded(self) -> bool:
        """Whether weights are split among processes."""
        return self.shard > 1

    def replicas(self, processes: int) -> int:
        """Return how often the weights are held by ``processes`` processes.

        Raises:
            UserError: ``dp`` times ``shard`` is not their number, or ``shard`` does not divide it.
        """
        if self.dp is None and processes % self.shard == 0:
            return processes // self.shard
        needed = self.shard * (self.dp or max(1, processes // self.shard))
        if self.dp is None or processes != needed:
            asked = f"shard = {self.shard}" if self.dp is None else f"dp = {self.dp}, shard = {self.shard}"
            raise UserError(
                f"{asked} needs {needed} processes, this run has {processes}; "
                f"start with torchrun --nproc-per-node {needed}"
            )
        return self.dp


def parallel_conflicts(parallel: ParallelConfig, options: dict[str, tuple[object, str]]) -> Iterator[str]:
    """Yield a line for each option that does not go with ``shard``: name -> (whether it is set, reason and remedy)."""
    if parallel.is_sharded:
        for key, (is_set, reason) in options.items():
            if is_set:
                yield f"{key}: {reason}"
