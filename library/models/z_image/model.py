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
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers import transformer_z_image as diffusers_z
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from library.models.blocks import AttentionProcessor, adopt, run_block
from library.models.vae import image_positions
from library.nn.attention import Backend
from library.nn.frozen_linear import project_recomputed, project_together
from library.nn.norms import swiglu

_MULTIPLE = diffusers_z.SEQ_MULTI_OF  # 32 tokens
_PATCH = 2, 1  # latents a side, and frames, that make one token


def optimise_forward(
    transformer: diffusers_z.ZImageTransformer2DModel, backend: Backend = "auto"
) -> diffusers_z.ZImageTransformer2DModel:
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


class ZImageTransformer2DModel(diffusers_z.ZImageTransformer2DModel):
    """The transformer, called with captions as one tensor or, as diffusers' is, with a list."""

    def forward(
        self,
        x: Sequence[Tensor],
        t: Tensor,
        cap_feats: Tensor | Sequence[Tensor],
        return_dict: bool = True,
        joint_attention_kwargs: None = None,
        cap_mask: Tensor | None = None,
    ) -> Any:
        """Return image - noise of each sample, a list of [C, 1, h, w].

        Args:
            x: latents [C, 1, h, w] of each sample, all of one size.
            t: [B], 0 for noise to 1 for the image.
            cap_feats: text [B, L, D], or [L_i, D] of each sample.
            return_dict, joint_attention_kwargs: as in diffusers; of the latter none are taken.
            cap_mask: boolean [B, L], true for real text tokens, which come first; None: all are.
        """
        assert joint_attention_kwargs is None
        if not isinstance(cap_feats, Tensor):
            cap_feats, cap_mask = _joined(cap_feats)
        temb, size = self.t_embedder(t * self.t_scale).type_as(x[0]), "{}-{}".format(*_PATCH)
        # dicts of modules are asked by attribute: compiled, they have no keys
        embed, project = getattr(self.all_x_embedder, size), getattr(self.all_final_layer, size)
        text = self.cap_embedder(_filled(cap_feats))
        place = torch.arange(text.shape[1], device=t.device)
        length = torch.full_like(place[:1], cap_feats.shape[1]) if cap_mask is None else cap_mask.sum(1)
        length = length.unsqueeze(1)  # [B, 1], of all samples [1, 1]
        end = -(-length // _MULTIPLE) * _MULTIPLE  # of what is seen
        text = torch.where((place < length).unsqueeze(-1), text, self.cap_pad_token)
        text_rope = self.rope_embedder(F.pad(((place + 1) * (place < end)).unsqueeze(-1), (0, 2)))

        image = embed(torch.stack([self._patchify_image(each, *_PATCH)[0] for each in x]))
        tokens = image.shape[1]
        image = torch.cat([image, self.x_pad_token.expand(len(x), -tokens % _MULTIPLE, -1)], dim=1)
        rows, columns = (side // _PATCH[0] for side in x[0].shape[-2:])
        places = image_positions(rows, columns, t.device).long() + F.pad(end + 1, (0, 2)).unsqueeze(1)  # [B, N, 3]
        rope = self.rope_embedder(_filled(places))

        for block in self.noise_refiner:
            image = run_block(self, block, image, None, rope, temb)
        mask = None if cap_mask is None else place < end
        for block in self.context_refiner:
            text = run_block(self, block, text, mask, text_rope)
        if mask is not None:
            mask = torch.cat([mask.new_ones(image.shape[:2]), mask], dim=1)
        stream, rope = torch.cat([image, text], dim=1), torch.cat([rope, text_rope], dim=1)
        for block in self.layers:
            stream = run_block(self, block, stream, mask, rope, temb)
        output = project(stream[:, :tokens], c=temb)
        sample = self.unpatchify(list(output), [each.shape[1:] for each in x], *_PATCH)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)


def _joined(captions: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return ``captions`` [L_i, D] as one tensor [B, L, D] and, where they differ in length, their mask [B, L]."""
    real = [torch.ones_like(each[:, 0], dtype=torch.bool) for each in captions]
    mask = pad_sequence(real, batch_first=True) if len(set(map(len, real))) > 1 else None
    return pad_sequence(list(captions), batch_first=True), mask


def _filled(x: Tensor) -> Tensor:
    """Return ``x`` [B, S, D] with zeros at its end, to a multiple of 32 tokens."""
    return F.pad(x, (0, 0, 0, -x.shape[1] % _MULTIPLE))


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
        """Return cosines, then sines, fp32 [B, S, D], of tokens at ``ids`` [B, S, 3]."""
        turns = self._original(ids.flatten(0, 1)).unflatten(0, ids.shape[:2])
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
