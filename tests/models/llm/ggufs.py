"""Tiny language models in GGUF, with names and row order as llama.cpp's converter makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType
from torch import Tensor
from transformers import PreTrainedModel

from tests.precision.files.gguf_files import blocks_of, dequantized

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
