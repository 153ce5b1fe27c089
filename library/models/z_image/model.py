"""Tandem's hot paths in diffusers' Z-Image transformer: ``optimise_forward`` puts them in, parameter names stay.

What is replaced, and why:

- *attention*: q, k and v are projected together (LoRAs on one input share their down projection), then RMSNorm, RoPE
  and attention of ``library.nn``.
- *feed-forward*: both inner layers are projected together, and what the outer one takes is made again in backward.
- *position table*: diffusers' own numbers, as real cosines and sines: compilers have no complex numbers.
- *RMSNorm*: ours keep the dtype of their input under autocast, so q and k stay bf16 beside v.
- *timestep embedding*: diffusers gives it the dtype of its first layer's weight, which may be fp8; here it is the
  dtype of that layer's bias, which never is. diffusers does not round the timestep itself: nothing else to mend.

Sequences, their padding and their positions stay diffusers': a caption is filled up to a multiple of 32 tokens with a
learned one that is attended to, so a sample alone and in a batch gives the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import ZImageTransformer2DModel
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from diffusers.models.transformers import transformer_z_image as diffusers_z
from torch import Tensor, nn

from library.nn.attention import Backend, attend
from library.nn.frozen_linear import project_recomputed, project_together
from library.nn.norms import RMSNorm
from library.nn.rope import rotate_interleaved


def optimise_forward(transformer: ZImageTransformer2DModel, backend: Backend = "auto") -> ZImageTransformer2DModel:
    """Replace the forward of attention, feed-forward, RMSNorm, RoPE table and timestep embedding; return the model.

    Parameters are shared, not copied, and keep their names; LoRA may be injected before or after.
    """
    for parent in list(transformer.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (nn.RMSNorm, DiffusersRMSNorm)):
                setattr(parent, name, RMSNorm.adopt(child))
        if type(parent) is diffusers_z.FeedForward:
            parent.__class__ = FeedForward
        elif type(parent) is diffusers_z.TimestepEmbedder:
            parent.__class__ = TimestepEmbedder
        elif isinstance(parent, diffusers_z.ZImageTransformerBlock):
            parent.attention.set_processor(AttentionProcessor(backend))
    if not isinstance(transformer.rope_embedder, RealTable):
        transformer.rope_embedder = RealTable(transformer.rope_embedder)
    return transformer


class RealTable:
    """diffusers' position table as real numbers."""

    def __init__(self, original: diffusers_z.RopeEmbedder) -> None:
        self._original = original

    def __call__(self, ids: Tensor) -> Tensor:
        """Return cosines, then sines, fp32 [S, D], of tokens at ``ids`` [S, 3]."""
        turns = self._original(ids)
        return torch.cat([turns.real, turns.imag], dim=-1)


class AttentionProcessor:
    """Self-attention of one stream of picture and text."""

    def __init__(self, backend: Backend = "auto") -> None:
        self.backend: Backend = backend

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            attn: diffusers' ``Attention``, whose projections may be LoRA-wrapped.
            hidden_states: [B, S, W].
            encoder_hidden_states: of no meaning here.
            attention_mask: boolean [B, S], true for tokens that count; None: all do.
            freqs_cis: fp32 [B, S, D], from :class:`RealTable`: a turn for each pair of numbers of each token.
        """
        head_dim = attn.inner_dim // attn.heads
        projected = project_together([attn.to_q, attn.to_k, attn.to_v], hidden_states)
        query, key, value = (tensor.unflatten(-1, (-1, head_dim)) for tensor in projected)
        query, key = attn.norm_q(query), attn.norm_k(key)
        if freqs_cis is not None:
            table = freqs_cis[..., : head_dim // 2], freqs_cis[..., head_dim // 2 :]
            query, key = rotate_interleaved(query, table), rotate_interleaved(key, table)
        attended = attend(query, key, value, mask=attention_mask, backend=self.backend).flatten(2)
        return attn.to_out[1](attn.to_out[0](attended))


class FeedForward(diffusers_z.FeedForward):
    """w2(silu(w1(x)) * w3(x))."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, S, W] to the same."""
        gate, up = project_together([self.w1, self.w3], x)
        (out,) = project_recomputed([self.w2], _gated, gate, up)
        return out


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


class TimestepEmbedder(diffusers_z.TimestepEmbedder):
    """diffusers' embedding, whose layers may hold fp8."""

    def forward(self, t: Tensor) -> Tensor:
        """Return the conditioning vector [B, W] of timesteps ``t`` [B] fp32, 0 to 1000."""
        waves = self.timestep_embedding(t, self.frequency_embedding_size)
        dtype = next(parameter.dtype for name, parameter in self.mlp.named_parameters() if name.endswith("bias"))
        return self.mlp(waves.to(dtype))
