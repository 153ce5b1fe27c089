"""FLUX.2's transformer: where it sees tokens, and its optimised forward.

*Tokens.* 2 x 2 latents are one token (``library.models.vae``). It stands at (index, row, column, 0), the index 0
for the image that is sampled and 10, 20, ... for reference images; a text token stands at (0, 0, 0, its number).

*Forward* (:func:`optimise_forward`, ``library.models.blocks``). Beside norms, attention and blocks the transformer's
own is written anew, for three reasons:

- *timestep and guidance* travel in fp32 and only their finished embedding is rounded. diffusers rounds both to the
  compute dtype before it takes sines of them (``library.models.flux.model`` says what that does to bf16);
- *text and image* stay two tensors through the single blocks too, neighbouring parts of one, so that blocks of both
  kinds take and give the same;
- the *position table* is one for text and images, with one cosine and sine per pair.

The modulation's vectors come from three layers of the whole model; each block is given them whole and takes its parts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers import transformer_flux2 as diffusers_flux2
from torch import Tensor

from library.models.blocks import AttentionProcessor, adopt, adopt_positions, feedforward, joint_attention, run_block
from library.models.vae import image_positions
from library.nn.attention import Backend
from library.nn.frozen_linear import project_recomputed
from library.nn.norms import clamp_fp16, join_tokens, modulated, split_tokens, swiglu_halves
from library.nn.rope import Table

REFERENCE_STEP = 10  # between the indices of images


def positions_of(sizes: tuple[tuple[int, int], ...], device: torch.device | str = "cpu") -> Tensor:
    """Return (index, row, column, 0) of every token of images of ``sizes`` (rows, columns), fp32 [tokens, 4]."""
    grids = [image_positions(*size, device, number * REFERENCE_STEP) for number, size in enumerate(sizes)]
    return F.pad(torch.cat(grids), (0, 1))


class Flux2Transformer2DModel(diffusers_flux2.Flux2Transformer2DModel):
    """diffusers' transformer with a forward of its own (see the module)."""

    pos_embed: Any

    @property
    def dtype(self) -> torch.dtype:
        """What pipelines give latents in: without biases the first parameter may be a quantised weight."""
        attn: Any = self.single_transformer_blocks[0].attn
        return attn.norm_q.weight.dtype

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        img_ids: Tensor,
        txt_ids: Tensor,
        guidance: Tensor | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
    ) -> tuple[Tensor] | Transformer2DModelOutput:
        """Return the velocity of every image token, [B, N, C].

        Args:
            hidden_states: tokens of images, [B, N, C].
            encoder_hidden_states: text, [B, L, D].
            timestep: [B], 0 to 1.
            img_ids, txt_ids: positions, [N, 4] and [L, 4], or with a batch axis, whose first row is taken.
            guidance: [B], of models that have the input.
            joint_attention_kwargs: of diffusers' own attention; there are none for ours.
            return_dict: as in diffusers.
        """
        assert not joint_attention_kwargs
        temb = self._conditioning(timestep, guidance, hidden_states.dtype)
        image_mod, text_mod = self.double_stream_modulation_img(temb), self.double_stream_modulation_txt(temb)
        both_mod = self.single_stream_modulation(temb)
        image, text = self.x_embedder(hidden_states), self.context_embedder(encoder_hidden_states)
        rope = self.pos_embed(torch.cat([ids[0] if ids.ndim == 3 else ids for ids in (txt_ids, img_ids)]))
        for double in self.transformer_blocks:
            text, image = run_block(self, double, image, text, image_mod, text_mod, rope)
        for single in self.single_transformer_blocks:
            text, image = run_block(self, single, image, text, both_mod, rope)
        output = self.proj_out(self.norm_out(image, temb))
        return Transformer2DModelOutput(output) if return_dict else (output,)

    def _conditioning(self, timestep: Tensor, guidance: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return what the modulations are made of, [B, W]."""
        embed: Any = self.time_guidance_embed
        temb = embed.timestep_embedder(embed.time_proj(timestep.float() * 1000).to(dtype))
        if guidance is None or embed.guidance_embedder is None:
            return temb
        return temb + embed.guidance_embedder(embed.time_proj(guidance.float() * 1000).to(dtype))


class Flux2TransformerBlock(diffusers_flux2.Flux2TransformerBlock):
    """A double block: image and text each with their own layers, joint attention."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb_mod_img: Tensor,
        temb_mod_txt: Tensor,
        image_rotary_emb: Table | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (text [B, L, W], image [B, S, W]).

        Args:
            hidden_states: image [B, S, W].
            encoder_hidden_states: text [B, L, W].
            temb_mod_img, temb_mod_txt: shift, scale and gate of attention, then of the MLP, side by side: [B, 6 W].
            image_rotary_emb: (cos, sin), each [L + S, D/2].
        """
        image, text = hidden_states, encoder_hidden_states
        image_mod, text_mod = (vector.unsqueeze(1).chunk(6, dim=-1) for vector in (temb_mod_img, temb_mod_txt))
        streams = (image, modulated(self.norm1), image_mod), (text, modulated(self.norm1_context), text_mod)
        image_update, text_update = joint_attention(self.attn, *streams, image_rotary_emb)
        image = feedforward((image, image_mod[2], image_update), modulated(self.norm2), self.ff, image_mod[3:])
        text_norm = modulated(self.norm2_context)
        text = feedforward((text, text_mod[2], text_update), text_norm, self.ff_context, text_mod[3:])
        return clamp_fp16(text), image


class Flux2SingleTransformerBlock(diffusers_flux2.Flux2SingleTransformerBlock):
    """A single block: text and image as one stream, attention and MLP side by side in one matrix before and after."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb_mod: Tensor,
        image_rotary_emb: Table | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (text [B, L, W], image [B, S, W]); ``temb_mod`` is shift, scale and gate side by side, [B, 3 W]."""
        attn: Any = self.attn
        length = encoder_hidden_states.shape[1]
        stream = join_tokens(encoder_hidden_states, hidden_states)
        shift, scale, gate = temb_mod.unsqueeze(1).chunk(3, dim=-1)
        (fused,) = project_recomputed([attn.to_qkv_mlp_proj], modulated(self.norm), stream, shift, scale)
        # By the ratio of the whole widths: under tensor parallelism each part is this rank's share.
        parts = 3 * attn.inner_dim + attn.mlp_mult_factor * attn.mlp_hidden_dim
        width = fused.shape[-1] * attn.inner_dim // parts
        *qkv, wide = fused.split([width] * 3 + [fused.shape[-1] - 3 * width], dim=-1)
        attended = attn.processor.attend(attn, qkv, None, image_rotary_emb)
        (update,) = project_recomputed([attn.to_out], _beside_swiglu, attended, wide)
        return split_tokens(clamp_fp16(stream + gate * update), length)


def _beside_swiglu(attended: Tensor, wide: Tensor) -> Tensor:
    """Return attention's output [B, S, W] and SwiGLU of ``wide`` [B, S, 2M] side by side."""
    return torch.cat([attended, swiglu_halves(wide)], dim=-1)


def optimise_forward(
    transformer: diffusers_flux2.Flux2Transformer2DModel, backend: Backend = "auto"
) -> diffusers_flux2.Flux2Transformer2DModel:
    """Replace the forward of transformer, blocks, attention, RMSNorm and RoPE table in place; return the model.

    Parameters are shared, not copied, and keep their names; LoRA may be injected before or after.
    """
    adopt(transformer, Flux2Transformer2DModel, Flux2TransformerBlock, Flux2SingleTransformerBlock)
    transformer.set_attn_processor(AttentionProcessor(backend))
    adopt_positions(transformer)
    return transformer
