"""Where each parameter of a ``TransformerLM`` lies in the published checkpoints, as pieces of rows.

==============================  ==========================================================================
transformers, GPT-2             ``h.0.attn.c_attn.weight`` (maybe below ``transformer.``); linears are stored
                                [in, out], so they are transposed; q, k and v are one matrix already
transformers, Llama             ``model.layers.0.self_attn.q_proj.weight``; q, k, v and gate, up are joined
Meta, Llama                     ``layers.0.attention.wq.weight``; rows of q and k pair neighbours under RoPE and are
                                put into the half-split order; a model in several files is cut by rows (q, k, v,
                                gate, up, head) or by columns (the others)
OpenAI, GPT-2                   ``model/h0/attn/c_attn/w`` [1, in, out]
==============================  ==========================================================================

A map names parameters once; a tied head is the embedding and has no entry.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from library.errors import UserError
from library.models.lm_config import LMConfig
from library.models.lm_sources import Derived, DerivedWeights
from library.models.weights import KeyMap, Piece, WeightFiles
from library.nn.rope import half_split_order

# of a block: ours, transformers' GPT-2, OpenAI's; true for linears
_GPT2_BLOCK = (
    ("attention_norm", "ln_1", "ln_1", False),
    ("attention.qkv", "attn.c_attn", "attn/c_attn", True),
    ("attention.out", "attn.c_proj", "attn/c_proj", True),
    ("feed_forward_norm", "ln_2", "ln_2", False),
    ("feed_forward.up", "mlp.c_fc", "mlp/c_fc", True),
    ("feed_forward.down", "mlp.c_proj", "mlp/c_proj", True),
)
# ours, transformers' Llama (joined by rows)
_LLAMA_BLOCK = (
    ("attention_norm", ("input_layernorm",)),
    ("attention.qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("attention.out", ("self_attn.o_proj",)),
    ("feed_forward_norm", ("post_attention_layernorm",)),
    ("feed_forward.gate_up", ("mlp.gate_proj", "mlp.up_proj")),
    ("feed_forward.down", ("mlp.down_proj",)),
)
# transformers' module name in a Llama block -> Meta's, and whether files cut it by rows
_META_BLOCK = {
    "input_layernorm": ("attention_norm", None),
    "self_attn.q_proj": ("attention.wq", 0),
    "self_attn.k_proj": ("attention.wk", 0),
    "self_attn.v_proj": ("attention.wv", 0),
    "self_attn.o_proj": ("attention.wo", 1),
    "post_attention_layernorm": ("ffn_norm", None),
    "mlp.gate_proj": ("feed_forward.w1", 0),
    "mlp.up_proj": ("feed_forward.w3", 0),
    "mlp.down_proj": ("feed_forward.w2", 1),
}


def gpt2_names(config: LMConfig, prefix: str = "transformer.") -> Iterator[tuple[str, str, bool]]:
    """Yield (ours, transformers' name, stored transposed) of every parameter of a GPT-2."""
    yield "embedding.weight", f"{prefix}wte.weight", False
    yield "positions.weight", f"{prefix}wpe.weight", False
    for i in range(config.layers):
        for ours, theirs, _, linear in _GPT2_BLOCK:
            yield f"blocks.{i}.{ours}.weight", f"{prefix}h.{i}.{theirs}.weight", linear
            yield f"blocks.{i}.{ours}.bias", f"{prefix}h.{i}.{theirs}.bias", False
    yield "norm.weight", f"{prefix}ln_f.weight", False
    yield "norm.bias", f"{prefix}ln_f.bias", False
    if not config.tied:
        yield "lm_head.weight", "lm_head.weight", False


def llama_names(config: LMConfig) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Yield (ours, [(transformers' name, its rows), ...]) of every parameter of a Llama; rows are joined in order."""
    rows = {
        "self_attn.q_proj": config.heads * config.head_dim,
        "self_attn.k_proj": config.kv_heads * config.head_dim,
        "self_attn.v_proj": config.kv_heads * config.head_dim,
        "mlp.gate_proj": config.hidden,
        "mlp.up_proj": config.hidden,
    }
    yield "embedding.weight", [("model.embed_tokens.weight", config.vocab_size)]
    for i in range(config.layers):
        for ours, theirs in _LLAMA_BLOCK:
            parts = [(f"model.layers.{i}.{name}.weight", rows.get(name, config.width)) for name in theirs]
            yield f"blocks.{i}.{ours}.weight", parts
    yield "norm.weight", [("model.norm.weight", config.width)]
    if not config.tied:
        yield "lm_head.weight", [("lm_head.weight", config.vocab_size)]


def hf_weights(files: WeightFiles, config: LMConfig) -> tuple[WeightFiles, KeyMap]:
    """Return weights and key map of a transformers checkpoint.

    Raises:
        UserError: a GPT-2 in fp8, whose scales belong to the other side of the transposed matrices.
    """
    if config.family == "llama":
        return files, {ours: [Piece(name) for name, _ in parts] for ours, parts in llama_names(config)}
    if files.fp8 is not None:
        raise UserError(
            f"{files.path}: a GPT-2 stored in fp8 is not supported; load the fp32 or bf16 file with fp8_base"
        )
    prefix = "transformer." if "transformer.wte.weight" in files else ""
    derived, key_map = {}, {}
    for ours, theirs, transposed in gpt2_names(config, prefix):
        source = theirs
        if transposed and theirs in files:
            source = f"{theirs}.T"
            derived[source] = Derived(files.shape(theirs)[::-1], [theirs], _transposed)
        key_map[ours] = [Piece(source)]
    return DerivedWeights(files, derived), key_map


def openai_weights(files: WeightFiles, config: LMConfig) -> tuple[WeightFiles, KeyMap]:
    """Return weights and key map of OpenAI's TensorFlow checkpoint."""
    names = {"embedding.weight": "model/wte", "positions.weight": "model/wpe"}
    names |= {"norm.weight": "model/ln_f/g", "norm.bias": "model/ln_f/b"}
    derived: dict[str, Derived] = {}
    for i in range(config.layers):
        for ours, _, theirs, linear in _GPT2_BLOCK:
            weight = f"model/h{i}/{theirs}/{'w' if linear else 'g'}"
            names[f"blocks.{i}.{ours}.bias"] = f"model/h{i}/{theirs}/b"
            names[f"blocks.{i}.{ours}.weight"] = f"{weight}.T" if linear else weight
            if linear and weight in files:
                derived[f"{weight}.T"] = Derived(files.shape(weight)[:0:-1], [weight], _transposed_last)
    return DerivedWeights(files, derived), {ours: [Piece(name)] for ours, name in names.items()}


def meta_weights(files: WeightFiles, config: LMConfig, shards: int) -> tuple[WeightFiles, KeyMap]:
    """Return weights and key map of Meta's checkpoint in ``shards`` files, whose names begin with ``0:`` and so on."""
    derived: dict[str, Derived] = {}
    key_map: dict[str, list[Piece]] = {}
    for ours, parts in llama_names(config):
        key_map[ours] = [
            piece for name, rows in parts for piece in _meta_pieces(files, config, shards, name, rows, derived)
        ]
    return DerivedWeights(files, derived), key_map


def _meta_pieces(
    files: WeightFiles, config: LMConfig, shards: int, hf_name: str, rows: int, derived: dict[str, Derived]
) -> list[Piece]:
    """Return the pieces that make the rows of transformers' ``hf_name``; put what must be computed into ``derived``."""
    name, axis = _meta_name(hf_name)
    sources = [f"{shard}:{name}" for shard in range(1 if axis is None else shards)]
    if any(source not in files for source in sources):
        return [Piece(source) for source in sources]  # the loader says what is missing
    shape = files.shape(sources[0])
    if name == "tok_embeddings.weight":  # Llama 2 cuts it by columns, Llama 3 by rows
        axis = 1 if shape[0] == rows else 0
    if len(sources) > 1 and axis == 1:
        derived[name] = Derived((shape[0], shape[1] * shards), sources, _beside_each_other)
        return [Piece(name)]
    if hf_name.endswith(("q_proj.weight", "k_proj.weight")):
        # a shard holds whole heads, so each can be put in order by itself
        order = half_split_order(config.head_dim)
        for source in sources:
            derived[f"{source}.half_split"] = Derived(
                files.shape(source), [source], functools.partial(_in_order, order)
            )
        return [Piece(f"{source}.half_split") for source in sources]
    return [Piece(source) for source in sources]


def _meta_name(hf_name: str) -> tuple[str, int | None]:
    """Return Meta's name for transformers', and the axis along which files cut it."""
    whole = {
        "model.embed_tokens.weight": ("tok_embeddings.weight", 0),
        "model.norm.weight": ("norm.weight", None),
        "lm_head.weight": ("output.weight", 0),
    }
    if hf_name in whole:
        return whole[hf_name]
    _, _, layer, module = hf_name.removesuffix(".weight").split(".", 3)
    name, axis = _META_BLOCK[module]
    return f"layers.{layer}.{name}.weight", axis


def _transposed(weight: Tensor) -> Tensor:
    return weight.t().contiguous()


def _transposed_last(weight: Tensor) -> Tensor:
    return weight[0].t().contiguous()


def _beside_each_other(*parts: Tensor) -> Tensor:
    return torch.cat(parts, dim=1)


def _in_order(order: Tensor, weight: Tensor) -> Tensor:
    """Put the rows of every head into ``order``."""
    return weight.view(-1, len(order), weight.shape[-1])[:, order].reshape(weight.shape)
