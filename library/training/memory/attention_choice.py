"""Which kernel a run's attention takes, said at its start; one that was asked for is tried, and refused where it fails.

PyTorch chooses from device, dtype, sizes, and whether there is a mask. What it chooses is asked of PyTorch itself, for
tensors of the largest bucket's size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from library.config.schema import TrainingConfig
from library.data.dataset import TrainingData
from library.errors import UserError
from library.models.family import Family
from library.nn.attention import Backend, attend, chosen_backend
from library.training.memory.dry_run import largest

_TRIED = 64  # tokens; kernels care for the head's width and dtype, not for how many there are


@dataclass(frozen=True)
class AttentionShape:
    """What attention sees in a step.

    Attributes:
        heads, head_dim: of the transformer.
        tokens: of the largest image.
        padded: whether texts of a batch are padded, and so masked.
    """

    heads: int
    head_dim: int
    tokens: int
    padded: bool


def attention_of_run(
    training: TrainingConfig, family: Family, data: TrainingData, dtype: torch.dtype, device: torch.device
) -> str:
    """Return :func:`choose_attention` of a run's largest bucket; ``dtype`` is that of the frozen weights."""
    sample, batch = largest(data, family)
    width, height = sample.fit.bucket
    tokens = (width // data.pixel_multiple) * (height // data.pixel_multiple)
    shape = AttentionShape(*family.attention_heads(), tokens, family.masks_padding and batch > 1)
    precision = training.mixed_precision
    computed_in = dtype if precision == "no" else torch.bfloat16 if precision == "bf16" else torch.float16
    return choose_attention(training.attention, shape, computed_in, device)


def choose_attention(asked: Backend, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> str:
    """Return in words which kernel attention takes: "flash"; another one where texts are padded is added.

    Raises:
        UserError: the kernel that was asked for cannot run here.
    """
    masks = (False, True) if shape.padded else (False,)
    if asked != "auto":
        for masked in masks:
            _try(asked, shape, dtype, device, masked)
        return f"{asked}, as asked"
    plain, *others = (_chosen(shape, dtype, device, masked) for masked in masks)
    return f"{plain}; {others[0]} where texts are padded" if others and others[0] != plain else plain


def _chosen(shape: AttentionShape, dtype: torch.dtype, device: torch.device, masked: bool) -> str:
    query, key, value, mask = _tensors(shape, shape.tokens, dtype, device, masked)
    return chosen_backend(query, key, value, mask=mask)


def _try(asked: Backend, shape: AttentionShape, dtype: torch.dtype, device: torch.device, masked: bool) -> None:
    """Take a forward and a backward pass of few tokens."""
    query, key, value, mask = _tensors(shape, _TRIED, dtype, device, masked)
    try:
        attend(query, key, value, mask=mask, backend=asked).sum().backward()
    except UserError:
        what = f"{str(dtype).removeprefix('torch.')} heads of {shape.head_dim} on {device.type}"
        padded = " with padded texts, as larger batches have" if masked else ""
        raise UserError(f"attention: {asked} cannot compute {what}{padded}; remove it: auto finds what can") from None


def _tensors(
    shape: AttentionShape, tokens: int, dtype: torch.dtype, device: torch.device, masked: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return query, key and value of one image, and a mask."""
    size = (1, tokens, shape.heads, shape.head_dim)
    query, key, value = (torch.empty(size, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    return query, key, value, torch.ones(1, tokens, dtype=torch.bool, device=device) if masked else None
