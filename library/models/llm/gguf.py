"""Language models in a GGUF file, as llama.cpp's converter writes them (``convert_hf_to_gguf.py``): read and written.

The file is the whole model: sizes are in its metadata (``llama.block_count``), weights have transformers' names here
already (:mod:`library.gguf_header`), the tokenizer is read by :mod:`library.llm.tokenizer_files`. Three things lie
otherwise than in transformers' folders:

* a Llama's rows of q and k pair neighbours under RoPE, as in Meta's files, and are put into the half-split order, block
  by block where they are quantised: a row is whole blocks (Qwen's are not touched by the converter);
* Llama 3.1's stretched frequencies are a tensor of divisors, ``rope_freqs.weight``. Which scaling made them is told
  from their values;
* a file mixes types (``Q4_K_M`` has half of its v in Q6_K). What is one matrix here and stored in several types becomes
  a layer for each (:func:`mixed_layers`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library.errors import UserError
from library.gguf_header import LANGUAGE_MODELS, read_gguf_metadata
from library.models.llm.sources import Derived, DerivedWeights
from library.models.llm.spec import KINDS, NAMES, LMConfig, fourth_blocks
from library.models.weights import KeyMap
from library.nn.rope import LinearScaling, Llama31Scaling, RopeScaling, YarnScaling, half_split_order, rope_frequencies
from library.precision.checkpoint import WeightFiles
from library.safetensors_io import RowRange

_PAIRED = ("llama", "smollm3")  # whose q and k pair neighbours
_Q_AND_K = ("q_proj", "k_proj")
_DIVISORS = "rope_freqs.weight"
_CONTEXT = 8192  # which the converter takes for the one that they are divided by
_ORDERED = ".half_split"
_WIDTHS = ("attention.value_length", "rope.dimension_count")  # the width of a head once more
GGUF_ENDS = ("eos", "eot", "eom")  # of tokenizer.ggml.*_token_id: what may end a text


def gguf_config(file: Path, weights: WeightFiles) -> LMConfig:
    """Return the configuration that the metadata of ``file`` say, and the shapes of ``weights``.

    Raises:
        UserError: another architecture, or one of its keys has a value that is not carried here; the key is named.
    """
    metadata = read_gguf_metadata(file, arrays=False)
    kind = metadata.get("general.architecture")
    if kind not in LANGUAGE_MODELS:
        raise UserError(f"{file}: general.architecture {kind!r} is not supported; {', '.join(LANGUAGE_MODELS)} are")

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{kind}.{key}", default)
        if found is None:
            raise UserError(f"{file}: {kind}.{key} is missing; the file is no complete model, download it again")
        is_number = type(found) is int or (type(found) is float and key.startswith(("rope.", "attention.layer_norm")))
        if not is_number or not 0 <= found < math.inf:
            raise UserError(f"{file}: {kind}.{key} = {str(found)[:40]} is not supported; use another model")
        return float(f"{found:.7g}") if isinstance(found, float) else found  # they are fp32

    def expect(key: str, wanted: Any) -> None:
        if (found := value(key, wanted)) != wanted:
            raise UserError(f"{file}: {kind}.{key} = {found} is not supported, only {wanted}; use another model")

    heads = value("attention.head_count")
    defaults = {"kv_heads": heads, "head_dim": value("embedding_length") // max(1, heads), "rope_theta": 10000.0}
    sizes = {ours: value(key, defaults.get(ours)) for key, ours in NAMES["gguf"].items()}
    head_dim = sizes["head_dim"]
    if not all(sizes[name] for name in ("width", "heads", "kv_heads", "head_dim", "layers")):
        raise UserError(f"{file}: {kind}.embedding_length, attention.* or block_count is 0; download it again")
    for key in _WIDTHS:
        expect(key, head_dim)
    expect("expert_count", 0)
    attention = "model.layers.0.self_attn"
    fixed = dict(KINDS[kind].fixed)
    fixed |= {"no_rope": fourth_blocks(sizes["layers"])} if kind == "smollm3" else {}
    if kind == "llama" and (window := value("attention.sliding_window", 0)):
        fixed |= {"kind": "mistral", "window": window}
    tokens = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "padding", *GGUF_ENDS)}
    return LMConfig(
        **{
            "attention_bias": f"{attention}.q_proj.bias" in weights,
            "out_bias": f"{attention}.o_proj.bias" in weights,
            "mlp_bias": "model.layers.0.mlp.down_proj.bias" in weights,
            **fixed,
            **sizes,
        },
        family="llama",
        vocab_size=weights.shape("model.embed_tokens.weight")[0],
        tied="lm_head.weight" not in weights,
        rope_scaling=_scaling(file, kind, metadata.get(f"{kind}.rope.scaling.type"), value, weights, sizes),
        bos=tokens.pop("bos"),
        pad=tokens.pop("padding"),
        eos=tuple(dict.fromkeys(number for number in tokens.values() if number is not None)),
    )


def _scaling(
    file: Path,
    kind: str,
    scaling: str | None,
    value: Callable[[str, Any], Any],
    weights: WeightFiles,
    sizes: Mapping[str, Any],
) -> RopeScaling | None:
    original = value("rope.scaling.original_context_length", 0)
    if _DIVISORS in weights:
        divisors = weights.read([RowRange(_DIVISORS)]).double()
        return _llama_scaling(file, divisors, sizes["head_dim"], sizes["rope_theta"], original or _CONTEXT)
    factor = value("rope.scaling.factor", 0.0) or value("rope.scale_linear", 0.0) or 1.0
    match scaling or ("linear" if factor != 1 else "none"):
        case "none":
            return None
        case "linear":
            return LinearScaling(factor) if factor != 1 else None
        case "yarn":
            growth = (0.1 * math.log(factor) + 1.0) * (value("rope.scaling.attn_factor", 0.0) or 1.0)
            betas = value("rope.scaling.yarn_beta_fast", 0.0) or 32.0, value("rope.scaling.yarn_beta_slow", 0.0) or 1.0
            return YarnScaling(factor, original or sizes["context"], growth, *betas)
        case other:
            raise UserError(f"{file}: {kind}.rope.scaling.type = {other!r} is not supported; none, linear and yarn are")


def _divisors(head_dim: int, theta: float, scaling: Llama31Scaling) -> Tensor:
    return rope_frequencies(head_dim, theta) / rope_frequencies(head_dim, theta, scaling)


def _llama_scaling(file: Path, divisors: Tensor, head_dim: int, theta: float, original: int) -> Llama31Scaling | None:
    """Return the scaling by which frequencies are divided by ``divisors`` [D/2], None where by 1.

    The converter's factors 1 and 4 and context of 8192 are those of all published models, another context is in the
    metadata of our own files; the slowest pair is divided by the whole factor.
    """
    scaling = Llama31Scaling(factor=float(divisors.max()), original_context=original)
    made = _divisors(head_dim, theta, scaling)
    if divisors.shape != made.shape or not torch.allclose(divisors, made, rtol=1e-4):  # they are fp32
        raise UserError(
            f"{file}: {_DIVISORS} is not made by Llama 3.1's scaling with factors 1 and 4 over {original} positions; "
            "use the transformers folder that the file was made of"
        )
    return None if scaling.factor == 1 else scaling


def gguf_metadata(config: LMConfig) -> dict[str, Any]:
    """Return the metadata that :func:`gguf_config` reads, by key; the architecture is ``general.architecture``.

    Raises:
        UserError: another kind of model, or llama.cpp has no key for what ``config`` says.
    """
    kind = "llama" if config.kind == "mistral" else config.kind
    if kind not in LANGUAGE_MODELS:
        raise UserError(f"a {kind} is not written as GGUF, {', '.join(LANGUAGE_MODELS)} are; write a folder")
    if config.no_rope != (fourth_blocks(config.layers) if kind == "smollm3" else ()):
        raise UserError("no_rope_layers: GGUF has no key for them, every fourth is left out there; write a folder")
    said = {key: getattr(config, ours) for key, ours in NAMES["gguf"].items()}
    said |= {"rope.freq_base": float(config.rope_theta), "vocab_size": config.vocab_size}
    said |= dict.fromkeys(_WIDTHS, config.head_dim)
    said |= {"attention.sliding_window": config.window} if config.window else {}
    scaling = config.rope_scaling
    if isinstance(scaling, Llama31Scaling):
        if kind != "llama":
            raise UserError(f"rope_scaling: llama.cpp does not read llama3 in kind {kind}; write a folder")
        said["rope.scaling.original_context_length"] = scaling.original_context
    elif scaling is not None:
        said["rope.scaling.type"] = "linear" if isinstance(scaling, LinearScaling) else "yarn"
        found = {key: getattr(scaling, ours, None) for key, ours in NAMES["gguf_scaling"].items()}
        said |= {key: value for key, value in found.items() if value is not None}
    if isinstance(scaling, YarnScaling):
        if not scaling.truncate:
            raise UserError("rope_scaling: GGUF has no key for truncate = false; write a folder")
        said["rope.scaling.attn_factor"] = scaling.attention_factor / (0.1 * math.log(scaling.factor) + 1.0)
    return {"general.architecture": kind, **{f"{kind}.{key}": value for key, value in said.items()}}


def gguf_divisors(config: LMConfig) -> dict[str, Tensor]:
    """Return the tensor [D/2] by which Llama 3.1's scaling divides frequencies, by its name, if that is the scaling."""
    scaling = config.rope_scaling
    if not isinstance(scaling, Llama31Scaling):
        return {}
    return {_DIVISORS: _divisors(config.head_dim, config.rope_theta, scaling).float()}


def gguf_tensor(name: str, weight: Tensor, config: LMConfig) -> Tensor:
    """Return ``weight``, which transformers calls ``name``, as it lies in a GGUF file: rows of q and k in pairs."""
    if config.kind not in ("mistral", *_PAIRED) or not name.rpartition(".")[0].endswith(_Q_AND_K):
        return weight
    return _in_order(weight, half_split_order(config.head_dim).argsort())


def _in_order(weight: Tensor, order: Tensor) -> Tensor:
    """Return ``weight`` [heads * D, ...] with the rows of each head in ``order`` [D]."""
    return weight.unflatten(0, (-1, len(order)))[:, order].flatten(0, 1)


def gguf_weights(files: WeightFiles, config: LMConfig, key_map: KeyMap) -> tuple[WeightFiles, KeyMap]:
    """Return ``files`` with rows in the half-split order, and ``key_map`` of transformers' names with their ranges."""
    if files.metadata["general.architecture"] not in _PAIRED:
        return files, key_map
    return in_half_split_order(files, config, key_map, _Q_AND_K)


def in_half_split_order(
    files: WeightFiles, config: LMConfig, key_map: KeyMap, layers: tuple[str, ...]
) -> tuple[WeightFiles, KeyMap]:
    """Return ``files`` and ``key_map`` with the rows of ``layers``, whose neighbours are pairs, in the other order."""
    order, derived = half_split_order(config.head_dim), dict[str, Derived]()

    def changed(rows: RowRange) -> RowRange:
        name = rows.source
        if name not in files or not name.rpartition(".")[0].endswith(layers):
            return rows
        derived[f"{name}{_ORDERED}"] = Derived(files.shape(name), name, partial(_in_order, order=order))
        return RowRange(f"{name}{_ORDERED}")

    found = {ours: [changed(rows) for rows in ranges] for ours, ranges in key_map.items()}
    return DerivedWeights(files, derived), found


def mixed_layers(weights: WeightFiles, key_map: KeyMap) -> frozenset[str]:
    """Return the layers that are one matrix in the model and stored in several types."""
    stored = weights.quantized.weights if weights.quantized else {}
    found = set()
    for ours, ranges in key_map.items():
        names = [rows.source.removesuffix(_ORDERED) for rows in ranges]
        kinds = {(stored[name].scheme.describe() if name in stored else "") for name in names}
        if len(kinds) > 1:
            found.add(ours.rpartition(".")[0])
    return frozenset(found)
