"""FLUX.3's transformer: how it places tokens, and its optimised forward.

*Positions* are (t, h, w, l). Text advances along l; an image has its rows and columns in steps of a half, at l = 0,
reference images at l = -1, -2, ... (diffusers' ``modular_pipelines/flux3/before_denoise.py``).

*Forward* (:func:`optimise_forward`, ``library.models.blocks``). Text, image and reference images are three modes of
tokens: a few blocks see one mode each, then all run as one sequence. All blocks are alike: attention and feed-forward
side by side, from one modulated norm. Beside norms and attention:

- *modulation*: diffusers has a vector for each token, [B, S, 3W], the same for all tokens of a mode. Here it is a row
  for each mode;
- *one stream*: the joint blocks get and give text, image and references as one tensor, which diffusers joins and splits
  in each block;
- *timestep embedding*: diffusers rounds the timestep to the compute dtype, *then* multiplies by 1000 and takes sines of
  it. Here it is fp32 until the embedding is finished;
- *padding*: captions of a batch that differ in length are filled up, which attention is told; diffusers has no mask.

Queries and keys are normed and turned in fp32 and rounded once, as the model was trained.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import Flux3Transformer2DModel as DiffusersTransformer
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers import transformer_flux3 as diffusers_flux3
from torch import Tensor

from library.models.blocks import AttentionProcessor, adopt, adopt_positions, run_block
from library.models.vae import grid_positions
from library.nn.attention import Backend
from library.nn.frozen_linear import project_recomputed
from library.nn.norms import RMSNorm, modulated, modulated_norm, swiglu_halves
from library.nn.rope import Table

SHIFT, DISTILLED_STEPS = 6.93, 16  # of the published schedules, and steps of the distilled model's
_STEP = 0.5  # of positions from row to row and from column to column


def positions_of(sizes: tuple[tuple[int, int], ...], device: torch.device | str = "cpu", first: int = 0) -> Tensor:
    """Return (0, h, w, l) of the tokens of images, fp32 [tokens, 4].

    Args:
        sizes: rows and columns of each image, in tokens.
        first: l of the first one; each further one is at 1 less.
    """
    grids = [F.pad(grid_positions(*size, device, _STEP), (1, 0)) for size in sizes]
    return torch.cat([F.pad(grid, (0, 1), value=first - i) for i, grid in enumerate(grids)])


def step_from(sigmas: Tensor, steps: int = DISTILLED_STEPS, shift: float = SHIFT) -> Tensor:
    """Return the noise levels that a schedule of even ``steps`` with a static ``shift`` goes to from ``sigmas``."""
    even = (sigmas / (shift - (shift - 1) * sigmas) - 1 / steps).clamp(min=0)
    return shift * even / (1 + (shift - 1) * even)


def optimise_forward(transformer: DiffusersTransformer, backend: Backend = "auto") -> DiffusersTransformer:
    """Replace the forward of the model, its blocks, attention, RMSNorm and RoPE table in place; return the model.

    Parameters are shared, not copied, and keep their names; LoRA may be injected before or after.
    """
    adopt(transformer, Flux3Transformer2DModel, Flux3ModeTransformerBlock, Flux3SingleTransformerBlock)
    for block in transformer.txt_mode_blocks:
        block.__class__ = Flux3TextTransformerBlock
    transformer.set_attn_processor(AttentionProcessor(backend))
    for attn in (module for module in transformer.modules() if isinstance(module, diffusers_flux3.Flux3Attention)):
        attn.norm_q.__class__ = attn.norm_k.__class__ = WideRMSNorm
    adopt_positions(transformer)
    return transformer


class WideRMSNorm(RMSNorm):
    """RMSNorm in fp32, which is not rounded: attention does that behind the turn."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., dim]; returns fp32, or fp64 of such."""
        return super().forward(x.to(torch.promote_types(x.dtype, torch.float32)))


class Flux3ModeTransformerBlock(diffusers_flux3.Flux3ModeTransformerBlock):
    """A block of one mode, of the image or of reference images."""

    def forward(
        self, hidden_states: Tensor, temb_mod: Tensor, image_rotary_emb: Table, mask: Tensor | None = None
    ) -> Tensor:
        """Return the stream [B, S, W].

        Args:
            hidden_states: [B, S, W].
            temb_mod: shift, scale and gate side by side, [B, 1, 3W].
            image_rotary_emb: (cos, sin), each [S, D/2].
            mask: boolean [B, S], true for real tokens; None: all are.
        """
        return _run(self, hidden_states, temb_mod, image_rotary_emb, mask, (hidden_states.shape[1],))


class Flux3TextTransformerBlock(Flux3ModeTransformerBlock):
    """A block of the text: a class of its own, for none of its neighbours among the blocks takes what it gives."""


class Flux3SingleTransformerBlock(diffusers_flux3.Flux3SingleTransformerBlock):
    """A joint block: text, image and references as one stream, each with its own modulation."""

    def forward(
        self,
        hidden_states: Tensor,
        temb_mod: Tensor,
        image_rotary_emb: Table,
        mask: Tensor | None,
        lengths: tuple[int, ...],
    ) -> Tensor:
        """Return the stream [B, S, W].

        Args:
            hidden_states: tokens of all modes, [B, S, W].
            temb_mod: shift, scale and gate side by side, of each mode, [B, modes, 3W].
            image_rotary_emb, mask: as in a block of one mode.
            lengths: tokens of each mode.
        """
        return _run(self, hidden_states, temb_mod, image_rotary_emb, mask, lengths)


def _run(
    block: Any, stream: Tensor, vectors: Tensor, rope: Table, mask: Tensor | None, lengths: tuple[int, ...]
) -> Tensor:
    """Return the stream with what attention and feed-forward make of it."""
    attn, ff = block.attn, block.ff
    shift, scale, gate = vectors.chunk(3, dim=-1)
    norm = functools.partial(_modulated_by_mode, eps=block.norm.eps, lengths=lengths)
    qkv = project_recomputed([attn.to_q, attn.to_k, attn.to_v], norm, stream, shift, scale)
    attended = attn.processor.attend(attn, qkv, None, rope, mask)
    # Last, so that backward has done with its gradient, six times as wide as the stream, when attention's begins.
    (wide,) = project_recomputed([ff.linear_in], norm, stream, shift, scale)
    (update,) = project_recomputed([ff.linear_out], swiglu_halves, wide)
    update = update + attn.to_out[0](attended)
    parts = zip(stream.split(lengths, 1), gate.split(1, 1), update.split(lengths, 1), strict=True)
    return _joined([part + own * more for part, own, more in parts])


def _modulated_by_mode(x: Tensor, shift: Tensor, scale: Tensor, eps: float, lengths: tuple[int, ...]) -> Tensor:
    """Return :func:`modulated_norm` of ``x`` [B, S, W], whose modes of ``lengths`` have a row each of the vectors."""
    parts = zip(x.split(lengths, 1), shift.split(1, 1), scale.split(1, 1), strict=True)
    return _joined([modulated_norm(*part, eps) for part in parts])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts), dim=1) if len(parts) > 1 else parts[0]


class Flux3Transformer2DModel(DiffusersTransformer):
    """The transformer, whose blocks are given a row of modulation for each mode."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        img_ids: Tensor,
        txt_ids: Tensor,
        image_cond_hidden_states: Tensor | None = None,
        image_cond_ids: Tensor | None = None,
        target_timestep: Tensor | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
        encoder_hidden_states_mask: Tensor | None = None,
    ) -> Any:
        """Return noise - image of the image's tokens, [B, N, C].

        Args:
            hidden_states: noisy tokens [B, N, C]. img_ids: their positions [N, 4].
            encoder_hidden_states: text [B, L, D]. txt_ids: its positions [L, 4].
            timestep: noise levels [B], 0 to 1, which are not rounded.
            image_cond_hidden_states: tokens of all reference images, [B, R, C]. image_cond_ids: their positions [R, 4].
            target_timestep: noise levels [B] that a flow map jumps to, and it alone; None: a step of its own schedule.
            attention_kwargs: diffusers' extras, of which none are taken.
            return_dict: whether diffusers' output is returned, or a tuple.
            encoder_hidden_states_mask: boolean [B, L], true for real text tokens; None: all are.
        """
        if target_timestep is None and self.config.flow_map:
            target_timestep = step_from(timestep.float())
        given = {"txt": (encoder_hidden_states, txt_ids), "image": (hidden_states, img_ids)}  # in the stream's order
        if image_cond_hidden_states is not None and image_cond_ids is not None:
            given["image_cond"] = (image_cond_hidden_states, image_cond_ids)
        lengths = tuple(ids.shape[0] for _, ids in given.values())
        positions = [ids for _, ids in given.values()]
        rope = self.pos_embed(torch.cat(positions))
        ropes = dict(zip(given, zip(*(table.split(lengths) for table in rope), strict=True), strict=True))
        embedded = self._embedded(timestep, target_timestep, hidden_states.dtype)
        modulated_by = {mode: F.silu(embedded["image" if mode == "image" else "rest"]) for mode in given}
        masks = {"txt": encoder_hidden_states_mask}

        streams: dict[str, Tensor] = {}  # dicts of modules are asked by attribute: compiled, they have no keys
        for mode in ("image", "txt", "image_cond"):
            if mode not in given:
                continue
            embedder = self.context_embedder if mode == "txt" else getattr(self.x_embedders, mode)
            blocks = self.txt_mode_blocks if mode == "txt" else self.mode_blocks[mode]
            stream = embedder(given[mode][0])
            vectors = getattr(self.early_stream_modulations, mode)(modulated_by[mode]).unsqueeze(1)
            for block in blocks:
                stream = run_block(self, block, stream, vectors, ropes[mode], masks.get(mode))
            streams[mode] = stream

        stream = torch.cat([streams[mode] for mode in given], dim=1)
        heads = [getattr(self.single_stream_modulations, mode) for mode in given]
        vectors = torch.stack([head(modulated_by[mode]) for head, mode in zip(heads, given, strict=True)], dim=1)
        mask = encoder_hidden_states_mask
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], sum(lengths[1:]))], dim=1)
        for block in self.single_transformer_blocks:
            stream = run_block(self, block, stream, vectors, rope, mask, lengths)

        image = stream[:, lengths[0] : lengths[0] + lengths[1]]
        scale, shift = self.norm_out.linear(modulated_by["image"]).unsqueeze(1).chunk(2, dim=-1)
        (output,) = project_recomputed([self.proj_out], modulated(self.norm_out.norm), image, shift, scale)
        return Transformer2DModelOutput(sample=output) if return_dict else (output,)

    def _embedded(self, timestep: Tensor, target: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the conditioning vectors [B, W] of the image, at ``timestep``, and of the rest, at 0."""
        levels = torch.cat([timestep.float(), torch.zeros_like(timestep, dtype=torch.float32)])
        embedded = self.timestep_embedder(self.time_proj(levels * 1000).to(dtype))
        if target is not None:  # without a flow map's embedder that is an error
            jump = self.target_timestep_embedder(self.time_proj(target.float() * 1000).to(dtype))
            embedded = embedded + torch.cat([jump, jump])
        return dict(zip(("image", "rest"), embedded.chunk(2), strict=True))
