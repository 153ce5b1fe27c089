"""The keys that say what lies where in a step: computed again in backward instead of kept, or in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from library.config.section import Positive, Section

_REFINEMENTS = ("checkpoint_every_n_blocks", "checkpoint_keep_mb", "cpu_offload_checkpointing")


class RecomputationKeys(Section):
    """Keys of the section ``training``; ``library.nn.recomputation`` says what they do."""

    gradient_checkpointing: bool = Field(False, description="recompute blocks in backward: less memory, more time")
    checkpoint_every_n_blocks: Positive = Field(
        1, description="with gradient_checkpointing, recompute one of so many neighbouring blocks; 1: all"
    )
    checkpoint_keep_mb: Annotated[int, Field(ge=0)] = Field(
        0,
        description="with gradient_checkpointing, keep so many MiB that need not be kept, what saves most time first: "
        "outputs of attention, then whole blocks",
    )
    cpu_offload_checkpointing: bool = Field(
        False, description="with gradient_checkpointing, keep the blocks' inputs in host memory until backward"
    )


class MemoryKeys(RecomputationKeys):
    """The same for models that a LoRA of images is trained on."""

    blocks_to_swap: Annotated[int, Field(ge=0)] = Field(
        0,
        description="blocks whose frozen weights stay in host memory and are copied in as they run; at most 35 of "
        "FLUX, 58 of Qwen-Image, 28 of Z-Image",
    )
    memory: Literal["manual", "auto"] = Field(
        "manual",
        description="manual: as the keys above say; auto: take real steps before anything is cached, and choose the "
        "fastest of gradient_checkpointing, checkpoint_keep_mb, cpu_offload_checkpointing and blocks_to_swap that fits",
    )


def recomputation_conflicts(training: RecomputationKeys, torch_compile: bool) -> Iterator[str]:
    """Yield a line for each key that has no effect or cannot work."""
    if not training.gradient_checkpointing:
        for key in _REFINEMENTS:
            if key in training.model_fields_set:
                yield f"{key}: has no effect without gradient_checkpointing; set it too, or remove this"
    if training.checkpoint_keep_mb and torch_compile:
        yield "checkpoint_keep_mb: a compiled block does not show what it keeps; remove it or torch_compile"
