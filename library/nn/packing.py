"""Several documents in one window: positions that begin anew, and attention that stays within a document.

``documents`` [B, S] numbers the document of every token; equal numbers stand side by side. Attention is then causal in
blocks along the diagonal. The mask is one byte for each pair of tokens of a window, made once and used by all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def document_positions(documents: Tensor) -> Tensor:
    """Return each token's position in its document, [B, S] int64 from 0."""
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return place - place.where(begins, 0).cummax(dim=1).values


def document_mask(documents: Tensor) -> Tensor:
    """Return who sees whom, [B, 1, S, S] bool: a token itself and those before it in its document."""
    length = documents.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & earlier)[:, None]
