"""Language models' linear layers: this repository's module names and those of transformers, which PEFT's files have.

A ``TransformerLM`` is trained with its joined matrices taken apart (``library.models.lm_projections``), so that every
layer here is one of transformers' own. GPT-2 joins q, k and v there too, as ``c_attn``.
"""

from __future__ import annotations

from networks.key_map import KeyMap, KeyRow

_LLAMA = {
    "attention.qkv.q_proj": "self_attn.q_proj",
    "attention.qkv.k_proj": "self_attn.k_proj",
    "attention.qkv.v_proj": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "feed_forward.gate_up.gate_proj": "mlp.gate_proj",
    "feed_forward.gate_up.up_proj": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_GPT2 = {
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}

LLAMA_KEYS = KeyMap(
    tuple(KeyRow(f"blocks.{{i}}.{ours}", (f"model.layers.{{i}}.{theirs}",)) for ours, theirs in _LLAMA.items())
)
GPT2_KEYS = KeyMap(
    tuple(
        KeyRow(f"blocks.{{i}}.{ours}", (f"transformer.h.{{i}}.{theirs}",), transposed=True)
        for ours, theirs in _GPT2.items()
    )
)
