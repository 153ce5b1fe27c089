"""FLUX's blocks with Tandem's forward: diffusers' modules, names and numbers, less kept for backward.

A block is four or eight wide linear layers with cheap operations before each: norm and modulation, GELU, a
concatenation. Autograd keeps the results of those for the LoRA's gradient; written with ``project_made`` a layer
keeps what they are made of, which the operation before it keeps anyway, and makes them again in backward. Layers that
share an input (q, k, v and the MLP of a single block) are projected together.

:func:`swap_blocks` changes the class of every block and nothing else: children, names, hooks and settings stay. In
fp32 the output is that of diffusers bit for bit.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from diffusers.models.transformers import transformer_flux as diffusers_flux
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from library.nn.modulation import Kept, gelu, modulated, once, tokens, within_fp16
from library.nn.projection import project_made, project_together
from library.nn.rope import Table


def swap_blocks(transformer: diffusers_flux.FluxTransformer2DModel) -> None:
    """Give every block of ``transformer`` the forward of this module."""
    for ours in (FluxTransformerBlock, FluxSingleTransformerBlock):
        for module in transformer.modules():
            if type(module) is ours.__base__:
                module.__class__ = ours


class FluxTransformerBlock(diffusers_flux.FluxTransformerBlock):
    """A double block: image and text each with their own layers, joint attention."""

    keeps_modulation = True

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Table | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        kept: Kept | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (text [B, L, W], image [B, S, W]).

        Args:
            hidden_states: image [B, S, W].
            encoder_hidden_states: text [B, L, W].
            temb: conditioning [B, W].
            image_rotary_emb: (cos, sin), each [L + S, D/2].
            joint_attention_kwargs: diffusers' extras; with any, its own forward runs.
            kept: where the modulation stays until the block runs again in backward.
        """
        if joint_attention_kwargs:
            return super().forward(hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs)
        attn: Any = self.attn
        image, text = hidden_states, encoder_hidden_states
        image_mod = _modulation(self.norm1, temb, 6, kept, "image")
        text_mod = _modulation(self.norm1_context, temb, 6, kept, "text")
        norm, text_norm = modulated(self.norm1.norm), modulated(self.norm1_context.norm)
        image_qkv = project_made([attn.to_q, attn.to_k, attn.to_v], norm, image, *image_mod[:2])
        text_layers = [attn.add_q_proj, attn.add_k_proj, attn.add_v_proj]
        text_qkv = project_made(text_layers, text_norm, text, *text_mod[:2])
        attended = attn.processor.attend(attn, image_qkv, text_qkv, image_rotary_emb)  # [B, L + S, W]
        length = text.shape[1]
        (image_update,) = project_made([attn.to_out[0]], functools.partial(tokens, start=length), attended)
        (text_update,) = project_made([attn.to_add_out], functools.partial(tokens, end=length), attended)
        image = _feedforward(image + image_mod[2] * image_update, self.norm2, self.ff, image_mod[3:])
        text = _feedforward(text + text_mod[2] * text_update, self.norm2_context, self.ff_context, text_mod[3:])
        return within_fp16(text), image


class FluxSingleTransformerBlock(diffusers_flux.FluxSingleTransformerBlock):
    """A single block: text and image as one stream, attention and MLP side by side."""

    keeps_modulation = True

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: Table | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        kept: Kept | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (text [B, L, W], image [B, S, W]); arguments as in a double block."""
        if joint_attention_kwargs:
            return super().forward(hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs)
        attn: Any = self.attn
        length = encoder_hidden_states.shape[1]
        stream = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        shift, scale, gate = _modulation(self.norm, temb, 3, kept, "both")
        layers = [attn.to_q, attn.to_k, attn.to_v, self.proj_mlp]
        *qkv, wide = project_made(layers, modulated(self.norm.norm), stream, shift, scale)
        attended = attn.processor.attend(attn, qkv, None, image_rotary_emb)
        (update,) = project_made([self.proj_out], _beside_gelu, attended, wide)
        stream = within_fp16(stream + gate * update)
        return stream[:, :length], stream[:, length:]


def _modulation(norm: Any, temb: Tensor, parts: int, kept: Kept | None, name: str) -> tuple[Tensor, ...]:
    """Return shift, scale, gate (twice, with six parts), each [B, 1, W]."""
    vector = once(kept, name, lambda: project_together([norm.linear], norm.silu(temb))[0])
    return vector.unsqueeze(1).chunk(parts, dim=-1)


def _feedforward(stream: Tensor, norm: nn.Module, feedforward: Any, modulation: tuple[Tensor, ...]) -> Tensor:
    """Return ``stream + gate * MLP(modulated norm of stream)``."""
    shift, scale, gate = modulation
    (wide,) = project_made([feedforward.net[0].proj], modulated(norm), stream, shift, scale)
    (update,) = project_made([feedforward.net[2]], gelu, wide)
    return stream + gate * update


def _beside_gelu(attended: Tensor, wide: Tensor) -> Tensor:
    """Return ``attended`` [B, S, W] and GELU of ``wide`` [B, S, M] side by side, [B, S, W + M]."""
    if torch.compiler.is_compiling():
        return torch.cat([attended, gelu(wide)], dim=-1)
    return _BesideGelu.apply(attended, wide)


class _BesideGelu(torch.autograd.Function):
    """GELU written where it belongs: the widest tensors of a block are made once, not twice."""

    @staticmethod
    def forward(ctx: Any, attended: Tensor, wide: Tensor) -> Tensor:
        ctx.save_for_backward(wide)
        width = attended.shape[-1]
        both = wide.new_empty(*wide.shape[:-1], width + wide.shape[-1])
        both[..., :width] = attended
        torch.ops.aten.gelu.out(wide, approximate="tanh", out=both[..., width:])
        return both

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (wide,) = ctx.saved_tensors
        of_attended, of_gelu = gradients[0].tensor_split([gradients[0].shape[-1] - wide.shape[-1]], dim=-1)
        return of_attended, torch.ops.aten.gelu_backward(of_gelu, wide, approximate="tanh")
