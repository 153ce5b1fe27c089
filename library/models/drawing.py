"""What drawing a picture during training needs, whatever the family: the bare network, its modes, its precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from library.errors import UserError


def unwrapped(module: nn.Module) -> Any:
    """Return the module inside DDP and compile wrappers."""
    while True:
        inner = module._modules.get("_orig_mod") or module._modules.get("module")
        if inner is None:
            return module
        module = inner


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch every submodule to eval mode and back to the mode it was in."""
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True


def drawing_autocast(transformer: Any, dtype: torch.dtype | None) -> AbstractContextManager:
    """Autocast to ``dtype``, the base's (None: the transformer's own), if that is a 16-bit one; else change nothing."""
    dtype = dtype or transformer.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return nullcontext()
    return torch.autocast(transformer.device.type, dtype)


def check_size(width: int, height: int, multiple: int) -> None:
    """Raise a UserError unless both sides are multiples of ``multiple``."""
    if width % multiple or height % multiple:
        raise UserError(f"sample of {width} x {height} pixels: both must be multiples of {multiple}")


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")
