"""Trained rows of a frozen embedding and head: peft's ``trainable_token_indices``.

    embedding   row of W, or of R where the token is one of those that are trained
    head        x W^T, of these tokens x R^T

R [n, W] takes the place of W's rows, which are never written to. A tied head has the embedding's R.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.errors import UserError
from library.nn.frozen_linear import LinearWrapper
from networks.adapters.base import AdapterLinear, base_weight
from networks.files.weights import AdapterWeights, TokenRowWeights


class TokenRows(AdapterLinear):
    """An embedding or a head with trained rows.

    Attributes:
        token_indices: the tokens, in ascending order [n].
        token_rows: their rows [n, W].
        multiplier: strength of what was learnt.
    """

    kind, from_zero = TokenRowWeights.kind, ()
    token_indices: Tensor

    def __init__(self, base: nn.Module, tokens: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__(base, len(tokens), len(tokens))
        self.multiplier = 1.0
        weight = base.weight.detach() if isinstance(base, nn.Embedding | nn.Linear) else base_weight(base)
        if tokens[-1] >= len(weight):
            raise UserError(
                f"trainable_token_indices: the model has {len(weight)} tokens, no token {tokens[-1]}; add tokens with "
                "tools/extend_tokenizer.py"
            )
        self.register_buffer("token_indices", torch.tensor(tokens, device=weight.device), persistent=False)
        self._before = weight[self.token_indices].float()
        self.token_rows = nn.Parameter(self._before.to(dtype, copy=True))

    @property
    def in_features(self) -> int:
        """Width of the model."""
        return self.token_rows.shape[1]

    def rows(self, dtype: torch.dtype) -> Tensor:
        """Return R at its strength."""
        if self.multiplier == 1.0:
            return self.token_rows.to(dtype)
        return torch.lerp(self._before.to(self.token_rows.device), self.token_rows.float(), self.multiplier).to(dtype)

    def changed(self, out: Tensor, x: Tensor) -> Tensor:
        """See the base class; ``x`` of an embedding is tokens."""
        if not isinstance(self.base, nn.Embedding):
            return self.changed_logits(out, x)
        place = torch.searchsorted(self.token_indices, x).clamp_max(len(self.token_indices) - 1)
        return torch.where((self.token_indices[place] == x)[..., None], self.rows(out.dtype)[place], out)

    def changed_logits(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the logits ``out`` [..., V] of a head for ``x`` [..., W] with those of the trained rows."""
        return out.index_copy(-1, self.token_indices, F.linear(x, self.rows(x.dtype)).to(out.dtype))

    def weights(self, comfy: bool = True) -> AdapterWeights:
        """See the base class."""
        tensors = {"token_indices": self.token_indices, "token_rows": self.token_rows.detach()}
        return TokenRowWeights(tensors, self.alpha)

    def misfit(self, weights: AdapterWeights) -> tuple[str, str] | None:
        """See the base class."""
        tokens = self.token_indices.tolist()
        if weights.kind == self.kind and weights.tensors["token_indices"].tolist() != tokens:
            return "has rows of other tokens", "set trainable_token_indices in network_args as in the file"
        return super().misfit(weights)


class TiedHead(LinearWrapper):
    """A head whose weight is the embedding's, and so are its trained rows."""

    def __init__(self, base: nn.Module, embedding: TokenRows) -> None:
        super().__init__(base)
        self._embedding = (embedding,)  # no submodule: it has its place in the model

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., W] to logits [..., V]."""
        out, (embedding,) = self.base(x), self._embedding
        return out if embedding.bypassed else embedding.changed_logits(out, x)
