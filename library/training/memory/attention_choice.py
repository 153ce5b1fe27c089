"""Which kernel a run's attention takes, said at its start; one that was asked for is tried, and refused where it fails.

PyTorch chooses from device, dtype, sizes, and whether there is a mask. What it chooses is asked of PyTorch itself, for
tensors of the largest bucket's size.
"""

from __future__ import annotations

import torch

from library.config.schema import TrainingConfig
from library.data.dataset import TrainingData
from library.errors import UserError
from library.models.family import Family
from library.nn.attention import Backend, attend, chosen_backend
from library.training.memory.dry_run import largest

_TRIED = 64  # tokens; kernels care for the head's width and dtype, not for how many there are


def attention_of_run(
    training: TrainingConfig, family: Family, data: TrainingData, dtype: torch.dtype, device: torch.device
) -> str:
    """Return :func:`choose_attention` of a run's largest bucket; ``dtype`` is that of the frozen weights."""
    sample, batch = largest(data)
    width, height = sample.fit.bucket
    tokens = (width // data.pixel_multiple) * (height // data.pixel_multiple)
    precision = training.mixed_precision
    computed_in = dtype if precision == "no" else torch.bfloat16 if precision == "bf16" else torch.float16
    shape, padded = (1, tokens, *family.attention_heads()), family.masks_padding and batch > 1
    return choose_attention(training.attention, shape, padded, computed_in, device)


def choose_attention(
    asked: Backend, shape: tuple[int, int, int, int], padded: bool, dtype: torch.dtype, device: torch.device
) -> str:
    """Return in words which kernel attention takes: "flash"; another one where texts are padded is added.

    Args:
        asked: the option.
        shape: [1, tokens, heads, width] of the largest image's queries.
        padded: whether texts of a batch are padded, and so masked.
        dtype: that is computed in.
        device: where.

    Raises:
        UserError: the kernel that was asked for cannot run here.
    """
    found = []
    tokens = shape[1] if asked == "auto" else _TRIED
    for masked in (False, True)[: 1 + padded]:
        size = (1, tokens, *shape[2:])
        projections = [torch.empty(size, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
        mask = torch.ones(1, tokens, dtype=torch.bool, device=device) if masked else None
        if asked == "auto":
            found.append(chosen_backend(*projections, mask=mask))
            continue
        try:
            attend(*projections, mask=mask, backend=asked).sum().backward()
        except UserError:
            what = f"{str(dtype).removeprefix('torch.')} heads of {shape[3]} on {device.type}"
            with_mask = " with padded texts, as larger batches have" if masked else ""
            raise UserError(
                f"attention: {asked} cannot compute {what}{with_mask}; remove it: auto finds what can"
            ) from None
    if asked != "auto":
        return f"{asked}, as asked"
    return found[0] if found[-1] == found[0] else f"{found[0]}; {found[1]} where texts are padded"
