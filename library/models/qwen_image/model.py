"""Qwen-Image's transformer with an optimised forward (:func:`optimise_forward`, ``library.models.blocks``).

Beside norms, attention and blocks:

- *attention*: without padded text no mask is made. What is masked and which tokens are those of reference images,
  devices are told without waiting for the host;
- *position table*: diffusers' own numbers (complex64; the rows and columns of an image are counted from its middle,
  text goes on where they end) as one cosine and one sine a pair, for text and images together;
- *timestep embedding*: diffusers rounds the timestep to the compute dtype, *then* multiplies by 1000 and takes
  sines of it; in bf16, 0.7127 becomes 0.7109, and the sine of 710.9 is that of 712.7 no more. Here the timestep
  travels in fp32 and only the finished embedding is rounded. With an fp32 model nothing changes.

For the last two the transformer's own forward is written anew.

Edit-2511 (``zero_cond_t``) modulates the tokens of reference images as at timestep 0: the conditioning then holds two
vectors a sample, and an index says which one a token takes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel as DiffusersTransformer
from diffusers.models.transformers import transformer_qwenimage as diffusers_qwen
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from torch import Tensor, nn

from library.models.blocks import AttentionProcessor, adopt, feedforward, joint_attention, modulation, run_block
from library.nn.attention import Backend
from library.nn.norms import ModulationCache, clamp_fp16, modulated, modulated_norm
from library.nn.rope import Table


class QwenImageTransformerBlock(diffusers_qwen.QwenImageTransformerBlock):
    """Image and text each with their own layers, joint attention."""

    caches_modulation = True

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None,
        temb: Tensor,
        image_rotary_emb: Table | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        references: Tensor | None = None,
        modulation_cache: ModulationCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (text [B, L, W], image [B, S, W]).

        Args:
            hidden_states: image [B, S, W].
            encoder_hidden_states: text [B, L, W].
            encoder_hidden_states_mask: boolean [B, L], true for real text tokens; None: all are.
            temb: conditioning [B, W], or [2B, W] with ``references``.
            image_rotary_emb: (cos, sin), each [L + S, D/2].
            joint_attention_kwargs: of diffusers' own attention; there are none for ours.
            references: boolean [S, 1], true for tokens that take the conditioning's second half.
            modulation_cache: where the modulation is saved until backward recomputes the block.
        """
        assert not joint_attention_kwargs
        image, text = hidden_states, encoder_hidden_states
        image_mod = modulation(self.img_mod[0], self.img_mod[1], temb, 6, modulation_cache, "image")
        text_temb = temb.chunk(2)[0] if self.zero_cond_t else temb
        text_mod = modulation(self.txt_mod[0], self.txt_mod[1], text_temb, 6, modulation_cache, "text")
        streams = (
            (image, _modulated(self.img_norm1, references), image_mod),
            (text, modulated(self.txt_norm1), text_mod),
        )
        image_update, text_update = joint_attention(self.attn, *streams, image_rotary_emb, encoder_hidden_states_mask)
        gates = [_chosen(image_mod[i], references) for i in (2, 5)]
        norm = _modulated(self.img_norm2, references)
        image = feedforward((image, gates[0], image_update), norm, self.img_mlp, (*image_mod[3:5], gates[1]))
        text = feedforward((text, text_mod[2], text_update), modulated(self.txt_norm2), self.txt_mlp, text_mod[3:])
        return clamp_fp16(text), clamp_fp16(image)


def _modulated(norm: Any, references: Tensor | None) -> Callable[..., Tensor]:
    return modulated(norm) if references is None else functools.partial(_by_image, eps=norm.eps, references=references)


def _by_image(x: Tensor, shift: Tensor, scale: Tensor, eps: float, references: Tensor) -> Tensor:
    return modulated_norm(x, _chosen(shift, references), _chosen(scale, references), eps)


def _chosen(vectors: Tensor, references: Tensor | None) -> Tensor:
    """Return each token's vector [B, S, W] of ``vectors`` [2B, 1, W]; without references they serve as they are."""
    if references is None:
        return vectors
    first, second = vectors.chunk(2)
    return torch.where(references, second, first)


class QwenImageTransformer2DModel(DiffusersTransformer):
    """diffusers' transformer with a forward of its own (see the module)."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        img_shapes: Sequence[Sequence[tuple[int, ...]]],
        encoder_hidden_states_mask: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor]:
        """Return a tuple of one, noise - image of all images' tokens, [B, N, C].

        Args:
            hidden_states: tokens of the painted image, then of reference images, [B, N, C].
            encoder_hidden_states: text [B, L, D].
            timestep: [B], 0 to 1, in any precision.
            img_shapes: of each sample, the images' (1, rows, columns); the first sample counts for all.
            encoder_hidden_states_mask: boolean [B, L], true for real text tokens; None: all are.
            others: diffusers' extras, none of which are taken.
        """
        assert not any(others.values()), others
        image, text = self.img_in(hidden_states), self.txt_in(self.txt_norm(encoder_hidden_states))
        levels, references = timestep.float(), None
        if self.zero_cond_t:
            levels = torch.cat([levels, torch.zeros_like(levels)])
            references = (torch.arange(image.shape[1], device=image.device) >= math.prod(img_shapes[0][0])).unsqueeze(1)
        embed: Any = self.time_text_embed
        temb = embed.timestep_embedder(embed.time_proj(levels).to(image.dtype))
        rope = self.pos_embed(img_shapes, image.device, text.shape[1])
        for block in self.transformer_blocks:
            text, image = run_block(self, block, image, text, encoder_hidden_states_mask, temb, rope, None, references)
        return (self.proj_out(self.norm_out(image, temb[: len(timestep)])),)


def optimise_forward(transformer: DiffusersTransformer, backend: Backend = "auto") -> DiffusersTransformer:
    """Replace the forward of transformer, blocks, attention, RMSNorm and RoPE table in place; return the model.

    Parameters are shared, not copied, and keep their names; LoRA may be injected before or after. The position table
    is made anew, so the model may come from the meta device.
    """
    adopt(transformer, QwenImageTransformer2DModel, QwenImageTransformerBlock)
    transformer.set_attn_processor(AttentionProcessor(backend))
    if not isinstance(transformer.pos_embed, JointRope):
        transformer.pos_embed = JointRope(transformer.config.axes_dims_rope, transformer.pos_embed.theta)
    return transformer


class JointRope(nn.Module):
    """diffusers' position table for text, then images, as real numbers."""

    def __init__(self, axes_dims: Sequence[int], theta: int) -> None:
        super().__init__()
        self.theta = theta
        with torch.device("cpu"):
            self._table = QwenEmbedRope(theta, list(axes_dims), scale_rope=True)
        # diffusers keeps 128 sizes of all models and frees others, whose addresses a CUDA graph may have captured
        turns: Any = QwenEmbedRope._compute_video_freqs
        self._table._compute_video_freqs = functools.cache(functools.partial(turns.__wrapped__, self._table))

    @torch.compiler.disable  # a compiler cannot generate complex code
    def forward(
        self, video_fhw: list[Any], device: torch.device | None = None, max_txt_seq_len: int | Tensor = 0
    ) -> Table:
        """Return (cos, sin), each fp32 [L + S, D/2], of ``max_txt_seq_len`` text tokens and the images' tokens.

        ``video_fhw`` lists for each sample its images' (1, rows, columns); the first sample counts for all.
        """
        image, text = self._table(video_fhw, device, max_txt_seq_len)
        joint = torch.cat([text, image])
        return joint.real.contiguous(), joint.imag.contiguous()
