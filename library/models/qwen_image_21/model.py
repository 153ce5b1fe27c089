"""Qwen-Image-2.1's transformer with an optimised forward (:func:`optimise_forward`, ``library.models.blocks``).

One sequence goes through the blocks: text, reference images where the text names them, and last the image that is
painted. A token of the text sees what is before it, one of an image all of its image too; so what is before the painted
image does not depend on it, and takes its modulation from timestep 0. Beside norms, attention and blocks:

- *attention*: each run of text and each image is a call of the kernel, without a mask unless captions are padded, whose
  padding stands before the painted image and is hidden from it alone;
- *modulation*, one for all blocks, scales and gates: what comes before the painted image takes one row, each painted
  image its own; they are never spread over the tokens;
- *feed-forward*: both inner layers are projected together, and what the outer one takes is recomputed in backward;
- *layout*: where texts and images begin is known from shapes, so that the host waits for nothing. diffusers reads it
  from a mask, which samplers still give;
- *position table*: diffusers' own numbers, as real cosines and sines. In a batch of captions of different lengths an
  image stands where its own caption ends; diffusers puts all where the longest ends, so that what a caption gives
  depends on the others;
- *timestep*: it stays fp32 until it is embedded; diffusers rounds it to the compute dtype;
- the output is that of the painted image alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.transformers import transformer_qwenimage21 as diffusers_qwen
from torch import Tensor, nn

from library.models.blocks import AttentionProcessor, adopt, run_block
from library.nn.attention import Backend, Segment
from library.nn.frozen_linear import project_recomputed
from library.nn.norms import clamp_fp16, modulated_norm, swiglu
from library.nn.rope import Table

ImageShape = tuple[int, ...]  # 1, rows, columns
_SLOT = 4  # latents that stand for one token of an image in the text


class QwenImage21TransformerBlock(diffusers_qwen.QwenImage21TransformerBlock):
    """Attention, then SwiGLU, of one stream."""

    def forward(
        self,
        hidden_states: Tensor,
        modulation: Tensor,
        rotary_emb: Table,
        segments: Sequence[Segment],
        key_valid: Tensor | None = None,
    ) -> Tensor:
        """Return the stream [B, S, W].

        Args:
            hidden_states: [B, S, W].
            modulation: scale, gate, scale, gate of each painted image and, in row B, of what stands before it,
                [B + 1, 4W]; without that row all tokens take their image's.
            rotary_emb: (cos, sin), each [S, D/2].
            segments: runs of text and images in order; the last is the painted image.
            key_valid: boolean [B, S], false where a caption is padded; None: nowhere.
        """
        attn: Any = self.attn
        stream, length, eps = hidden_states, segments[-1][0], self.img_norm1.eps
        scale, gate, mlp_scale, mlp_gate = modulation.unsqueeze(1).chunk(4, dim=-1)

        def normed(x: Tensor, scale: Tensor) -> Tensor:
            before, painted = _rows(scale, len(x))
            parts = modulated_norm(x[:, :length], None, before, eps), modulated_norm(x[:, length:], None, painted, eps)
            return torch.cat(parts, dim=1)

        def added(x: Tensor, update: Tensor, gate: Tensor) -> Tensor:
            before, painted = _rows(gate.tanh(), len(x))
            parts = before * update[:, :length], painted * update[:, length:]
            return x + torch.cat(parts, dim=1)

        def normed_sum(x: Tensor, update: Tensor, gate: Tensor, scale: Tensor) -> Tensor:
            return normed(added(x, update, gate), scale)

        qkv = project_recomputed([attn.to_q, attn.to_k, attn.to_v], normed, stream, scale)
        attended = attn.processor.attend(attn, qkv, None, rotary_emb, mask=key_valid, segments=segments)
        update = attn.to_out[1](attn.to_out[0](attended))
        layers = [self.img_mlp.gate_layer, self.img_mlp.proj]
        wide = project_recomputed(layers, normed_sum, stream, update, gate, mlp_scale)
        (mlp_update,) = project_recomputed([self.img_mlp.out], swiglu, *wide)
        return clamp_fp16(added(added(stream, update, gate), mlp_update, mlp_gate))


def _rows(vectors: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Return what tokens before the painted images take of ``vectors`` [B + 1, 1, W], and theirs, each [B, 1, W]."""
    own = vectors[:batch]
    return (vectors[batch:].expand_as(own) if len(vectors) > batch else own), own


class QwenImage21Transformer2DModel(diffusers_qwen.QwenImage21Transformer2DModel):
    """The transformer, called with the layout of its sequence instead of a mask."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        img_shapes: Sequence[Sequence[ImageShape]],
        img_mask: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        kv_cache: None = None,
        kv_cache_mode: None = None,
        return_dict: bool = True,
        text_runs: Sequence[int] = (),
    ) -> Any:
        """Return the painted images' velocities [B, S, C].

        Args:
            hidden_states: latents [B, sum of S, C] of the reference images in order, then of the painted one.
            encoder_hidden_states: text [B, T, D]; with ``img_mask`` with what stands in it for images.
            timestep: [B], 0 to 1, in any precision.
            img_shapes: of each sample, the images' (1, rows, columns) in order; the first sample counts for all.
            img_mask: boolean [B, T + S / 4], true where the text has a place for four latents of an image, and behind
                it; it is read back from its device. None: ``text_runs`` says where images are.
            encoder_hidden_states_mask: boolean [B, T], true for real tokens; padding is at the end. None: all are.
            attention_kwargs, kv_cache, kv_cache_mode: diffusers' extras, which are not used here.
            return_dict: as in diffusers.
            text_runs: tokens before each reference image; those that are left come before the painted one.
        """
        assert kv_cache is None, "sampled with use_kv_cache=False"
        shapes = [tuple(shape) for shape in img_shapes[0]]
        text, valid = encoder_hidden_states, encoder_hidden_states_mask
        if img_mask is not None and len(shapes) > 1:  # one image is painted, none stands in the text
            places = img_mask[0, : text.shape[1]]
            text_runs = _text_before(img_mask[0].tolist(), shapes)
            text, valid = text[:, ~places], None if valid is None else valid[:, ~places]
        runs = [*text_runs, *[0] * (len(shapes) - 1 - len(text_runs))]
        runs.append(text.shape[1] - sum(runs))
        segments = _segments(runs, shapes)
        sizes = [end - start for start, end, causal in segments if not causal]
        images, words = self.img_in(hidden_states).split(sizes, dim=1), self.txt_in(text).split(runs, dim=1)
        stream = torch.cat([part for pair in zip(words, images, strict=True) for part in pair], dim=1)
        key_valid = missing = None
        if valid is not None:
            missing = (~valid).sum(dim=1)
            before = stream.shape[1] - sizes[-1] - valid.shape[1]  # tokens of reference images
            key_valid = nn.functional.pad(valid, (before, sizes[-1]), value=True)
        table = self.pos_embed(runs, shapes, stream.device, missing)
        batch, exact = len(timestep), timestep.float()
        if self.config.causal_condition:
            exact = torch.cat([exact, exact.new_zeros(1)])
        temb = self.time_text_embed(exact, stream)
        modulation = self.modulation(temb)
        for block in self.transformer_blocks:
            stream = run_block(self, block, stream, modulation, table, segments, key_valid)
        output = self.proj_out(self.norm_out(stream[:, segments[-1][0] :], temb[:batch]))
        return diffusers_qwen.Transformer2DModelOutput(sample=output) if return_dict else (output,)


def _text_before(places: Sequence[bool], shapes: Sequence[ImageShape]) -> list[int]:
    """Return how many tokens of text stand before each image but the last; ``places``: see ``img_mask``."""
    runs, at = list[int](), 0
    for shape in shapes[:-1]:
        image = places.index(True, at)
        runs.append(image - at)
        at = image + math.prod(shape) // _SLOT
    return runs


def _segments(runs: Sequence[int], shapes: Sequence[ImageShape]) -> tuple[Segment, ...]:
    """Return texts that are not empty, which are causal, and images, in order."""
    lengths = [
        each for run, shape in zip(runs, shapes, strict=True) for each in ((run, True), (math.prod(shape), False))
    ]
    ends = list(itertools.accumulate(length for length, _ in lengths))
    places = zip([0, *ends], ends, lengths, strict=False)
    return tuple((start, end, causal) for start, end, (length, causal) in places if length)


class InterleavedRope(nn.Module):
    """diffusers' position table for texts and images in turn, as real numbers."""

    def __init__(self, theta: int, axes_dims: Sequence[int]) -> None:
        super().__init__()
        self.theta = theta
        with torch.device("cpu"):
            self._turns = diffusers_qwen.QwenImage21Rope(theta, list(axes_dims)).freqs

    @torch.compiler.disable  # a compiler cannot generate complex code
    def forward(
        self,
        runs: Sequence[int],
        shapes: Sequence[ImageShape],
        device: torch.device,
        missing: Tensor | None = None,
    ) -> Table:
        """Return (cos, sin), each fp32 [S, D/2], or [B, S, D/2] with ``missing``.

        A token of text is one further on all axes. An image stays at its place on the first, its rows and columns are
        counted from its middle, and text goes on as far behind it as its longer side is long.

        Args:
            runs: tokens of text before each of the images of ``shapes``.
            missing: [B], so many at the end of each sample's last text are padding.
        """
        self._turns = [turns.to(device) for turns in self._turns]
        places = _places(runs, shapes, device)
        if missing is not None:
            painted = torch.arange(len(places), device=device) >= len(places) - math.prod(shapes[-1])
            index = places[:, 0] - painted * missing.unsqueeze(1)
            places = torch.cat([index.unsqueeze(2), places[:, 1:].expand(len(index), -1, -1)], dim=2)
        joint = torch.cat([turns[places[..., axis]] for axis, turns in enumerate(self._turns)], dim=-1)
        return joint.real.contiguous(), joint.imag.contiguous()


def _places(runs: Sequence[int], shapes: Sequence[ImageShape], device: torch.device) -> Tensor:
    """Return index, row and column of each token, [S, 3]; those below 0 count from the end of diffusers' tables."""
    places, at = list[Tensor](), 0
    for run, (_, rows, columns) in zip(runs, shapes, strict=True):
        places.append(torch.arange(at, at + run, device=device).unsqueeze(1).expand(-1, 3))
        at += run
        row, column = (torch.arange(side, device=device) - (side - side // 2) for side in (rows, columns))
        grid = torch.stack(torch.meshgrid(row, column, indexing="ij"), dim=-1).reshape(-1, 2)
        places.append(nn.functional.pad(grid, (1, 0), value=at))
        at += max(rows, columns)
    return torch.cat(places)


def optimise_forward(
    transformer: diffusers_qwen.QwenImage21Transformer2DModel, backend: Backend = "auto"
) -> diffusers_qwen.QwenImage21Transformer2DModel:
    """Replace the forward of transformer, blocks, attention, RMSNorm and RoPE table in place; return the model.

    Parameters are shared, not copied, and keep their names; LoRA may be injected before or after. The position table
    is made anew, so the model may come from the meta device.
    """
    adopt(transformer, QwenImage21Transformer2DModel, QwenImage21TransformerBlock)
    transformer.set_attn_processor(AttentionProcessor(backend))
    if not isinstance(transformer.pos_embed, InterleavedRope):
        transformer.pos_embed = InterleavedRope(transformer.pos_embed.theta, transformer.config.axes_dims_rope)
    return transformer
