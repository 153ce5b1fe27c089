"""The language models that are measured: ours, transformers' and a textbook implementation, on the same dimensions.

The textbook model is what one writes first: separate projections, a stored causal mask, attention spelt out, keys
repeated for grouped queries, logits as a whole. It is here to show what the shared blocks buy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.models.llm.model import TransformerLM
from library.models.llm.spec import LMConfig, config_to_hf, preset

SIZES = {"gpt2": "gpt2-tiny", "llama": "llama-tiny"}  # vocabulary 8192, width 384, 6 layers, 6 heads (2 of keys)


def build(who: str, family: str) -> nn.Module:
    """Return a freshly initialised model: ``who`` is tandem, transformers or textbook."""
    torch.manual_seed(0)
    config = preset(SIZES[family])
    if who == "tandem":
        return TransformerLM(config).initialise()
    if who == "textbook":
        return Textbook(config)
    return transformers_model(config)


def transformers_model(config: LMConfig) -> nn.Module:
    """Return transformers' model of these sizes, without dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = config_to_hf(config)
    values.pop("architectures")
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if config.family == "gpt2" else {}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**values, **dropout))


def loss_of(who: str, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the function from tokens [B, S + 1] to the mean cross-entropy, as each implementation does it."""
    if who == "tandem":
        return lambda tokens: model(tokens[:, :-1], tokens[:, 1:])

    def loss(tokens: Tensor) -> Tensor:
        logits: Any = model(tokens[:, :-1])
        logits = logits.logits if who == "transformers" else logits
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return loss


class Textbook(nn.Module):
    """GPT-2 or Llama as a first course writes it."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        width, head = config.width, config.head_dim
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.positions = None if config.has_rope else nn.Embedding(config.context, width)
        self.layers = nn.ModuleList()
        for _ in range(config.layers):
            sizes = {"q": config.heads * head, "k": config.kv_heads * head, "v": config.kv_heads * head, "o": width}
            layer = nn.ModuleDict({name: nn.Linear(width, size, bias=config.bias) for name, size in sizes.items()})
            layer["norm1"], layer["norm2"] = self._norm(), self._norm()
            layer["up"] = nn.Linear(width, config.hidden, bias=config.bias)
            layer["down"] = nn.Linear(config.hidden, width, bias=config.bias)
            if config.family == "llama":
                layer["gate"] = nn.Linear(width, config.hidden, bias=False)
            self.layers.append(layer)
        self.norm = self._norm()
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.register_buffer("mask", torch.ones(config.context, config.context).triu(1).bool())
        frequencies = config.rope_theta ** (-torch.arange(0, head, 2) / head)
        self.register_buffer("angles", torch.arange(config.context)[:, None] * torch.cat([frequencies, frequencies]))

    def _norm(self) -> nn.Module:
        return nn.LayerNorm(self.config.width) if self.config.family == "gpt2" else _TextbookRMSNorm(self.config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [B, S, V]."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = x + self._attention(layer, layer["norm1"](x))
            normed = layer["norm2"](x)
            if self.config.family == "llama":
                x = x + layer["down"](F.silu(layer["gate"](normed)) * layer["up"](normed))
            else:
                x = x + layer["down"](F.gelu(layer["up"](normed), approximate="tanh"))
        return self.head(self.norm(x))

    def _attention(self, layer: Any, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer[name](x).view(batch, length, -1, self.config.head_dim).transpose(1, 2) for name in "qkv")
        if self.config.has_rope:
            q, k = self._turned(q), self._turned(k)
        groups = self.config.heads // self.config.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(2, 3) / self.config.head_dim**0.5
        scores = scores.masked_fill(self.mask[:length, :length], float("-inf"))
        mixed = scores.softmax(-1) @ v
        return layer["o"](mixed.transpose(1, 2).reshape(batch, length, -1))

    def _turned(self, x: Tensor) -> Tensor:
        angles = self.angles[: x.shape[2]]
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


class _TextbookRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight
