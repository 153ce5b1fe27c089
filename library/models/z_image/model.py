"""Z-Image's transformer with an optimised forward (:func:`optimise_forward`, ``library.models.blocks``).

Beside norms and attention:

- *feed-forward*: both inner layers are projected together, and what the outer one takes is recomputed in backward;
- *position table*: diffusers' own numbers, as real cosines and sines: compilers have no complex numbers;
- *timestep embedding*: diffusers gives it the dtype of its first layer's weight, which may be fp8; here it is the
  dtype of that layer's bias, which never is. diffusers does not round the timestep itself: nothing else to mend.

Sequences, their padding and their positions stay diffusers': a caption is filled up to a multiple of 32 tokens with a
learned one that is attended to, so a sample alone and in a batch gives the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ZImageTransformer2DModel
from diffusers.models.transformers import transformer_z_image as diffusers_z
from torch import Tensor

from library.models.blocks import AttentionProcessor, adopt
from library.nn.attention import Backend
from library.nn.frozen_linear import project_recomputed, project_together
from library.nn.norms import swiglu


def optimise_forward(transformer: ZImageTransformer2DModel, backend: Backend = "auto") -> ZImageTransformer2DModel:
    """Replace the forward of attention, feed-forward, RMSNorm, RoPE table and timestep embedding; return the model.

    Parameters are shared, not copied, and keep their names; LoRA may be injected before or after.
    """
    adopt(transformer, FeedForward, TimestepEmbedder)
    for module in transformer.modules():
        if isinstance(module, diffusers_z.ZImageTransformerBlock):
            module.attention.set_processor(CallableProcessor(backend))
    if not isinstance(transformer.rope_embedder, RealTable):
        transformer.rope_embedder = RealTable(transformer.rope_embedder)
    return transformer


class CallableProcessor(AttentionProcessor):
    """The processor as diffusers' attention calls it."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Tensor | None = None,
    ) -> Tensor:
        """Return the update [B, S, W] of ``hidden_states``; ``freqs_cis``: cosines, then sines, [B, S, D]."""
        qkv = project_together([attn.to_q, attn.to_k, attn.to_v], hidden_states)
        rope = None if freqs_cis is None else freqs_cis.chunk(2, dim=-1)
        return attn.to_out[1](attn.to_out[0](self.attend(attn, qkv, None, rope, attention_mask)))


class RealTable:
    """diffusers' position table as real numbers."""

    def __init__(self, original: diffusers_z.RopeEmbedder) -> None:
        self._original = original

    def __call__(self, ids: Tensor) -> Tensor:
        """Return cosines, then sines, fp32 [S, D], of tokens at ``ids`` [S, 3]."""
        turns = self._original(ids)
        return torch.cat([turns.real, turns.imag], dim=-1)


class FeedForward(diffusers_z.FeedForward):
    """w2(silu(w1(x)) * w3(x))."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, S, W] to the same."""
        gate, up = project_together([self.w1, self.w3], x)
        (out,) = project_recomputed([self.w2], swiglu, gate, up)
        return out


class TimestepEmbedder(diffusers_z.TimestepEmbedder):
    """diffusers' embedding, whose layers may hold fp8."""

    def forward(self, t: Tensor) -> Tensor:
        """Return the conditioning vector [B, W] of timesteps ``t`` [B] fp32, 0 to 1000."""
        waves = self.timestep_embedding(t, self.frequency_embedding_size)
        dtype = next(parameter.dtype for name, parameter in self.mlp.named_parameters() if name.endswith("bias"))
        return self.mlp(waves.to(dtype))
