"""FLUX.1's transformer: how it sees images, and its optimised forward.

*Tokens.* 2 x 2 latents are one token (``library.models.vae``), each token at (index, row, column). ``index`` is 0
for the image that is sampled and larger for reference images. The mask of a Fill model has no encoder: the pixels under
a token become its channels.

*Forward* (:func:`optimise_forward`, ``library.models.blocks``). Beside norms, attention and blocks:

- the *position table* has one cosine and sine per pair instead of two;
- *timestep embedding*: diffusers casts the timestep to the compute dtype, *then* multiplies by 1000 and takes sines of
  it. In bf16, 0.711 x 1000 becomes 712, and sin(712) is a whole radian off. Here the timestep travels beside the pooled
  text in fp32, and only the finished embedding is rounded. The guidance scale keeps diffusers' rounding.

In fp32 the result is that of the unchanged transformer but for rounding: sums are split otherwise by some sizes of
layers, which changes a last bit here and there (3e-7 of the largest output at 3 + 5 blocks of 4 heads of 24).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers import transformer_flux as diffusers_flux
from torch import Tensor, nn

from library.models.blocks import AttentionProcessor, adopt, adopt_positions, feedforward, joint_attention, modulation
from library.models.vae import pack_latents
from library.nn.attention import Backend
from library.nn.frozen_linear import project_recomputed
from library.nn.norms import ModulationCache, beside_gelu, clamp_fp16, join_tokens, modulated, split_tokens
from library.nn.rope import Table


def pack_mask(mask: Tensor, factor: int) -> Tensor:
    """Return a mask [B, 1, H, W] in pixels as tokens [B, H/2f * W/2f, 4f²]; ``factor`` f is the encoder's.

    The f x f pixels under one latent become f² channels, row by row, which are then packed as latents are: 256
    numbers a token for FLUX.1's factor of 8.
    """
    batch, _, height, width = mask.shape
    cells = mask.reshape(batch, height // factor, factor, width // factor, factor).permute(0, 2, 4, 1, 3)
    return pack_latents(cells.reshape(batch, factor * factor, height // factor, width // factor))


def text_positions(tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """Return (0, 0, 0) for every text token, fp32 [tokens, 3]."""
    return torch.zeros(tokens, 3, device=device)


class FluxTransformerBlock(diffusers_flux.FluxTransformerBlock):
    """A double block: image and text each with their own layers, joint attention."""

    caches_modulation = True

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Table | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        modulation_cache: ModulationCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (text [B, L, W], image [B, S, W]).

        Args:
            hidden_states: image [B, S, W].
            encoder_hidden_states: text [B, L, W].
            temb: conditioning [B, W].
            image_rotary_emb: (cos, sin), each [L + S, D/2].
            joint_attention_kwargs: of diffusers' own attention; there are none for ours.
            modulation_cache: where the modulation is saved until backward recomputes the block.
        """
        assert not joint_attention_kwargs
        image, text = hidden_states, encoder_hidden_states
        image_mod = modulation(self.norm1.silu, self.norm1.linear, temb, 6, modulation_cache, "image")
        text_mod = modulation(self.norm1_context.silu, self.norm1_context.linear, temb, 6, modulation_cache, "text")
        streams = (
            (image, modulated(self.norm1.norm), image_mod),
            (text, modulated(self.norm1_context.norm), text_mod),
        )
        image_update, text_update = joint_attention(self.attn, *streams, image_rotary_emb)
        image = feedforward((image, image_mod[2], image_update), modulated(self.norm2), self.ff, image_mod[3:])
        text_norm = modulated(self.norm2_context)
        text = feedforward((text, text_mod[2], text_update), text_norm, self.ff_context, text_mod[3:])
        return clamp_fp16(text), image


class FluxSingleTransformerBlock(diffusers_flux.FluxSingleTransformerBlock):
    """A single block: text and image as one stream, attention and MLP side by side."""

    caches_modulation = True

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Table | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        modulation_cache: ModulationCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (text [B, L, W], image [B, S, W]); arguments as in a double block."""
        assert not joint_attention_kwargs
        attn: Any = self.attn
        length = encoder_hidden_states.shape[1]
        stream = join_tokens(encoder_hidden_states, hidden_states)
        shift, scale, gate = modulation(self.norm.silu, self.norm.linear, temb, 3, modulation_cache, "both")
        norm = modulated(self.norm.norm)
        qkv = project_recomputed([attn.to_q, attn.to_k, attn.to_v], norm, stream, shift, scale)
        attended = attn.processor.attend(attn, qkv, None, image_rotary_emb)
        # Last, so that backward has done with its gradient, four times as wide as the stream, when attention's begins.
        (wide,) = project_recomputed([self.proj_mlp], norm, stream, shift, scale)
        (update,) = project_recomputed([self.proj_out], beside_gelu, attended, wide)
        return split_tokens(clamp_fp16(stream + gate * update), length)


def optimise_forward(transformer: FluxTransformer2DModel, backend: Backend = "auto") -> FluxTransformer2DModel:
    """Replace the forward of blocks, attention, RMSNorm, RoPE table and timestep embedding in place; return the model.

    Parameters are shared, not copied, and keep their names; LoRA may be injected before or after.
    """
    adopt(transformer, FluxTransformerBlock, FluxSingleTransformerBlock, TimeTextEmbedding, TimeGuidanceTextEmbedding)
    transformer.set_attn_processor(AttentionProcessor(backend))
    if adopt_positions(transformer):
        transformer.register_forward_pre_hook(_before_forward, with_kwargs=True)
    return transformer


class _PooledAndTimestep(NamedTuple):
    """What travels through diffusers' forward in place of the pooled text, which it passes on unchanged."""

    pooled: Tensor  # [B, P]
    timestep: Tensor  # [B], 0..1


def _before_forward(
    transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: bind the timestep to the pooled text before the transformer rounds it."""
    timestep, pooled = kwargs.get("timestep"), kwargs.get("pooled_projections")
    if timestep is None or pooled is None or not timestep.is_floating_point():
        return args, kwargs
    return args, kwargs | {"pooled_projections": _PooledAndTimestep(pooled, timestep)}


class TimeTextEmbedding(diffusers_flux.CombinedTimestepTextProjEmbeddings):
    """diffusers' time and text embedding, fed an unrounded timestep."""

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
        embedding = self.timestep_embedder(self.time_proj(timestep).to(compute_dtype))
        if guidance:
            embedding = embedding + self.guidance_embedder(self.time_proj(guidance[0]).to(compute_dtype))
        return embedding + self.text_embedder(pooled)


class TimeGuidanceTextEmbedding(diffusers_flux.CombinedTimestepGuidanceTextProjEmbeddings):
    """The same with guidance."""

    forward = TimeTextEmbedding.forward
