"""What the optimised forwards of diffusers' transformers share; parameter names, hooks and settings stay diffusers'.

A block is wide linear layers with cheap operations before each: norm and modulation, GELU, a slice of tokens, a
concatenation. Autograd saves the results of those for the LoRA's gradient; written with ``project_recomputed`` a layer
saves what they are made of, which the operation before it saves anyway, and recomputes them in backward. Layers that
share an input (q, k, v) are projected together: LoRAs on one input share their down projection.

A family's ``model.py`` gives diffusers' modules its own classes and RMSNorms that keep the dtype of their input under
autocast, so that q and k stay bf16 beside v (:func:`adopt`), and one attention processor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from torch import Tensor, nn

from library.nn.attention import Backend, Segment, attend_jointly
from library.nn.frozen_linear import project_recomputed, project_together
from library.nn.norms import ModulationCache, RMSNorm, gelu, memoise, slice_tokens, swiglu_halves
from library.nn.rope import MultiAxisRope, Table, rotate_interleaved


def adopt(transformer: nn.Module, *classes: type[nn.Module]) -> None:
    """Give every module of a base of ``classes`` that class of ours; nothing else of it changes.

    Our RMSNorm, with the same weight, takes the place of every RMSNorm of torch and diffusers.
    """
    ours = {one.__base__: one for one in classes}
    for module in transformer.modules():
        if type(module) in ours:
            module.__class__ = ours[type(module)]
    for parent in list(transformer.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (nn.RMSNorm, DiffusersRMSNorm)) and not isinstance(child, RMSNorm):
                setattr(parent, name, RMSNorm.adopt(child))


def adopt_positions(transformer: Any) -> bool:
    """Let a ``MultiAxisRope`` take the place of diffusers' position table; return whether it was another before."""
    if new := not isinstance(transformer.pos_embed, MultiAxisRope):
        transformer.pos_embed = MultiAxisRope(transformer.config.axes_dims_rope, theta=transformer.pos_embed.theta)
    return new


def run_block(transformer: Any, block: nn.Module, *arguments: Any) -> Any:
    """Return ``block(*arguments)``, which backward computes again where ``transformer`` checkpoints its blocks."""
    if transformer.gradient_checkpointing and torch.is_grad_enabled():
        return transformer._gradient_checkpointing_func(block, *arguments)
    return block(*arguments)


@dataclass(frozen=True)
class AttentionProcessor:
    """How a module of diffusers' attends: with which kernel, and by which norms, which the module has.

    ``rounding``: of query, key and value, to see what attention in low precision does. ``turn``: how queries and keys
    get their positions.
    """

    backend: Backend = "auto"
    rounding: Callable[[Tensor], Tensor] | None = None
    turn: Callable[[Tensor, Table], Tensor] = rotate_interleaved

    def attend(
        self,
        attn: Any,
        image: Sequence[Tensor],
        text: Sequence[Tensor] | None,
        rope: Any,
        mask: Tensor | None = None,
        text_mask: Tensor | None = None,
        segments: Sequence[Segment] = (),
    ) -> Tensor:
        """Return attention over text and image, [B, L + S, W].

        Args:
            attn: has the norms.
            image: projected q, k, v, each [B, S, W]; under tensor parallelism W, and so the heads, is this rank's
                share.
            text: q, k, v of the text, each [B, L, W]; None: one stream.
            rope: (cos, sin), each [L + S, D/2], or what ``turn`` takes; or None.
            mask: boolean or additive, [B, keys] or broadcastable to [B, H, queries, keys].
            text_mask: boolean [B, L], true for real text tokens; None: all are.
            segments: parts of a sequence that see what is before them alone, see ``attend_in_order``.
        """
        head_dim = attn.inner_dim // attn.heads
        streams = [(image, (attn.norm_q, attn.norm_k))]
        if text is not None:
            streams.insert(0, (text, (attn.norm_added_q, attn.norm_added_k)))
        heads = [([tensor.unflatten(-1, (-1, head_dim)) for tensor in qkv], norms) for qkv, norms in streams]
        if text_mask is not None:
            mask = torch.cat([text_mask, text_mask.new_ones(image[0].shape[:2])], dim=1)
        options: Any = {"mask": mask, "segments": segments, "backend": self.backend, "rounding": self.rounding}
        return attend_jointly(heads, rope, turn=self.turn, **options).flatten(2)


Stream = tuple[Tensor, Callable[..., Tensor], Sequence[Tensor]]  # tokens, their norm, its shift and scale and more


def joint_attention(
    attn: Any, image: Stream, text: Stream, rope: Table | None, text_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return what attention among one another gives for the image [B, S, W] and for the text [B, L, W].

    Args:
        attn: diffusers' attention, with an :class:`AttentionProcessor`.
        image, text: the streams.
        rope: (cos, sin), each [L + S, D/2].
        text_mask: boolean [B, L], true for real text tokens; None: all are.
    """
    (pixels, image_norm, image_mod), (words, text_norm, text_mod) = image, text
    image_qkv = project_recomputed([attn.to_q, attn.to_k, attn.to_v], image_norm, pixels, *image_mod[:2])
    text_layers = [attn.add_q_proj, attn.add_k_proj, attn.add_v_proj]
    text_qkv = project_recomputed(text_layers, text_norm, words, *text_mod[:2])
    attended = attn.processor.attend(attn, image_qkv, text_qkv, rope, text_mask=text_mask)  # [B, L + S, W]
    length = words.shape[1]
    (image_update,) = project_recomputed([attn.to_out[0]], functools.partial(slice_tokens, start=length), attended)
    (text_update,) = project_recomputed([attn.to_add_out], functools.partial(slice_tokens, end=length), attended)
    return image_update, text_update


def modulation(
    silu: nn.Module, linear: nn.Module, temb: Tensor, parts: int, cache: ModulationCache | None, name: str
) -> tuple[Tensor, ...]:
    """Return shift, scale, gate (twice, with six parts), each [B, 1, W], of the conditioning ``temb`` [B, W]."""
    vector = memoise(cache, name, lambda: project_together([linear], silu(temb))[0])
    return vector.unsqueeze(1).chunk(parts, dim=-1)


def feedforward(
    terms: tuple[Tensor, Tensor, Tensor], norm: Callable[..., Tensor], layers: Any, modulation: Sequence[Tensor]
) -> Tensor:
    """Return ``h + gate * MLP(norm(h, shift, scale))`` with ``h = stream + own_gate * update``.

    Saved for backward are the ``terms``, which ``h`` was made of and which are saved anyway, and not ``h``.

    Args:
        terms: stream [B, S, W], own_gate [B, 1, W], update [B, S, W].
        norm: see ``modulated``. layers: diffusers' feed-forward. modulation: shift, scale and gate, [B, 1, W].
    """
    shift, scale, gate = modulation

    def normed(stream: Tensor, own_gate: Tensor, update: Tensor, *more: Tensor) -> Tensor:
        return norm(stream + own_gate * update, *more)

    inner, outer, activation = _parts(layers)
    (wide,) = project_recomputed([inner], normed, *terms, shift, scale)
    (update,) = project_recomputed([outer], activation, wide)
    stream, own_gate, first = terms
    return stream + own_gate * first + gate * update


def _parts(layers: Any) -> tuple[nn.Module, nn.Module, Callable[[Tensor], Tensor]]:
    """Return the layers of diffusers' feed-forward and what is between them: SwiGLU since FLUX.2, else GELU."""
    if hasattr(layers, "linear_in"):
        return layers.linear_in, layers.linear_out, swiglu_halves
    return layers.net[0].proj, layers.net[2], gelu
