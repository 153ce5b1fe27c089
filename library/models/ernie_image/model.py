"""ERNIE-Image's transformer with an optimised forward (:func:`optimise_forward`, ``library.models.blocks``).

One sequence: the image's tokens, then the caption's. Beside norms, attention and blocks:

- *order*: tensors are [B, S, W] throughout; diffusers' are [S, B, W] outside of attention;
- *modulation*: six vectors that all blocks share, given to a block as one, [B, 1, 6W]; diffusers repeats them for
  every token;
- *positions*: a text token stands at (its number, 0, 0), an image's behind its caption's last, at (length, row,
  column). Cosines and sines are repeated as in the interleaved layout and used as in the half-split one
  (:func:`turn_unevenly`), which the model was trained with;
- *mask*: only captions of a batch that differ in length need one; ``text_lens`` is None where they do not.

diffusers does not round the timestep itself: nothing to mend.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_ernie_image as diffusers_ernie
from torch import Tensor

from library.models.blocks import AttentionProcessor, adopt, run_block
from library.models.vae import image_positions
from library.nn.attention import Backend
from library.nn.frozen_linear import project_recomputed, project_together
from library.nn.norms import clamp_fp16, modulated_norm
from library.nn.rope import MultiAxisRope, Table, turn_unevenly


def optimise_forward(
    transformer: diffusers_ernie.ErnieImageTransformer2DModel, backend: Backend = "auto"
) -> diffusers_ernie.ErnieImageTransformer2DModel:
    """Replace the forward of transformer, blocks, attention, norms and position table in place; return the model.

    Parameters are shared, not copied, and keep their names; LoRA may be injected before or after.
    """
    adopt(transformer, ErnieImageTransformer2DModel, ErnieImageSharedAdaLNBlock, ErnieImageAdaLNContinuous)
    for block in transformer.layers:
        block.self_attention.set_processor(AttentionProcessor(backend, turn=turn_unevenly))
    if not isinstance(transformer.pos_embed, RepeatedRope):
        transformer.pos_embed = RepeatedRope(transformer.config.rope_axes_dim, transformer.config.rope_theta)
    return transformer


class ErnieImageTransformer2DModel(diffusers_ernie.ErnieImageTransformer2DModel):
    """The transformer, called as diffusers' is."""

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        text_bth: Tensor,
        text_lens: Tensor | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Return the velocity noise - image, like ``hidden_states``.

        Args:
            hidden_states: patches of latents [B, 4C, h, w].
            timestep: [B], 0 to 1000.
            text_bth: text [B, L, D].
            text_lens: [B], how many tokens of each caption are real, which come first; None: all are.
            return_dict: as in diffusers.
        """
        rows, columns = hidden_states.shape[-2:]
        text = text_bth if self.text_proj is None else self.text_proj(text_bth)
        image, length = self.x_embedder(hidden_states), text.shape[1]
        tokens = image.shape[1]
        rope, mask = self.pos_embed(_positions(rows, columns, length, text_lens, image.device)), None
        if text_lens is not None:
            real = torch.arange(length, device=text.device) < text_lens.unsqueeze(1)
            mask = torch.cat([real.new_ones(image.shape[:2]), real], dim=1)
        temb = self.time_embedding(self.time_proj(timestep).to(hidden_states.dtype))
        modulation = self.adaLN_modulation(temb).unsqueeze(1)
        stream = torch.cat([image, text], dim=1)
        for block in self.layers:
            stream = run_block(self, block, stream, rope, modulation, mask)
        output = self.final_linear(self.final_norm(stream[:, :tokens], temb))
        output = output.transpose(1, 2).unflatten(-1, (rows, columns))
        return diffusers_ernie.ErnieImageTransformer2DModelOutput(output) if return_dict else (output,)


def _positions(rows: int, columns: int, length: int, lengths: Tensor | None, device: torch.device) -> Tensor:
    """Return (index, row, column) of the image's tokens, then the caption's: fp32 [S, 3], with ``lengths`` [B, S, 3].

    Args:
        rows, columns: of the image's tokens.
        length: of the caption, with what it is filled up with.
        lengths: [B], without that.
    """
    text = F.pad(torch.arange(length, device=device, dtype=torch.float32).unsqueeze(1), (0, 2))
    if lengths is None:
        return torch.cat([image_positions(rows, columns, device, length), text])
    behind = F.pad(lengths.to(text.dtype).view(-1, 1, 1), (0, 2))
    image = image_positions(rows, columns, device) + behind
    return torch.cat([image, text.expand(len(lengths), -1, -1)], dim=1)


class RepeatedRope(MultiAxisRope):
    """The position table, each number twice; positions may have a batch axis."""

    def forward(self, positions: Tensor) -> Table:
        """Return (cos, sin), each fp32 [..., S, D], of ``positions`` [..., S, 3]."""
        table = super().forward(positions.flatten(0, -2))
        cos, sin = (each.repeat_interleave(2, dim=-1).unflatten(0, positions.shape[:-1]) for each in table)
        return cos, sin


class ErnieImageSharedAdaLNBlock(diffusers_ernie.ErnieImageSharedAdaLNBlock):
    """Attention, then a gated MLP, of one stream."""

    def forward(self, x: Tensor, rotary_pos_emb: Table, temb: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Map the stream [B, S, W] to the same.

        Args:
            x: image, then text.
            rotary_pos_emb: (cos, sin), each [S, D] or [B, S, D].
            temb: shift, scale and gate of attention, then of the MLP, side by side: [B, 1, 6W].
            attention_mask: boolean [B, S], true for real tokens; None: all are.
        """
        attn: Any = self.self_attention
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = temb.chunk(6, dim=-1)

        def normed(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
            return _modulated(self.adaLN_sa_ln(x), shift, scale)

        def normed_sum(x: Tensor, gate: Tensor, update: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
            return _modulated(self.adaLN_mlp_ln(x + gate * update), shift, scale)

        qkv = project_recomputed([attn.to_q, attn.to_k, attn.to_v], normed, x, shift, scale)
        attended = attn.processor.attend(attn, qkv, None, rotary_pos_emb, attention_mask)
        (update,) = project_together([attn.to_out[0]], attended)
        layers = [self.mlp.gate_proj, self.mlp.up_proj]
        wide = project_recomputed(layers, normed_sum, x, gate, update, mlp_shift, mlp_scale)
        (mlp_update,) = project_recomputed([self.mlp.linear_fc2], _geglu, *wide)
        return clamp_fp16(x + gate * update + mlp_gate * mlp_update)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return ``x`` [B, S, W] times (1 + scale) plus shift, these [B, 1, W], rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.addcmul(shift.to(wide), x.to(wide), scale.to(wide) + 1).to(x.dtype)


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return GELU of ``gate``, in its exact form, times ``up``."""
    return F.gelu(gate) * up


class ErnieImageAdaLNContinuous(diffusers_ernie.ErnieImageAdaLNContinuous):
    """The norm before the last layer."""

    def forward(self, x: Tensor, conditioning: Tensor) -> Tensor:
        """Return ``x`` [B, S, W], modulated by what is made of ``conditioning`` [B, W]."""
        scale, shift = self.linear(conditioning).unsqueeze(1).chunk(2, dim=-1)
        return modulated_norm(x, shift, scale, self.norm.eps)
