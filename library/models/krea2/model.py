"""Krea 2's transformer with an optimised forward (:func:`optimise_forward`, ``library.models.blocks``).

One stream, text then image, and a small transformer in front of it that makes one vector of the several that the text
encoder gives for a token. Beside attention and blocks:

- *norms* multiply by 1 + weight. diffusers computes that in fp32 and saves an fp32 copy of the input for backward; here
  the norms stand with the modulation in what backward recomputes. Both are computed in fp32 and rounded once;
- *attention's gate* is projected with q, k and v; its product with what attention gives is recomputed;
- *position table*: one cosine and one sine per pair.

diffusers does not round the timestep: nothing to mend.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers import Krea2Transformer2DModel
from diffusers.models.transformers import transformer_krea2 as diffusers_krea2
from torch import Tensor

from library.models.blocks import AttentionProcessor, adopt
from library.nn.attention import Backend
from library.nn.frozen_linear import project_recomputed
from library.nn.norms import swiglu
from library.nn.rope import MultiAxisRope, Table


def optimise_forward(transformer: Krea2Transformer2DModel, backend: Backend = "auto") -> Krea2Transformer2DModel:
    """Replace the forward of blocks, attention, norms and position table in place; return the model.

    Parameters are shared, not copied, and keep their names; LoRA may be injected before or after.
    """
    adopt(
        transformer,
        Krea2RMSNorm,
        Krea2Attention,
        Krea2SwiGLU,
        Krea2TextFusionBlock,
        Krea2TransformerBlock,
        Krea2FinalLayer,
    )
    transformer.set_attn_processor(AttentionProcessor(backend))
    transformer.rotary_emb = MultiAxisRope(transformer.config.axes_dims_rope, transformer.config.rope_theta)
    return transformer


class Krea2RMSNorm(diffusers_krea2.Krea2RMSNorm):
    """x / sqrt(mean(x²) + eps) * (1 + weight), and the modulation behind it."""

    def forward(self, x: Tensor, shift: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        """Return the norm of ``x`` [..., W], times (1 + scale) plus shift, these [B, 1, W]; the dtype stays."""
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = F.rms_norm(x.to(wide), (self.dim,), self.weight.to(wide) + 1, self.eps)
        if scale is not None and shift is not None:
            normed = torch.addcmul(shift.to(wide), normed, scale.to(wide) + 1)
        return normed.to(x.dtype)


class Krea2Attention(diffusers_krea2.Krea2Attention):
    """Attention of few key and value heads, its output times a gate."""

    @property
    def inner_dim(self) -> int:
        """Width of all query heads."""
        return self.hidden_size

    @property
    def heads(self) -> int:
        """How many query heads there are."""
        return self.num_heads

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Table | None = None,
        norm: Callable[..., Tensor] = torch.clone,
        modulation: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """Return the update [B, S, W] of ``hidden_states`` [B, S, W], which ``norm`` takes with ``modulation``.

        ``attention_mask``: boolean [B, 1, 1, S], true for real tokens.
        """
        layers = [self.to_q, self.to_k, self.to_v, self.to_gate]
        *qkv, gate = project_recomputed(layers, norm, hidden_states, *modulation)
        attended = self.processor.attend(self, qkv, None, image_rotary_emb, attention_mask)
        return project_recomputed([self.to_out[0]], _gated, attended, gate)[0]


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    return x * gate.sigmoid()


class Krea2SwiGLU(diffusers_krea2.Krea2SwiGLU):
    """down(silu(gate(x)) * up(x))."""

    def forward(self, x: Tensor, *more: Tensor, prologue: Callable[..., Tensor] = torch.clone) -> Tensor:
        """Return what the layers make of ``prologue(x, *more)``, of which ``x`` and ``more`` are saved."""
        gate, up = project_recomputed([self.gate, self.up], prologue, x, *more)
        return project_recomputed([self.down], swiglu, gate, up)[0]


class Krea2TextFusionBlock(diffusers_krea2.Krea2TextFusionBlock):
    """A block of the text's transformer: no positions, no modulation."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Map [B, S, W] to the same."""
        update = self.attn(hidden_states, attention_mask, norm=self.norm1)
        return hidden_states + update + self.ff(hidden_states, update, prologue=lambda x, y: self.norm2(x + y))


class Krea2TransformerBlock(diffusers_krea2.Krea2TransformerBlock):
    """A block of text and image."""

    def forward(
        self,
        hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Table,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Map [B, L + S, W] to the same.

        Args:
            hidden_states: text, then image.
            temb: the modulation that all blocks share, [B, 1, 6W], to which the block adds its table.
            image_rotary_emb: (cos, sin), each [L + S, D/2].
            attention_mask: boolean [B, 1, 1, L + S], true for real tokens; None: all are.
        """
        modulation = (temb.unflatten(-1, (6, -1)) + self.scale_shift_table).to(hidden_states.dtype)
        scale1, shift1, gate1, scale2, shift2, gate2 = modulation.unbind(-2)  # each [B, 1, W]
        update = self.attn(hidden_states, attention_mask, image_rotary_emb, self.norm1, (shift1, scale1))

        def normed(x: Tensor, gate: Tensor, y: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
            return self.norm2(x + gate * y, shift, scale)

        second = self.ff(hidden_states, gate1, update, shift2, scale2, prologue=normed)
        return hidden_states + gate1 * update + gate2 * second


class Krea2FinalLayer(diffusers_krea2.Krea2FinalLayer):
    """The norm and the projection of image tokens to latents."""

    def forward(self, hidden_states: Tensor, temb: Tensor) -> Tensor:
        """Return tokens [B, S, p²C] of ``hidden_states`` [B, S, W] and the timestep's vector ``temb`` [B, 1, W]."""
        scale, shift = (temb + self.scale_shift_table).to(hidden_states.dtype).chunk(2, dim=1)
        return project_recomputed([self.linear], self.norm, hidden_states, shift, scale)[0]
