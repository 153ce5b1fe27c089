"""Tiny random language models from transformers, in memory and on disk: what ours are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from tests.precision.files.gguf_files import blocks_of, dequantized

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


ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "smollm3": MODEL_ARCH.SMOLLM3,
}
Kind = Callable[[str], str] | str


def neighbours(weight: Tensor, heads: int) -> Tensor:
    """Return rows in the order of ``LlamaModel.permute`` of llama.cpp's converter, written by the formula."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write_model(
    path: Path, model: PreTrainedModel, kind: Kind = "F32", more: Mapping[str, Any] | None = None, divisors: Any = None
) -> dict[str, Tensor]:
    """Write ``model``; return what its weights are in the file, under transformers' names and in its order, fp32.

    Args:
        kind: ggml's type of matrices, or a function of transformers' name.
        more: metadata besides, such as a tokenizer's; None takes a key away.
        divisors: of frequencies, ``rope_freqs.weight``.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    name = gguf.MODEL_ARCH_NAMES[architecture]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, name)
    said: dict[str, Any] = {
        f"{name}.block_count": config.num_hidden_layers,
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.num_attention_heads,
        f"{name}.attention.head_count_kv": config.num_key_value_heads,
        f"{name}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{name}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim * config.num_attention_heads != config.hidden_size:
        said |= {f"{name}.attention.key_length": head_dim, f"{name}.attention.value_length": head_dim}
    for key, value in (said | dict(more or {})).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        if value is not None:
            (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
    found: dict[str, Tensor] = {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for theirs, tensor in model.state_dict().items():
        if theirs == "lm_head.weight" and config.tie_word_embeddings:
            continue
        count = heads.get(theirs.split(".")[-2]) if name in ("llama", "smollm3") else None
        stored = tensor if count is None else neighbours(tensor, count)
        wanted = (kind if isinstance(kind, str) else kind(theirs)) if tensor.ndim > 1 else "F32"
        blocks = blocks_of(stored, wanted)
        numbers = dequantized(blocks, wanted).view(tensor.shape)
        if count is not None:  # back, by the formula's inverse
            half = tensor.shape[0] // count // 2
            numbers = numbers.reshape(count, half, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        found[theirs] = numbers
        gguf_name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(gguf_name, blocks, raw_dtype=GGMLQuantizationType[wanted])
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def with_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """Return ``model`` with other weights."""
    missing = model.load_state_dict(dict(weights), strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}
    with torch.no_grad():
        model.tie_weights()
    return model.eval()
