"""What does not go with one process that drives several GPUs (``device_map``); see ``library.config.conflicts``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from library.config.outcomes import trains_text_encoders
from library.config.parallel_schema import ParallelConfig, refused

if TYPE_CHECKING:
    from library.config.instruction_schema import InstructionTrainConfig
    from library.config.schema import TrainConfig


def device_map_conflicts(config: TrainConfig | InstructionTrainConfig) -> Iterator[str]:
    """Yield a line for each option of a LoRA that does not go with ``device_map``."""
    parallel, training = config.parallel, config.training
    if parallel.device_map is None:
        return
    if not hasattr(config, "flow"):
        yield from no_device_map(parallel)
        return
    several = max(parallel.dp or 1, parallel.shard, parallel.tp, parallel.pp) > 1
    yield from refused(
        {
            "device_map": (several, "one process drives all GPUs; remove it, or dp, shard, tp and pp"),
            "blocks_to_swap": (training.blocks_to_swap, "has blocks on one device in turn; remove one of them"),
            "cpu_offload_checkpointing": (
                training.cpu_offload_checkpointing,
                "brings inputs back to one device; remove one of them",
            ),
            "torch_compile": (config.accelerate.torch_compile, "is not made for device_map; remove one of them"),
            "preflight": (training.preflight, "looks at one device; remove it, or device_map"),
            "mixed_precision": (training.mixed_precision == "fp16", 'fp16 is not made for device_map; set "bf16"'),
            "text_encoder_lr": (
                trains_text_encoders(config),
                "text encoders are not dealt out; remove it, or device_map",
            ),
        }
    )


def no_device_map(parallel: ParallelConfig) -> Iterator[str]:
    """Yield a line if ``device_map`` is set for a language model."""
    if parallel.device_map is not None:
        yield "device_map: is for LoRAs on image models; set shard, tp or pp, with a process a GPU"
