"""What does not go with DeepSpeed's ZeRO (``zero``); see ``library.config.conflicts``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from library.config.optimizer_conflicts import BY_ELEMENT, treats_numbers_alone
from library.config.outcomes import saves_with_base_weights, trains_text_encoders
from library.config.parallel_schema import ParallelConfig, refused

if TYPE_CHECKING:
    from library.config.instruction_schema import InstructionTrainConfig
    from library.config.schema import TrainConfig

_ALONE = "is not made for zero; remove one of them"
NO_FP8 = (
    "zero = 3 gathers weights in their own dtype, and gloo takes no fp8 (NCCL was not tried); set zero = 2, or shard"
)


def zero_conflicts(config: TrainConfig | InstructionTrainConfig) -> Iterator[str]:
    """Yield a line for each option of a LoRA that does not go with ``zero``."""
    parallel, training, precision = config.parallel, config.training, config.precision
    if parallel.zero is None:
        return
    kind, splits_weights = config.optimizer.optimizer_type, parallel.zero == 3
    several = max(parallel.shard, parallel.tp, parallel.pp) > 1 or parallel.device_map is not None
    fit, save_format = ", ".join(BY_ELEMENT), config.saving.save_format
    yield from refused(
        {
            "zero": (several, "splits among all processes; remove it, or shard, tp, pp and device_map"),
            "optimizer_type": (
                not treats_numbers_alone(kind),
                f"{kind} does not treat every number by itself, and zero gives it parts of flat tensors; use {fit}, or "
                "shard, with which any trains",
            ),
            "fp8_base": (splits_weights and precision.fp8_base, NO_FP8),
            "fp8_scaled": (splits_weights and precision.fp8_scaled, NO_FP8),
            "save_format": (
                splits_weights and saves_with_base_weights(config),
                f"{save_format}'s DoRA is made with whole base weights, which zero = 3 splits; set "
                'save_format = "diffusers"',
            ),
            "blocks_to_swap": (training.blocks_to_swap, "DeepSpeed puts the model on its device; remove one of them"),
            "torch_compile": (config.accelerate.torch_compile, _ALONE),
            "preflight": (training.preflight, "DeepSpeed's engine is not taken down after a trial; remove it, or zero"),
            "mixed_precision": (training.mixed_precision == "fp16", 'fp16 is not made for zero; set "bf16"'),
            "full_bf16": (training.full_bf16, "DeepSpeed steps on fp32 copies; remove one of them"),
            "text_encoder_lr": (
                trains_text_encoders(config),
                "DeepSpeed trains a single network; remove it, or zero",
            ),
        }
    )


def no_zero(parallel: ParallelConfig) -> Iterator[str]:
    """Yield a line if ``zero`` is set where all weights are trained."""
    if parallel.zero is not None:
        yield "zero: is for LoRAs; set shard, which splits weights, gradients and optimizer as zero = 3 does"
