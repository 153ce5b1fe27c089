"""How FLUX.1 sees pictures: 2 x 2 latents as one token, each token at (index, row, column).

The published code is https://github.com/black-forest-labs/flux/blob/main/src/flux/sampling.py; diffusers' pipelines
do the same and are what the tests compare with. ``index`` is 0 for the picture that is painted and larger for
reference pictures. The mask of a Fill model has no encoder: the pixels under a token become its channels.

FLUX's blocks with Tandem's forward: diffusers' modules, names and numbers, less kept for backward.

A block is four or eight wide linear layers with cheap operations before each: norm and modulation, GELU, a
concatenation. Autograd keeps the results of those for the LoRA's gradient; written with ``project_recomputed`` a layer
keeps what they are made of, which the operation before it keeps anyway, and makes them again in backward. Layers that
share an input (q, k, v and the MLP of a single block) are projected together.

:func:`swap_blocks` changes the class of every block and nothing else: children, names, hooks and settings stay. In
fp32 the output is that of diffusers bit for bit.

Tandem's hot paths in diffusers' FLUX transformer: ``optimise_forward`` puts them in, parameter names stay.

What is replaced, and why:

- *attention*: q, k and v are projected together (LoRAs on one input share their down projection), then
  RMSNorm, RoPE and attention of ``library.nn``.
- *blocks*: their forward, ``library.models.flux.model``, keeps less for backward.
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

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from diffusers.models.transformers import transformer_flux as diffusers_flux
from torch import Tensor, nn

from library.nn.attention import Backend, attend_jointly
from library.nn.frozen_linear import project_recomputed, project_together
from library.nn.norms import ModulationCache, RMSNorm, clamp_fp16, gelu, memoise, modulated, slice_tokens
from library.nn.rope import MultiAxisRope, Table


def pack_latents(latents: Tensor) -> Tensor:
    """Return tokens [B, h/2 * w/2, 4C] of ``latents`` [B, C, h, w]; a token is channel by row by column."""
    batch, channels, height, width = latents.shape
    patches = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, (height // 2) * (width // 2), 4 * channels)


def unpack_latents(tokens: Tensor, height: int, width: int) -> Tensor:
    """Return latents [B, C, height, width] of ``tokens``; undoes :func:`pack_latents`."""
    batch, _, numbers = tokens.shape
    patches = tokens.view(batch, height // 2, width // 2, numbers // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(batch, numbers // 4, height, width)


def pack_mask(mask: Tensor, factor: int) -> Tensor:
    """Return a mask [B, 1, H, W] in pixels as tokens [B, H/2f * W/2f, 4f²]; ``factor`` f is the encoder's.

    The f x f pixels under one latent become f² channels, row by row, which are then packed as latents are: 256
    numbers a token for FLUX.1's factor of 8.
    """
    batch, _, height, width = mask.shape
    cells = mask.reshape(batch, height // factor, factor, width // factor, factor).permute(0, 2, 4, 1, 3)
    return pack_latents(cells.reshape(batch, factor * factor, height // factor, width // factor))


@functools.lru_cache(maxsize=256)
@torch.inference_mode(mode=False)  # what is drawn with serves training too
def text_positions(tokens: int, device: torch.device | str = "cpu") -> Tensor:
    """Return (0, 0, 0) for every text token, fp32 [tokens, 3]; the same tensor each time, not to be changed."""
    return torch.zeros(tokens, 3, device=device)


@functools.lru_cache(maxsize=256)
@torch.inference_mode(mode=False)  # what is drawn with serves training too
def image_positions(rows: int, columns: int, device: torch.device | str = "cpu", index: int = 0) -> Tensor:
    """Return (index, row, column) of every image token, fp32 [rows * columns, 3].

    The same tensor each time, not to be changed: tables of sines are remembered by it (``library.nn.rope``).
    """
    row = torch.arange(rows, device=device, dtype=torch.float32)
    column = torch.arange(columns, device=device, dtype=torch.float32)
    grid = torch.stack(torch.meshgrid(row, column, indexing="ij"), dim=-1).reshape(-1, 2)
    return torch.nn.functional.pad(grid, (1, 0), value=index)


def swap_blocks(transformer: diffusers_flux.FluxTransformer2DModel) -> None:
    """Give every block of ``transformer`` the forward of this module."""
    for ours in (FluxTransformerBlock, FluxSingleTransformerBlock):
        for module in transformer.modules():
            if type(module) is ours.__base__:
                module.__class__ = ours


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
            joint_attention_kwargs: diffusers' extras; with any, its own forward runs.
            modulation_cache: where the modulation is saved until backward recomputes the block.
        """
        if joint_attention_kwargs:
            return super().forward(hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs)
        attn: Any = self.attn
        image, text = hidden_states, encoder_hidden_states
        image_mod = _modulation(self.norm1, temb, 6, modulation_cache, "image")
        text_mod = _modulation(self.norm1_context, temb, 6, modulation_cache, "text")
        norm, text_norm = modulated(self.norm1.norm), modulated(self.norm1_context.norm)
        image_qkv = project_recomputed([attn.to_q, attn.to_k, attn.to_v], norm, image, *image_mod[:2])
        text_layers = [attn.add_q_proj, attn.add_k_proj, attn.add_v_proj]
        text_qkv = project_recomputed(text_layers, text_norm, text, *text_mod[:2])
        attended = attn.processor.attend(attn, image_qkv, text_qkv, image_rotary_emb)  # [B, L + S, W]
        length = text.shape[1]
        (image_update,) = project_recomputed([attn.to_out[0]], functools.partial(slice_tokens, start=length), attended)
        (text_update,) = project_recomputed([attn.to_add_out], functools.partial(slice_tokens, end=length), attended)
        image = _feedforward(image + image_mod[2] * image_update, self.norm2, self.ff, image_mod[3:])
        text = _feedforward(text + text_mod[2] * text_update, self.norm2_context, self.ff_context, text_mod[3:])
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
        if joint_attention_kwargs:
            return super().forward(hidden_states, encoder_hidden_states, temb, image_rotary_emb, joint_attention_kwargs)
        attn: Any = self.attn
        length = encoder_hidden_states.shape[1]
        stream = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        shift, scale, gate = _modulation(self.norm, temb, 3, modulation_cache, "both")
        layers = [attn.to_q, attn.to_k, attn.to_v, self.proj_mlp]
        *qkv, wide = project_recomputed(layers, modulated(self.norm.norm), stream, shift, scale)
        attended = attn.processor.attend(attn, qkv, None, image_rotary_emb)
        (update,) = project_recomputed([self.proj_out], _beside_gelu, attended, wide)
        stream = clamp_fp16(stream + gate * update)
        return stream[:, :length], stream[:, length:]


def _modulation(norm: Any, temb: Tensor, parts: int, cache: ModulationCache | None, name: str) -> tuple[Tensor, ...]:
    """Return shift, scale, gate (twice, with six parts), each [B, 1, W]."""
    vector = memoise(cache, name, lambda: project_together([norm.linear], norm.silu(temb))[0])
    return vector.unsqueeze(1).chunk(parts, dim=-1)


def _feedforward(stream: Tensor, norm: nn.Module, feedforward: Any, modulation: tuple[Tensor, ...]) -> Tensor:
    """Return ``stream + gate * MLP(modulated norm of stream)``."""
    shift, scale, gate = modulation
    (wide,) = project_recomputed([feedforward.net[0].proj], modulated(norm), stream, shift, scale)
    (update,) = project_recomputed([feedforward.net[2]], gelu, wide)
    return stream + gate * update


def _beside_gelu(attended: Tensor, wide: Tensor) -> Tensor:
    """Return ``attended`` [B, S, W] and GELU of ``wide`` [B, S, M] side by side, [B, S, W + M]."""
    return torch.cat([attended, gelu(wide)], dim=-1)


def optimise_forward(transformer: FluxTransformer2DModel, backend: Backend = "auto") -> FluxTransformer2DModel:
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
        query, key, value = _heads(image, attn.head_dim)
        streams = [(attn.norm_q(query), attn.norm_k(key), value)]
        if text is not None:
            query, key, value = _heads(text, attn.head_dim)
            streams.insert(0, (attn.norm_added_q(query), attn.norm_added_k(key), value))
        return attend_jointly(streams, rope, mask=mask, backend=self.backend).flatten(2)


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
