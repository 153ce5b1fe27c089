"""What several options of a LoRA come to together, for the rules that refuse what does not go with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from library.config.instruction_schema import InstructionTrainConfig
    from library.config.schema import TrainConfig


def trains_text_encoders(config: TrainConfig | InstructionTrainConfig) -> bool:
    """Whether text encoders are trained, beside the transformer or alone."""
    return config.network.network_train_text_encoder_only or any(config.optimizer.text_encoder_lr)


def saves_with_base_weights(config: TrainConfig | InstructionTrainConfig) -> bool:
    """Whether saving takes the base's weights, not only what is trained: DoRA in the other programs' layouts."""
    is_dora, save_format = config.network.network_type == "dora", config.saving.save_format
    of_images = config.model.model_type not in ("llama", "gpt2")  # theirs is peft's whatever the key says
    return is_dora and of_images and save_format not in ("diffusers", "peft")
