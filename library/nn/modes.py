"""The mode in which a model is looked at and not trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Inside the block nothing is recorded, and every submodule is in eval mode; then it is in its own again."""
    training = [child for module in modules for child in module.modules() if child.training]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for child in training:
            child.training = True
