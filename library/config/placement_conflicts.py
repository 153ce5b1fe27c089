"""What does not go with a LoRA that is split with its base (``lora_placement``); see ``library.config.conflicts``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from library.config.optimizer_conflicts import BY_ELEMENT, treats_numbers_alone
from library.config.parallel_schema import ParallelConfig, refused

if TYPE_CHECKING:
    from library.config.instruction_schema import InstructionTrainConfig
    from library.config.schema import TrainConfig

_WHOLE = 'set lora_placement = "replicated"'


def placement_conflicts(config: TrainConfig | InstructionTrainConfig) -> Iterator[str]:
    """Yield a line for each option of a LoRA that does not go with splitting it."""
    parallel, kind, network = config.parallel, config.optimizer.optimizer_type, config.network.network_type
    if not parallel.splits_lora:
        return
    yield from refused(
        {
            "lora_placement": (
                not parallel.accelerate_shards or parallel.is_pipelined,
                "sharded splits the LoRA as shard splits the base, without tp and pp; set shard, or remove it",
            ),
            "optimizer_type": (
                not treats_numbers_alone(kind),
                f"{kind} does not treat every number by itself, and would have a part of the LoRA; use "
                f"{', '.join(BY_ELEMENT)}, or {_WHOLE}, with which any trains",
            ),
            "network_type": (network != "lora", f"of {network} nothing is split; train a lora, or {_WHOLE}"),
            "ema_decay": (config.saving.ema_decay, f"averages are of whole weights; remove it, or {_WHOLE}"),
            "nonfinite": (
                config.training.nonfinite != "stop",
                f'a single image\'s gradients are not had of a split LoRA; set nonfinite = "stop", or {_WHOLE}',
            ),
        }
    )


def no_placement(parallel: ParallelConfig) -> Iterator[str]:
    """Yield a line if a placement is set where there is no LoRA."""
    if "lora_placement" in parallel.model_fields_set:
        yield "lora_placement: there is no LoRA, shard splits all weights; remove it"
