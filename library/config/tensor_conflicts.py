"""What does not go with layers that processes have together (``tp``); see ``library.config.conflicts``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from library.config.optimizer_conflicts import BY_ELEMENT, treats_numbers_alone
from library.config.outcomes import trains_text_encoders
from library.config.parallel_schema import refused

if TYPE_CHECKING:
    from library.config.instruction_schema import InstructionTrainConfig
    from library.config.llm_schema import LLMConfig
    from library.config.schema import TrainConfig

_ALONE = "is not made for tp; remove one of them"


def tensor_conflicts(config: TrainConfig | InstructionTrainConfig) -> Iterator[str]:
    """Yield a line for each option of a LoRA that does not go with ``tp``."""
    if not config.parallel.is_tensor_parallel:
        return
    training, kind, rounds = config.training, config.network.network_type, config.precision.fp8_activations != "none"
    whole = f"{kind} changes whole weights, of which tp leaves parts; train a lora, or set tp = 1"
    yield from refused(
        {
            "network_type": (kind != "lora", whole),
            "blocks_to_swap": (training.blocks_to_swap, "moves whole weights, which tp splits; remove one of them"),
            "fp8_activations": (rounds, "rounds by whole inputs, of which tp gives a layer a part; remove one of them"),
            "torch_compile": (config.accelerate.torch_compile, _ALONE),
            "preflight": (training.preflight, "loads the model whole for its trial; remove it, or set tp = 1"),
            "mixed_precision": (training.mixed_precision == "fp16", 'fp16 is not made for tp; set "bf16"'),
            "text_encoder_lr": (trains_text_encoders(config), "text encoders are not split; remove it, or set tp = 1"),
        }
    )


def llm_tensor_conflicts(config: LLMConfig) -> Iterator[str]:
    """Yield a line for each option of pretraining that does not go with ``tp``."""
    if not config.parallel.is_tensor_parallel:
        return
    kind, fit = config.optimizer.optimizer_type, ", ".join(BY_ELEMENT)
    yield from refused(
        {
            "optimizer_type": (
                not treats_numbers_alone(kind),
                f"{kind} needs whole matrices, which tp splits; use {fit}, or set tp = 1",
            ),
            "full_bf16": (
                config.training.full_bf16,
                'rounds whole tensors, which tp splits; set mixed_precision = "bf16" instead',
            ),
            "torch_compile": (config.accelerate.torch_compile, _ALONE),
        }
    )
