"""Z-Image's transformer with an optimised forward (:func:`optimise_forward`, ``library.models.blocks``).

Beside norms and attention:

- *feed-forward*: both inner layers are projected together, and what the outer one takes is recomputed in backward;
- *position table*: diffusers' own numbers, as real cosines and sines: compilers have no complex numbers;
- *timestep embedding*: diffusers gives it the dtype of its first layer's weight, which may be fp8; here it is the
  dtype of that layer's bias, which never is. diffusers does not round the timestep itself: nothing else to mend;
- *captions* are one tensor with a mask, where diffusers takes lists apart. A caption is filled up to a multiple of 32
  tokens with a learned one, which is seen, and the image's positions begin behind these; further tokens are masked.
  That follows from the mask on its device: shapes do not depend on lengths, and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import ZImageTransformer2DModel as DiffusersTransformer
from diffusers.models.transformers import transformer_z_image as diffusers_z
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from library.models.blocks import AttentionProcessor, adopt, run_block
from library.models.vae import image_positions
from library.nn.attention import Backend
from library.nn.frozen_linear import project_recomputed, project_together
from library.nn.norms import swiglu

_MULTIPLE = diffusers_z.SEQ_MULTI_OF  # 32 tokens
_PATCH, _SIZE = (2, 1), "2-1"  # latents a side, and frames, that make one token


def optimise_forward(transformer: DiffusersTransformer, backend: Backend = "auto") -> DiffusersTransformer:
    """Replace the forward of transformer, attention, feed-forward, RMSNorm, RoPE table and timestep embedding in place.

    Returns the model. Parameters are shared, not copied, and keep their names; LoRA may be injected before or after.
    """
    adopt(transformer, ZImageTransformer2DModel, FeedForward, TimestepEmbedder)
    for module in transformer.modules():
        if isinstance(module, diffusers_z.ZImageTransformerBlock):
            module.attention.set_processor(CallableProcessor(backend))
    if not isinstance(transformer.rope_embedder, RealTable):
        transformer.rope_embedder = RealTable(transformer.rope_embedder)
    return transformer


class ZImageTransformer2DModel(DiffusersTransformer):
    """The transformer, called with captions as one tensor or, as diffusers' is, with a list."""

    def forward(
        self, x: Sequence[Tensor], t: Tensor, cap_feats: Any, cap_mask: Tensor | None = None, **others: Any
    ) -> tuple[list[Tensor]]:
        """Return a tuple of one, a list with image - noise [C, 1, h, w] of each sample.

        Args:
            x: latents [C, 1, h, w] of each sample, all of one size.
            t: [B], 0 for noise to 1 for the image.
            cap_feats: text [B, L, D], or a list with [L_i, D] of each sample.
            cap_mask: boolean [B, L], true for real text tokens, which come first; None: all are.
            others: diffusers' extras, none of which are taken.
        """
        assert not any(others.values()), others
        if not isinstance(cap_feats, Tensor):
            cap_feats, cap_mask = _joined(cap_feats)
        # dicts of modules are asked by attribute: compiled, they have no keys
        embedder, final_layer = getattr(self.all_x_embedder, _SIZE), getattr(self.all_final_layer, _SIZE)
        temb = self.t_embedder(t * self.t_scale).type_as(x[0])
        text, length = self.cap_embedder(_filled(cap_feats)), cap_feats.shape[1]
        place = torch.arange(text.shape[1], device=t.device)
        real = place < length if cap_mask is None else F.pad(cap_mask, (0, len(place) - length))
        end = -(-real.sum(dim=-1, keepdim=True) // _MULTIPLE) * _MULTIPLE  # of what is seen, [B, 1]; of all alike [1]
        seen = place < end
        text = torch.where(real.unsqueeze(-1), text, self.cap_pad_token)
        text_rope = self.rope_embedder(F.pad(((place + 1) * seen).unsqueeze(-1), (0, 2)))

        image = embedder(torch.stack([self._patchify_image(each, *_PATCH)[0] for each in x]))
        tokens = image.shape[1]
        image = torch.cat([image, self.x_pad_token.expand(len(x), -tokens % _MULTIPLE, -1)], dim=1)
        rows, columns = (side // _PATCH[0] for side in x[0].shape[-2:])
        behind = F.pad(end + 1, (0, 2)).unsqueeze(-2)  # where the image begins
        rope = self.rope_embedder(_filled(image_positions(rows, columns, t.device).long() + behind))

        for block in self.noise_refiner:
            image = run_block(self, block, image, None, rope, temb)
        for block in self.context_refiner:
            text = run_block(self, block, text, None if cap_mask is None else seen, text_rope)
        stream, rope = torch.cat([image, text], dim=1), torch.cat([rope, text_rope], dim=-2)
        mask = None if cap_mask is None else torch.cat([seen.new_ones(image.shape[:2]), seen], dim=1)
        for block in self.layers:
            stream = run_block(self, block, stream, mask, rope, temb)
        output = final_layer(stream[:, :tokens], c=temb)
        return (self.unpatchify(list(output), [each.shape[1:] for each in x], *_PATCH),)


def _joined(captions: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return ``captions`` [L_i, D] as one tensor [B, L, D] and, where they differ in length, their mask [B, L]."""
    real = [torch.ones_like(each[:, 0], dtype=torch.bool) for each in captions]
    mask = pad_sequence(real, batch_first=True) if len(set(map(len, real))) > 1 else None
    return pad_sequence(list(captions), batch_first=True), mask


def _filled(x: Tensor) -> Tensor:
    """Return ``x`` [..., S, D] with zeros at its end, to a multiple of 32 tokens."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % _MULTIPLE))


class CallableProcessor(AttentionProcessor):
    """The processor as diffusers' attention calls it."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: None = None,
        attention_mask: Tensor | None = None,
        freqs_cis: Tensor | None = None,
    ) -> Tensor:
        """Return the update [B, S, W] of ``hidden_states``; ``freqs_cis``: cosines, then sines, [B, S, D]."""
        qkv = project_together([attn.to_q, attn.to_k, attn.to_v], hidden_states)
        rope = None if freqs_cis is None else freqs_cis.chunk(2, dim=-1)
        return attn.to_out[1](attn.to_out[0](self.attend(attn, qkv, None, rope, attention_mask)))


class RealTable:
    """diffusers' position table as real numbers."""

    def __init__(self, original: diffusers_z.RopeEmbedder) -> None:
        self._original = original

    def __call__(self, ids: Tensor) -> Tensor:
        """Return cosines, then sines, fp32 [..., S, D], of tokens at ``ids`` [..., S, 3]."""
        turns = self._original(ids.flatten(0, -2)).unflatten(0, ids.shape[:-1])
        return torch.cat([turns.real, turns.imag], dim=-1)


class FeedForward(diffusers_z.FeedForward):
    """w2(silu(w1(x)) * w3(x))."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, S, W] to the same."""
        gate, up = project_together([self.w1, self.w3], x)
        (out,) = project_recomputed([self.w2], swiglu, gate, up)
        return out


class TimestepEmbedder(diffusers_z.TimestepEmbedder):
    """diffusers' embedding, whose layers may hold fp8."""

    def forward(self, t: Tensor) -> Tensor:
        """Return the conditioning vector [B, W] of timesteps ``t`` [B] fp32, 0 to 1000."""
        waves = self.timestep_embedding(t, self.frequency_embedding_size)
        dtype = next(parameter.dtype for name, parameter in self.mlp.named_parameters() if name.endswith("bias"))
        return self.mlp(waves.to(dtype))
