"""One decoder for GPT-2, Llama and its kin (``library.models.llm.spec``), built from ``library.nn``.

    tokens [B, S] -> embedding (+ learned positions) -> blocks -> norm -> head -> logits [B, S, V]
    block: x + attention(norm(x)), then x + feed_forward(norm(x))

Queries, keys and values come from one matrix, rows in that order; so do gate and up of a SwiGLU. No causal mask is
stored, the attention kernel has a flag for it. RoPE tables belong to no layer: one object holds them for all, makes
them on first use and doubles them when a longer text comes. Inference passes a :class:`~library.nn.kv_cache.KVCache`;
training passes targets and gets the mean cross-entropy, computed a chunk of the logits at a time, so that [B, S, V]
never exists.

*LoRA.* transformers, and with it every published LoRA, has a matrix each for q, k, v, gate and up.
:func:`separate_projections` replaces a joined matrix by layers on its rows, which share its memory, quantised values
and scales of an fp8 matrix too, so that each can have a LoRA of its own.

*Tensor parallelism* (:func:`lm_split_plan`). Every process has some heads and some of the feed-forward's middle: q, k,
v, gate and up by outputs, the layers behind them by inputs (``library.nn.tensor_split``); and some tokens of embedding
and head, if their number divides. Norms are replicated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.errors import UserError
from library.models.llm.spec import LMConfig
from library.nn.attention import attend, document_mask, document_positions, window_mask
from library.nn.checkpointing import ActivationCheckpointing
from library.nn.cross_entropy import token_cross_entropy
from library.nn.frozen_linear import project_together
from library.nn.kv_cache import KVCache
from library.nn.norms import RMSNorm
from library.nn.rope import RopeTables, Table, rotate_half_split, turn_token, whole_head
from library.nn.tensor_split import Parts, Split, entering
from library.precision.activations import FakeQuantLinear
from library.precision.linear import QuantizedLinear

_INIT_STD = 0.02  # of both papers' published code


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.width, rows, bias=config.attention_bias)
        self.out = nn.Linear(config.heads * config.head_dim, config.width, bias=bool(config.out_bias))
        self.query_norm = HeadNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None
        self.key_norm = HeadNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else None

    def forward(
        self, x: Tensor, rope: Table | None, cache: KVCache | None = None, layer: int = 0, mask: Tensor | None = None
    ) -> Tensor:
        """Map ``x`` [B, S, W]; ``rope`` is of the tokens' positions, ``mask`` of :meth:`KVCache.mask`.

        Or ``x`` [B, W], one token a row behind what is in ``cache``, without gradient; ``rope`` is of ``whole_head``.
        """
        if x.ndim == 2:
            assert cache is not None
            return self._next_token(x, rope, cache, layer, mask)
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, -1, self.head_dim)
        turning = self.heads + self.kv_heads
        queries_keys, value = self._normed(qkv[:, :, :turning]), qkv[:, :, turning:]
        if rope is not None:
            queries_keys = rotate_half_split(queries_keys, rope)
        query, key = queries_keys[:, :, : self.heads], queries_keys[:, :, self.heads :]
        if cache is not None:
            key, value = cache.extend(layer, key, value)
        mixed = attend(query, key, value, mask=mask, causal=mask is None)
        return self.out(mixed.reshape(batch, length, -1))

    def _next_token(self, x: Tensor, rope: Table | None, cache: KVCache, layer: int, mask: Tensor | None) -> Tensor:
        """Do the same for ``x`` [B, W], one token a row, with few calls: at this size they are what time goes to.

        The heads of a group are as many queries to one head of keys, which needs no copy of keys and no causality.
        """
        batch, turning = x.shape[0], self.heads + self.kv_heads
        qkv = self.qkv(x).view(batch, -1, self.head_dim)
        queries_keys, value = self._normed(qkv.narrow(1, 0, turning)), qkv.narrow(1, turning, self.kv_heads)
        if rope is not None:
            queries_keys = turn_token(queries_keys, rope)
        query, key = queries_keys.narrow(1, 0, self.heads), queries_keys.narrow(1, self.heads, self.kv_heads)
        keys, values = cache.append(layer, key, value)
        grouped = query.reshape(batch, self.kv_heads, -1, self.head_dim)
        mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return self.out(mixed.reshape(batch, -1))

    def _normed(self, queries_keys: Tensor) -> Tensor:
        """Return the heads of queries and keys [..., H + Hkv, D], each normed where the model does that."""
        if self.query_norm is None or self.key_norm is None:
            return queries_keys
        query, key = queries_keys.split((self.heads, self.kv_heads), dim=-2)
        return torch.cat((self.query_norm(query), self.key_norm(key)), dim=-2)


class HeadNorm(RMSNorm):
    """RMSNorm of each head; of heads that several processes have together, the gradient of its weight is all's sum."""

    split: Split | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., dim]; shape and dtype stay."""
        if self.split is None or not self.weight.requires_grad:
            return super().forward(x)
        weight = entering(self.weight, self.split).to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps).to(x.dtype)


class FeedForward(nn.Module):
    """down(gelu(up(x))), GELU in the tanh form that GPT-2 was trained with; [..., width] to the same."""

    def __init__(self, width: int, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., width]; shape and dtype stay."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class GatedFeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202): down(silu(gate(x)) * up(x)), [..., width] to the same.

    Gate and up are one matrix, the gate's rows first: ``x`` is read once and one product replaces two.
    """

    def __init__(self, width: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., width]; shape and dtype stay."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        if torch.is_grad_enabled():
            return self.down(F.silu(gate) * up)
        return self.down(F.silu(gate).mul_(up))  # one temporary less


class Block(nn.Module):
    """One layer: attention and feed-forward, each on the normed residual stream and added to it."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = _norm(config)
        kind = GatedFeedForward if config.family == "llama" else FeedForward
        self.feed_forward = kind(config.width, config.hidden, config.mlp_bias)

    def forward(
        self, x: Tensor, rope: Table | None, cache: KVCache | None = None, layer: int = 0, mask: Tensor | None = None
    ) -> Tensor:
        """Map the residual stream ``x``; shapes are :class:`Attention`'s."""
        x = x + self.attention(self.attention_norm(x), rope, cache, layer, mask)
        return x + self.feed_forward(self.feed_forward_norm(x))


class TransformerLM(nn.Module):
    """The language model of a :class:`LMConfig`; its weights are random until loaded."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute: Callable[..., Tensor] | None = None  # calls a block whose backward computes it again
        rows, width = config.padded_vocab_size, config.width
        self.embedding = nn.Embedding(rows, width)
        self.positions = None if config.has_rope else nn.Embedding(config.context, width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = _norm(config)
        self.lm_head = nn.Linear(width, rows, bias=False)
        if config.tied:
            self.lm_head.weight = self.embedding.weight
        self.rope = None
        if config.has_rope:
            self.rope = RopeTables(config.head_dim, config.rope_theta, config.rope_scaling)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator | None = None) -> TransformerLM:
        """Draw fresh weights: N(0, 0.02), those that add to the residual stream divided by sqrt(2 * layers) (GPT-2).

        Each block adds twice to the stream; so divided, its variance does not grow with depth. Norms become 1 and
        biases 0.
        """
        adding = _INIT_STD / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                std = adding if name.endswith(("attention.out.weight", "feed_forward.down.weight")) else _INIT_STD
                parameter.normal_(0.0, std, generator=generator)
        return self

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        cache: KVCache | None = None,
        documents: Tensor | None = None,
        by_row: bool = False,
    ) -> Tensor:
        """Return logits [B, S, padded V]; or with ``targets`` [B, S] the mean cross-entropy, fp32 [].

        Args:
            tokens: [B, S] int64; with ``cache``, those that follow what is in it.
            targets: the token that should follow each; -100 counts for nothing.
            cache: is extended by ``tokens``.
            documents: [B, S] int64, the document that each token belongs to; they see nothing of each other. Without
                it a row is one document.
            by_row: return the sum of each row's cross-entropies instead of the mean of all, fp32 [B].
        """
        hidden = self.hidden(tokens, cache, documents)
        if targets is None:
            return self.lm_head(hidden)
        return token_cross_entropy(hidden, self.lm_head, targets, self.config.vocab_size, by_row)

    def next_logits(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Return the logits [B, V] of what follows the last of ``tokens``, padding rows cut off."""
        return self.lm_head(self.hidden(tokens, cache)[:, -1])[:, : self.config.vocab_size]

    def hidden(self, tokens: Tensor, cache: KVCache | None = None, documents: Tensor | None = None) -> Tensor:
        """Return the normed residual stream [B, S, W] that the head reads; arguments as for :meth:`forward`."""
        length, start = tokens.shape[1], cache.length if cache is not None else 0
        if self.positions is not None and start + length > self.config.context:
            raise UserError(
                f"{start + length} tokens do not fit into this model's {self.config.context} learned positions; "
                "shorten the prompt or generate less"
            )
        places, mask = (cache.positions(length), cache.mask(length)) if cache is not None else (None, None)
        if documents is not None:
            assert cache is None, "documents stand side by side in training only"
            places, mask = document_positions(documents), document_mask(documents)
        # While decoding, a row is one token and needs no axis for them: every call is a little cheaper.
        decoding = cache is not None and length == 1 and not torch.is_grad_enabled()
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + (self.positions.weight[start : start + length] if places is None else self.positions(places))
        x = x[:, 0] if decoding else x
        rope = None
        if self.rope is not None:
            cos, sin = self.rope.table(start + length, tokens.device)
            where = slice(start, start + length) if places is None else places
            rope = cos[where], sin[where]
            rope = whole_head(rope) if decoding else rope
        if self.config.window is not None and start + length > self.config.window:
            mask = window_mask(mask, length, start + length, self.config.window, tokens.device)
        for layer, block in enumerate(self.blocks):
            turns = None if layer in self.config.no_rope else rope
            if self.recompute is not None and torch.is_grad_enabled():
                x = self.recompute(block, x, turns, None, layer, mask)
            else:
                x = block(x, turns, cache, layer, mask)
        if cache is not None:
            cache.advance(length)
        x = self.norm(x)
        return x[:, None] if decoding else x

    def enable_gradient_checkpointing(self, function: Callable[..., Tensor] | None = None) -> None:
        """Compute blocks again in backward instead of keeping what they made; ``function`` calls a block so."""
        self.recompute = function or ActivationCheckpointing(self.config.layers)

    def new_cache(self, batch: int, capacity: int, padding: Tensor | None = None) -> KVCache:
        """Return an empty cache for ``batch`` rows of ``capacity`` tokens, in the dtype of activations."""
        config, weight = self.config, self.embedding.weight
        dtype = weight.dtype
        if torch.is_autocast_enabled(weight.device.type):
            dtype = torch.get_autocast_dtype(weight.device.type)
        first = next(block for block in self.blocks if isinstance(block, Block))  # a pipeline's stage has not all
        kv_heads = first.attention.kv_heads  # this process's, where it has some of them
        shape = (batch, kv_heads, capacity, config.head_dim)
        return KVCache(config.layers, shape, dtype=dtype, device=weight.device, padding=padding)


@torch.no_grad()
def resize_vocabulary(model: TransformerLM, config: LMConfig) -> None:
    """Give embedding and head the rows of ``config`` in place: old rows stay bit for bit, new ones are their mean.

    The mean (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models") keeps a new token's
    probability near the average instead of letting it win or lose every time. Tied matrices stay tied.

    Args:
        model: its ``config`` becomes ``config``.
        config: the model's own with another ``vocab_size`` or ``padded_vocab_size``.
    """
    old, model.config = model.config, config
    embedding = _resized(model.embedding.weight, old.vocab_size, config)
    model.embedding.num_embeddings = model.lm_head.out_features = config.padded_vocab_size
    tied = model.lm_head.weight is model.embedding.weight
    model.embedding.weight = embedding
    model.lm_head.weight = embedding if tied else _resized(model.lm_head.weight, old.vocab_size, config)


def _resized(weight: Tensor, old_rows: int, config: LMConfig) -> nn.Parameter:
    common = min(old_rows, config.vocab_size)
    rows = weight.new_empty(config.padded_vocab_size, weight.shape[1])
    rows[:common] = weight[:common]
    rows[common:] = weight[:old_rows].mean(dim=0, dtype=torch.float32)
    return nn.Parameter(rows, requires_grad=weight.requires_grad)


def _norm(config: LMConfig) -> nn.Module:
    if config.family == "llama":
        return RMSNorm(config.width, eps=config.norm_eps)
    return nn.LayerNorm(config.width, eps=config.norm_eps)


class JoinedLinear(nn.ModuleDict):
    """Linear layers with a common input, outputs side by side: [..., in] to [..., sum of out]."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x``; LoRA layers among the parts share their down-projection."""
        return torch.cat(project_together(list(self.children()), x), dim=-1)


def separate_projections(model: TransformerLM, layers: Container[str] | None = None) -> None:
    """Give each of transformers' projections a layer of its own in ``model``, in place; numbers and memory stay.

    Does nothing to a GPT-2, which has one ``c_attn`` in transformers too, or to what is separate already. ``layers``:
    of these alone.
    """
    if model.config.family != "llama":
        return
    for number, block in enumerate(model.blocks):
        for name, rows in model.config.joined.items():
            layer = block.get_submodule(name)
            if not isinstance(layer, JoinedLinear) and (layers is None or f"blocks.{number}.{name}" in layers):
                block.set_submodule(name, JoinedLinear(_parts(layer, rows)).train(layer.training))


def _parts(joined: nn.Module, rows: Mapping[str, int]) -> dict[str, nn.Module]:
    parts, start = {}, 0
    for name, count in rows.items():
        parts[name] = _on_rows(joined, slice(start, start + count)).train(joined.training)
        start += count
    return parts


def _on_rows(joined: nn.Module, rows: slice) -> nn.Module:
    """Return a frozen layer on some output rows of ``joined``."""
    if isinstance(joined, FakeQuantLinear):
        return FakeQuantLinear(_on_rows(joined.base, rows), joined.rounding)
    if isinstance(joined, QuantizedLinear):
        bias = None if joined.bias is None else joined.bias.detach()[rows]
        return QuantizedLinear(joined.quantized().part(rows), bias, compute=joined.compute)
    assert isinstance(joined, nn.Linear)
    part = nn.Linear(joined.in_features, rows.stop - rows.start, bias=joined.bias is not None, device="meta")
    part.weight = nn.Parameter(joined.weight.detach()[rows], requires_grad=False)
    if joined.bias is not None:
        part.bias = nn.Parameter(joined.bias.detach()[rows], requires_grad=False)
    return part


def lm_split_plan(config: LMConfig, processes: int, separate: bool) -> dict[str, Parts]:
    """Return how each linear layer is split, and the embedding.

    Args:
        config: of the model.
        processes: that have it together.
        separate: whether a Llama's projections are layers of their own (``library.models.llm.model``).
    """
    for what, count in (("heads", config.heads), ("kv_heads", config.kv_heads), ("hidden", config.hidden)):
        if count % processes:
            raise UserError(f"tp: {what} = {count} cannot be split among {processes} processes; set a divisor")
    queries = config.heads * config.head_dim
    block = {"attention.out": Parts(1, (queries,)), "feed_forward.down": Parts(1, (config.hidden,))}
    if config.family == "gpt2":
        block["feed_forward.up"] = Parts(0, (config.hidden,))
    for name, rows in config.joined.items():
        if separate and config.family == "llama":
            block |= {f"{name}.{part}": Parts(0, (count,)) for part, count in rows.items()}
        else:
            block[name] = Parts(0, tuple(rows.values()))
    plan = {f"blocks.{i}.{name}": parts for i in range(config.layers) for name, parts in block.items()}
    tokens = config.padded_vocab_size
    if tokens % processes == 0:
        plan |= {"embedding": Parts(0, (tokens,)), "lm_head": Parts(0, (tokens,), gathered=True)}
    return plan


def shard_heads(model: TransformerLM, processes: int) -> None:
    """Tell the attention of ``model``, whose layers are split, how many heads it has here."""
    for attention in (module for module in model.modules() if isinstance(module, Attention)):
        attention.heads //= processes
        attention.kv_heads //= processes
        for norm in (attention.query_norm, attention.key_norm):
            if norm is not None:
                norm.split = getattr(attention.qkv, "split", None)
