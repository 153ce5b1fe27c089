"""Tandem's hot paths in diffusers' FLUX transformer: ``swap_hot_paths`` puts them in, parameter names stay.

What is replaced, and why:

- *attention*: q, k and v are projected together (LoRAs on one input share their down projection), then
  RMSNorm, RoPE and attention of ``library.nn``.
- *blocks*: their forward, ``library.models.flux_blocks``, keeps less for backward.
- *RMSNorm*: ours keep the dtype of their input under autocast, so q and k stay bf16 beside v.
- *position table*: one cosine and sine per pair instead of two.
- *timestep embedding*: diffusers casts the timestep to the compute dtype, *then* multiplies by 1000 and takes
  sines of it. In bf16, 0.711 x 1000 becomes 712, and sin(712) is a whole radian off. Here the timestep
  travels beside the pooled text in fp32, and only the finished embedding is rounded. With an fp32 model
  nothing changes. The guidance scale keeps diffusers' rounding.

Everything else (checkpointing, configs, saving) stays diffusers'. In fp32 the result is bit for bit
that of the unchanged transformer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from diffusers import FluxTransformer2DModel
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from torch import Tensor, nn

from library.models.flux_blocks import swap_blocks
from library.nn.attention import Backend, Stream, attend_together
from library.nn.norms import RMSNorm
from library.nn.projection import project_together
from library.nn.rope import MultiAxisRope, Table


def swap_hot_paths(transformer: FluxTransformer2DModel, backend: Backend = "auto") -> FluxTransformer2DModel:
    """Replace the forward of blocks, attention, RMSNorm, RoPE table and timestep embedding in place; return the model.

    Parameters are shared, not copied, and keep their names; LoRA may be injected before or after.
    """
    for parent in list(transformer.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (nn.RMSNorm, DiffusersRMSNorm)):
                setattr(parent, name, RMSNorm.adopt(child))
    transformer.set_attn_processor(FluxAttentionProcessor(backend))
    swap_blocks(transformer)
    transformer.pos_embed = MultiAxisRope(transformer.config.axes_dims_rope, theta=transformer.pos_embed.theta)
    if not isinstance(transformer.time_text_embed, ExactTimeTextEmbedding):
        transformer.time_text_embed = ExactTimeTextEmbedding(transformer.time_text_embed)
        transformer.register_forward_pre_hook(_before_forward, with_kwargs=True)
    return transformer


class FluxAttentionProcessor:
    """Joint attention of a double block (two streams) or self-attention of a single block (one stream)."""

    def __init__(self, backend: Backend = "auto") -> None:
        self.backend: Backend = backend

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Table | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend.

        Args:
            attn: diffusers' ``FluxAttention``, whose projections may be LoRA-wrapped.
            hidden_states: [B, S, W]; in a single block text and image together.
            encoder_hidden_states: text stream [B, L, W] of a double block, or None.
            attention_mask: boolean or additive, [B, keys] or broadcastable to [B, H, queries, keys].
            image_rotary_emb: (cos, sin), each [L + S, D/2].

        Returns:
            [B, S, W]; or (image, text) in a double block.
        """
        image = project_together([attn.to_q, attn.to_k, attn.to_v], hidden_states)
        if encoder_hidden_states is None:
            return self.attend(attn, image, None, image_rotary_emb, attention_mask)
        text = project_together([attn.add_q_proj, attn.add_k_proj, attn.add_v_proj], encoder_hidden_states)
        attended = self.attend(attn, image, text, image_rotary_emb, attention_mask)
        length = encoder_hidden_states.shape[1]
        image_out = attn.to_out[1](attn.to_out[0](attended[:, length:].contiguous()))
        return image_out, attn.to_add_out(attended[:, :length].contiguous())

    def attend(
        self,
        attn: Any,
        image: Sequence[Tensor],
        text: Sequence[Tensor] | None,
        rope: Table | None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return attention over text and image, [B, L + S, W], of projected q, k and v.

        Args:
            attn: holds the norms.
            image: q, k, v, each [B, S, W].
            text: q, k, v of the text stream, each [B, L, W], or None.
            rope, mask: as in a call.
        """
        streams = [Stream(*_heads(image, attn.head_dim), attn.norm_q, attn.norm_k)]
        if text is not None:
            streams.insert(0, Stream(*_heads(text, attn.head_dim), attn.norm_added_q, attn.norm_added_k))
        return attend_together(streams, rope, mask=mask, backend=self.backend).flatten(2)


def _heads(projected: Sequence[Tensor], head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split [B, S, W] into [B, S, H, D]; under tensor parallelism W, and so H, is this rank's share."""
    query, key, value = (tensor.unflatten(-1, (-1, head_dim)) for tensor in projected)
    return query, key, value


class _PooledAndTimestep(NamedTuple):
    """What travels through diffusers' forward in place of the pooled text, which it hands on untouched."""

    pooled: Tensor  # [B, P]
    timestep: Tensor  # [B], 0..1


def _before_forward(
    transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: bind the timestep to the pooled text before the transformer rounds it.

    The position table is told of the ids as they were handed in, before the transformer joins them.
    """
    positions: Any = transformer.pos_embed
    if isinstance(image := kwargs.get("img_ids"), Tensor) and isinstance(text := kwargs.get("txt_ids"), Tensor):
        positions.expect(text, image)
    timestep, pooled = kwargs.get("timestep"), kwargs.get("pooled_projections")
    if timestep is None or pooled is None or not timestep.is_floating_point():
        return args, kwargs
    return args, kwargs | {"pooled_projections": _PooledAndTimestep(pooled, timestep)}


class ExactTimeTextEmbedding(nn.Module):
    """diffusers' time, guidance and text embedding, fed an unrounded timestep; children keep their names."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, child in original.named_children():
            self.add_module(name, child)
        self.train(original.training)

    def forward(self, timestep: Tensor, *guidance_and_pooled: Tensor) -> Tensor:
        """Return the conditioning vector [B, W].

        Args:
            timestep: [B], 0 to 1000, in the compute dtype (possibly rounded).
            guidance_and_pooled: guidance [B] for models that have it, then pooled text [B, P], together with
                the exact timestep where the transformer's pre-hook has seen one.
        """
        *guidance, pooled = guidance_and_pooled
        compute_dtype = timestep.dtype
        if isinstance(pooled, _PooledAndTimestep):
            pooled, timestep = pooled.pooled, pooled.timestep.float() * 1000
        parts: Any = self  # its children are diffusers'
        embedding = parts.timestep_embedder(parts.time_proj(timestep).to(compute_dtype))
        if guidance:
            embedding = embedding + parts.guidance_embedder(parts.time_proj(guidance[0]).to(compute_dtype))
        return embedding + parts.text_embedder(pooled)
