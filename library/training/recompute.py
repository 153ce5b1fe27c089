"""Gradient checkpointing as the settings ask for it, put into a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from library.nn.host_offload import HostOffload
from library.nn.recomputation import Recomputation

if TYPE_CHECKING:
    from library.config.memory_schema import RecomputationKeys


def recompute_blocks(model: Any, blocks: int, training: RecomputationKeys, device: torch.device) -> None:
    """Let ``model`` compute its blocks again in backward, if ``training`` says so.

    Args:
        model: a transformer of diffusers or a ``TransformerLM``.
        blocks: how many it has.
        training: which blocks, what is kept all the same, where inputs wait.
        device: where the model computes.
    """
    if not training.gradient_checkpointing:
        return
    offload = HostOffload(device) if training.cpu_offload_checkpointing else None
    keep = training.checkpoint_keep_mb * 2**20
    model.enable_gradient_checkpointing(Recomputation(blocks, training.checkpoint_every_n_blocks, keep, offload))
