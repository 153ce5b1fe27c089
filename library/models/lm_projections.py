"""Joined projections taken apart, so that each can have a LoRA of its own.

A Llama's q, k and v are one matrix here, and so are gate and up; transformers, and with it every published LoRA, has
five. :func:`separate_projections` puts layers on rows of the joined matrix in its place, which share its memory. Codes
and scales of an fp8 matrix are shared the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from library.models.transformer_lm import TransformerLM
from library.nn.projection import project_together
from library.precision.fp8_linear import Fp8Linear
from library.precision.quantize import Quantized
from library.precision.serving import ServedLinear


class JoinedLinear(nn.Module):
    """Linear layers with a common input, outputs side by side: [..., in] to [..., sum of out]."""

    def __init__(self, parts: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x``; LoRA layers among the parts share their down-projection."""
        return torch.cat(project_together(list(self.children()), x), dim=-1)


def separate_projections(model: TransformerLM) -> None:
    """Give each of transformers' projections a layer of its own in ``model``, in place; numbers and memory stay.

    Does nothing to a GPT-2, which has one ``c_attn`` in transformers too, or to what is separate already.
    """
    if model.config.family != "llama":
        return
    config = model.config
    keys = config.kv_heads * config.head_dim
    attention = {"q_proj": config.heads * config.head_dim, "k_proj": keys, "v_proj": keys}
    gated = {"gate_proj": config.hidden, "up_proj": config.hidden}
    for block in model.blocks:
        for parent, name, rows in ((block.attention, "qkv", attention), (block.feed_forward, "gate_up", gated)):
            joined = getattr(parent, name)
            if not isinstance(joined, JoinedLinear):
                setattr(parent, name, JoinedLinear(_parts(joined, rows)).train(joined.training))


def _parts(joined: nn.Module, rows: Mapping[str, int]) -> dict[str, nn.Module]:
    parts, start = {}, 0
    for name, count in rows.items():
        parts[name] = _on_rows(joined, slice(start, start + count)).train(joined.training)
        start += count
    return parts


def _on_rows(joined: nn.Module, rows: slice) -> nn.Module:
    """Return a frozen layer on some output rows of ``joined``, which has no bias."""
    if isinstance(joined, ServedLinear):
        return ServedLinear(_on_rows(joined.base, rows), joined.how, joined.input_scale)  # type: ignore[arg-type]
    if isinstance(joined, Fp8Linear):
        whole, compute, input_gradient = joined.quantized(), joined.compute, joined.fp8_input_gradient
        own = whole.scale[rows] if whole.scale is not None and whole.scale.shape[0] > 1 else whole.scale
        return Fp8Linear(Quantized(whole.codes[rows], own), compute=compute, fp8_input_gradient=input_gradient)
    assert isinstance(joined, nn.Linear)
    assert joined.bias is None
    part = nn.Linear(joined.in_features, rows.stop - rows.start, bias=False, device="meta")
    part.weight = nn.Parameter(joined.weight.detach()[rows], requires_grad=False)
    return part
