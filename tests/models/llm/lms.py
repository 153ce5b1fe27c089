"""Tiny random language models from transformers, in memory and on disk: what ours are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

_LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
SIZES: dict[str, dict[str, Any]] = {
    "llama2": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "num_key_value_heads": 4},
    "llama3": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "num_key_value_heads": 2},
    "llama3.1": {"rope_parameters": {**_LLAMA31, "rope_theta": 500000.0}, "num_key_value_heads": 2},
    "llama3.2": {
        "rope_parameters": {**_LLAMA31, "factor": 32.0, "rope_theta": 500000.0},
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "yarn": {"rope_parameters": _YARN},
    "yarn in detail": {"rope_parameters": _YARN | {"attention_factor": 1.3, "truncate": False}},
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 5},
    "mistral without a window": {
        "model_type": "mistral",
        "num_key_value_heads": 4,
        "sliding_window": None,
        "head_dim": 20,
    },
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "qwen3 with biases": {"model_type": "qwen3", "num_key_value_heads": 4, "head_dim": 12, "attention_bias": True},
    "smollm3": {"model_type": "smollm3", "num_key_value_heads": 2, "no_rope_layer_interval": 2, "pad_token_id": None},
    "smollm3 by list": {
        "model_type": "smollm3",
        "num_key_value_heads": 1,
        "no_rope_layers": [0, 1, 0],
        "pad_token_id": None,
    },
}
NAMES = ["gpt2", *SIZES]
VOCABULARY = 131  # odd, so that padding shows


def reference(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return transformers' model in the manner of ``name``: 3 layers, width 48, 4 heads, weights of a trained size."""
    torch.manual_seed(seed)
    if name == "gpt2":
        config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=48, n_layer=3, n_head=4, **changes)
        model: PreTrainedModel = GPT2LMHeadModel(config)
    else:
        sizes = {"max_position_embeddings": 128} | SIZES[name] | changes
        kind = sizes.pop("model_type", "llama")
        shared = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}
        config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, rms_norm_eps=1e-5, **shared | sizes)
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # nothing stays at 0 or 1, where a mistake would not show
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def write_reference(folder: Path, name: str, **save: Any) -> PreTrainedModel:
    """Write :func:`reference` as transformers does; return it."""
    model = reference(name)
    model.save_pretrained(folder, **save)
    return model


def tokens(length: int = 60, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference over the largest value."""
    return ((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()).item()
