"""Options of a LoRA on a language model that could only be ignored; see ``library.config.conflicts``."""

from __future__ import annotations

from collections.abc import Iterator

from library.config.conflicts import shared_conflicts
from library.config.instruction_schema import InstructionTrainConfig
from library.config.section import unused


def find_instruction_conflicts(config: InstructionTrainConfig) -> Iterator[str]:
    """Yield every conflict among the options, as one line with its remedy."""
    yield from shared_conflicts(config)
    data, sampling, validation = config.instructions, config.sampling, config.validation
    if config.network.network_type not in ("lora", "dora"):
        kind = config.network.network_type
        yield f"network_type: peft's {kind} has another form; a language model takes lora and dora"
    if data.validation_data and data.validation_split:
        yield "validation_split: validation_data is what is validated on; remove one of them"
    if config.training.nonfinite == "rollback":
        yield "nonfinite: rollback leaves single images out; with conversations choose stop or skip"
    keys = ("validate_every_n_steps", "validate_every_n_epochs", "max_validation_conversations")
    held_out = bool(data.validation_data) or data.validation_split > 0
    yield from unused(validation, keys, not held_out, "without validation_data or validation_split")
    times = ("sample_every_n_steps", "sample_every_n_epochs", "sample_at_first", "sample_at_end")
    how = ("sample_tokens", "sample_temperature", "sample_top_p")
    yield from unused(sampling, (*times, *how), not sampling.sample_prompts, "without sample_prompts")
    greedy = bool(sampling.sample_prompts) and sampling.sample_temperature == 0
    yield from unused(sampling, ("sample_top_p",), greedy, "at sample_temperature 0 (greedy)")
