"""Qwen-Image's transformer with an optimised forward (:func:`optimise_forward`, ``library.models.blocks``).

Beside norms, attention and blocks:

- *attention*: without padded text no mask is made;
- *position table*: diffusers' own numbers (complex64; the rows and columns of an image are counted from its middle,
  text goes on where they end) as one cosine and one sine a pair, for text and images together;
- *timestep embedding*: diffusers rounds the timestep to the compute dtype, *then* multiplies by 1000 and takes
  sines of it; in bf16, 0.7127 becomes 0.7109, and the sine of 710.9 is that of 712.7 no more. Here the timestep
  travels in fp32 and only the finished embedding is rounded. With an fp32 model nothing changes.

Edit-2511 (``zero_cond_t``) modulates the tokens of reference images as at timestep 0: the conditioning then holds two
vectors a sample, and an index says which one a token takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.transformers import transformer_qwenimage as diffusers_qwen
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from torch import Tensor, nn

from library.models.blocks import AttentionProcessor, adopt, feedforward, joint_attention, modulation
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
        modulate_index: Tensor | None = None,
        modulation_cache: ModulationCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (text [B, L, W], image [B, S, W]).

        Args:
            hidden_states: image [B, S, W].
            encoder_hidden_states: text [B, L, W].
            encoder_hidden_states_mask: boolean [B, L], true for real text tokens; None: all are.
            temb: conditioning [B, W], or [2B, W] with ``modulate_index``.
            image_rotary_emb: (cos, sin), each [L + S, D/2].
            joint_attention_kwargs: of diffusers' own attention; there are none for ours.
            modulate_index: [B, S], 1 for tokens that take the conditioning's second half.
            modulation_cache: where the modulation is saved until backward recomputes the block.
        """
        assert not joint_attention_kwargs
        image, text = hidden_states, encoder_hidden_states
        image_mod = modulation(self.img_mod[0], self.img_mod[1], temb, 6, modulation_cache, "image")
        text_temb = temb.chunk(2)[0] if self.zero_cond_t else temb
        text_mod = modulation(self.txt_mod[0], self.txt_mod[1], text_temb, 6, modulation_cache, "text")
        streams = (
            (image, _modulated(self.img_norm1, modulate_index), image_mod),
            (text, modulated(self.txt_norm1), text_mod),
        )
        image_update, text_update = joint_attention(self.attn, *streams, image_rotary_emb, encoder_hidden_states_mask)
        gates = [_chosen(image_mod[i], modulate_index) for i in (2, 5)]
        norm = _modulated(self.img_norm2, modulate_index)
        image = feedforward((image, gates[0], image_update), norm, self.img_mlp, (*image_mod[3:5], gates[1]))
        text = feedforward((text, text_mod[2], text_update), modulated(self.txt_norm2), self.txt_mlp, text_mod[3:])
        return clamp_fp16(text), clamp_fp16(image)


def _modulated(norm: Any, index: Tensor | None) -> Callable[..., Tensor]:
    return modulated(norm) if index is None else functools.partial(_modulated_by_index, eps=norm.eps, index=index)


def _modulated_by_index(x: Tensor, shift: Tensor, scale: Tensor, eps: float, index: Tensor) -> Tensor:
    return modulated_norm(x, _chosen(shift, index), _chosen(scale, index), eps)


def _chosen(vectors: Tensor, index: Tensor | None) -> Tensor:
    """Return each token's vector [B, S, W] of ``vectors`` [2B, 1, W]; without an index they serve as they are."""
    if index is None:
        return vectors
    first, second = vectors.chunk(2)
    return torch.where(index.unsqueeze(-1) == 0, first, second)


def optimise_forward(
    transformer: QwenImageTransformer2DModel, backend: Backend = "auto"
) -> QwenImageTransformer2DModel:
    """Replace the forward of blocks, attention, RMSNorm, RoPE table and timestep embedding in place; return the model.

    Parameters are shared, not copied, and keep their names; LoRA may be injected before or after. The position table
    is made anew, so the model may come from the meta device.
    """
    adopt(transformer, QwenImageTransformerBlock, QwenTimeEmbedding)
    transformer.set_attn_processor(AttentionProcessor(backend))
    if not isinstance(transformer.pos_embed, JointRope):
        transformer.pos_embed = JointRope(transformer.config.axes_dims_rope, transformer.pos_embed.theta)
        transformer.register_forward_pre_hook(_carry_exact_timestep, with_kwargs=True)
    return transformer


class JointRope(nn.Module):
    """diffusers' position table for text, then images, as real numbers."""

    def __init__(self, axes_dims: Sequence[int], theta: int) -> None:
        super().__init__()
        self.theta = theta
        with torch.device("cpu"):
            self._table = QwenEmbedRope(theta, list(axes_dims), scale_rope=True)

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


def _carry_exact_timestep(
    transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook: keep the timestep from before the transformer rounds it.

    It travels as ``additional_t_cond``, which diffusers' forward passes on unchanged and only Qwen-Image-Layered, which
    is no family here, has a use for.
    """
    return args, kwargs | {"additional_t_cond": kwargs.get("timestep")}


class QwenTimeEmbedding(diffusers_qwen.QwenTimestepProjEmbeddings):
    """diffusers' timestep embedding, and that of reference images."""

    def forward(self, timestep: Tensor, hidden_states: Tensor, addition_t_cond: Tensor | None = None) -> Tensor:
        """Return the conditioning vector [B, W]; [2B, W] where reference images have one of their own.

        Args:
            timestep: [B] or [2B] in the compute dtype (possibly rounded), 0 to 1; in the second half 0.
            hidden_states: whose dtype is the compute dtype.
            addition_t_cond: the exact timestep [B], where the transformer's pre-hook has seen one.
        """
        if addition_t_cond is not None:
            exact = addition_t_cond.float()
            clean = timestep.shape[0] - exact.shape[0]
            timestep = torch.cat([exact, exact.new_zeros(clean)]) if clean else exact
        return self.timestep_embedder(self.time_proj(timestep).to(hidden_states.dtype))
