"""Qwen-Image's block with Tandem's forward: diffusers' modules, names and numbers, less kept for backward.

As in ``library.models.flux_blocks``, what stands before a linear layer (norm and modulation, GELU, a slice of tokens)
is made again in backward instead of kept.

Edit-2511 (``zero_cond_t``) modulates the tokens of reference pictures as at timestep 0: the conditioning then holds two
vectors a sample, and an index says which one a token takes.

:func:`swap_blocks` changes the class of every block and nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.models.transformers import transformer_qwenimage as diffusers_qwen
from torch import Tensor, nn

from library.nn.modulation import Kept, gelu, modulated, modulated_norm, once, tokens, within_fp16
from library.nn.projection import project_made, project_together
from library.nn.rope import Table


def swap_blocks(transformer: diffusers_qwen.QwenImageTransformer2DModel) -> None:
    """Give every block of ``transformer`` the forward of this module."""
    for module in transformer.modules():
        if type(module) is diffusers_qwen.QwenImageTransformerBlock:
            module.__class__ = QwenImageTransformerBlock


class QwenImageTransformerBlock(diffusers_qwen.QwenImageTransformerBlock):
    """Image and text each with their own layers, joint attention."""

    keeps_modulation = True

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None,
        temb: Tensor,
        image_rotary_emb: Table | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        modulate_index: Tensor | None = None,
        kept: Kept | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (text [B, L, W], image [B, S, W]).

        Args:
            hidden_states: image [B, S, W].
            encoder_hidden_states: text [B, L, W].
            encoder_hidden_states_mask: boolean [B, L], true for real text tokens; None: all are.
            temb: conditioning [B, W], or [2B, W] with ``modulate_index``.
            image_rotary_emb: (cos, sin), each [L + S, D/2].
            joint_attention_kwargs: diffusers' extras; with any, its own forward runs.
            modulate_index: [B, S], 1 for tokens that take the conditioning's second half.
            kept: where the modulation stays until the block runs again in backward.
        """
        if joint_attention_kwargs:
            return super().forward(
                hidden_states,
                encoder_hidden_states,
                encoder_hidden_states_mask,
                temb,
                image_rotary_emb,
                joint_attention_kwargs,
                modulate_index,
            )
        attn: Any = self.attn
        image, text = hidden_states, encoder_hidden_states
        image_mod = _modulation(self.img_mod, temb, kept, "image")
        text_mod = _modulation(self.txt_mod, temb.chunk(2)[0] if self.zero_cond_t else temb, kept, "text")
        norm = _modulated(self.img_norm1, modulate_index)
        image_qkv = project_made([attn.to_q, attn.to_k, attn.to_v], norm, image, *image_mod[:2])
        text_layers = [attn.add_q_proj, attn.add_k_proj, attn.add_v_proj]
        text_qkv = project_made(text_layers, modulated(self.txt_norm1), text, *text_mod[:2])
        attended = attn.processor.attend(attn, image_qkv, text_qkv, image_rotary_emb, encoder_hidden_states_mask)
        length = text.shape[1]
        (image_update,) = project_made([attn.to_out[0]], functools.partial(tokens, start=length), attended)
        (text_update,) = project_made([attn.to_add_out], functools.partial(tokens, end=length), attended)
        image = image + _chosen(image_mod[2], modulate_index) * image_update
        image = _feedforward(image, self.img_norm2, self.img_mlp, image_mod[3:], modulate_index)
        text = _feedforward(text + text_mod[2] * text_update, self.txt_norm2, self.txt_mlp, text_mod[3:])
        return within_fp16(text), within_fp16(image)


def _modulation(layers: Any, temb: Tensor, kept: Kept | None, name: str) -> tuple[Tensor, ...]:
    """Return shift, scale, gate, twice, each [B, 1, W] ([2B, 1, W])."""
    silu, linear = layers
    vector = once(kept, name, lambda: project_together([linear], silu(temb))[0])
    return vector.unsqueeze(1).chunk(6, dim=-1)


def _feedforward(
    stream: Tensor, norm: nn.Module, feedforward: Any, modulation: Sequence[Tensor], index: Tensor | None = None
) -> Tensor:
    """Return ``stream + gate * MLP(modulated norm of stream)``."""
    shift, scale, gate = modulation
    (wide,) = project_made([feedforward.net[0].proj], _modulated(norm, index), stream, shift, scale)
    (update,) = project_made([feedforward.net[2]], gelu, wide)
    return stream + _chosen(gate, index) * update


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
