"""The section of all trainers that says how several processes share the work (docs/distributed.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from library.config.section import Positive, Section
from library.errors import UserError

MESH_ORDER = ("pp", "dp", "shard", "tp")  # what travels most, travels between neighbours


class ParallelConfig(Section):
    """How the processes of a run share the work; started with torchrun --nproc-per-node N."""

    shard: Positive = Field(
        1, description="processes that split the weights among them (FSDP2); 1: each holds them all (DDP)"
    )
    lora_placement: Literal["replicated", "sharded"] = Field(
        "replicated",
        description="with shard, the LoRA: whole on every process for any optimizer, or split as the base is, with its "
        "gradients and optimizer",
    )
    dp: Positive | None = Field(
        None, description="replicas that split the batches; with shard, groups of shard processes (HSDP); default: all"
    )
    pp: Positive = Field(1, description="pipeline stages, each a process with a part of the blocks; 1: no pipeline")
    microbatches: Positive | None = Field(
        None, description="pieces of equal size that a batch goes through a pipeline in; default: as many as stages"
    )
    schedule: Literal["1f1b", "gpipe"] = Field(
        "1f1b", description="of a pipeline: backward as soon as possible (1f1b), or after all forward passes (gpipe)"
    )
    stage_balance: Literal["time", "weights"] = Field(
        "time", description="what stages have as equal parts of as can be: work, or weights where memory is short"
    )

    tp: Positive = Field(
        1, description="processes that have each large layer together, computing one batch (tensor parallelism)"
    )

    zero: int | None = Field(
        None,
        ge=1,
        le=3,
        description="DeepSpeed's ZeRO: all processes split the LoRA's optimizer state (1), its gradients too (2), the "
        "model's weights too (3); needs requirements-zero.txt",
    )

    device_map: Literal["balanced"] | None = Field(
        None, description="one process drives several GPUs, each with a run of the blocks; one works at a time"
    )

    @property
    def is_sharded(self) -> bool:
        """Whether weights are split among processes."""
        return self.shard > 1

    @property
    def splits_lora(self) -> bool:
        """Whether a LoRA is split with its base."""
        return self.lora_placement == "sharded"

    @property
    def gathers_weights(self) -> bool:
        """Whether they are gathered where they are used, by FSDP2 or DeepSpeed."""
        return self.is_sharded or self.zero == 3

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether processes have layers together."""
        return self.tp > 1

    @property
    def accelerate_shards(self) -> bool:
        """Whether accelerate splits the weights; it does not know how where they are parts already."""
        return self.is_sharded and not self.is_tensor_parallel

    @property
    def is_pipelined(self) -> bool:
        """Whether blocks are shared out among processes."""
        return self.pp > 1

    @property
    def pieces(self) -> int:
        """Into how many microbatches a pipeline cuts a batch."""
        return self.microbatches or self.pp

    @property
    def splits_model(self) -> bool:
        """Whether a process gets a part of the model only, so that the whole must not go to its device."""
        within_groups = self.gathers_weights or self.is_pipelined or self.is_tensor_parallel
        return within_groups or self.device_map is not None

    def _beside_dp(self) -> dict[str, int]:
        """Return the processes along each dimension besides ``dp``: together they hold the weights once."""
        return {"pp": self.pp, "shard": self.shard, "tp": self.tp}

    def replicas(self, processes: int) -> int:
        """Return how often the weights are held by ``processes`` processes.

        Raises:
            UserError: the product of all dimensions is not their number, or, without ``dp``, does not divide it; or
                ``zero`` has nobody to split among.
        """
        if self.zero is not None and processes == 1:
            raise UserError(
                f"zero = {self.zero} splits among several processes; start with torchrun --nproc-per-node 2"
            )
        once = math.prod(self._beside_dp().values())
        if self.dp is None and processes % once == 0:
            return processes // once
        needed = once * (self.dp or max(1, processes // once))
        if self.dp is None or processes != needed:
            sizes = self._beside_dp() if self.dp is None else {"dp": self.dp} | self._beside_dp()
            asked = ", ".join(f"{key} = {size}" for key, size in sizes.items() if size > 1 or key == "dp")
            raise UserError(
                f"{asked} needs {needed} processes, this run has {processes}; "
                f"start with torchrun --nproc-per-node {needed}"
            )
        return self.dp

    def mesh(self, processes: int) -> dict[str, int]:
        """Return how many of ``processes`` lie along each dimension, in the mesh's order: (pp, dp, shard, tp).

        Neighbours lie along the last. Raises as :meth:`replicas`.
        """
        sizes = {"dp": self.replicas(processes)} | self._beside_dp()
        return {key: sizes[key] for key in MESH_ORDER if key in sizes}


def parallel_conflicts(parallel: ParallelConfig, options: dict[str, tuple[object, str]]) -> Iterator[str]:
    """Yield a line for each option that does not go with ``shard``: name -> (whether it is set, reason and remedy)."""
    if parallel.is_sharded:
        yield from refused(options)


def refused(options: dict[str, tuple[object, str]]) -> Iterator[str]:
    """Yield a line for each option that is set: name -> (whether it is, reason and remedy)."""
    for key, (is_set, reason) in options.items():
        if is_set:
            yield f"{key}: {reason}"
