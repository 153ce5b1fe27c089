"""What distinguishes one language model from another: a row of numbers and a few choices.

GPT-2 (Radford et al. 2019) and Llama 2, 3, 3.1 and 3.2 (arXiv 2307.09288, 2407.21783) are the same decoder. The
choices in which they differ are fields here, the published sizes are rows of ``PRESETS``; ``docs/llm.md`` walks from
one to the next. A ``config.json`` in transformers' form is read by :func:`config_from_hf` and written by
:func:`config_to_hf`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal

from library.errors import UserError, did_you_mean
from library.nn.rope import DynamicNTKScaling, LinearScaling, Llama31Scaling, RopeScaling, YarnScaling

LMFamily = Literal["gpt2", "llama"]


@dataclass(frozen=True)
class LMConfig:
    """One language model.

    Attributes:
        family: "gpt2" is LayerNorm, GELU, learned positions and biases; "llama" is RMSNorm, SwiGLU and RoPE.
        vocab_size: tokens that exist.
        context: positions the model was made for; with learned positions it takes no more.
        width, layers, heads, hidden: of the residual stream, of blocks, of queries, of the feed-forward's middle.
        kv_heads: heads of keys and values; fewer than ``heads`` is grouped-query attention.
        head_dim: usually width / heads.
        norm_eps: epsilon of the norms.
        tied: the output head is the embedding matrix.
        rope_theta, rope_scaling: RoPE's base, and how it is stretched.
        attention_bias, mlp_bias: whether these linear layers have one; a GPT-2's have.
        bos, eos: tokens that begin and end a text, for the configuration file.
        padded_vocab_size: rows of embedding and head; above ``vocab_size`` the rest are never targets.
    """

    family: LMFamily
    vocab_size: int
    context: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    head_dim: int
    norm_eps: float = 1e-5
    tied: bool = True
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    padded_vocab_size: int = 0
    bos: int | None = None
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check what the blocks take for granted."""
        if not self.padded_vocab_size:
            object.__setattr__(self, "padded_vocab_size", self.vocab_size)
        if self.family == "gpt2":
            object.__setattr__(self, "attention_bias", True)
            object.__setattr__(self, "mlp_bias", True)
        if self.heads % self.kv_heads:
            raise UserError(f"{self.heads} heads are no multiple of {self.kv_heads} kv_heads; change one of them")
        if self.family == "llama" and self.head_dim % 2:
            raise UserError(f"RoPE turns pairs, a head of {self.head_dim} is odd; change width or heads")
        if self.padded_vocab_size < self.vocab_size:
            raise UserError(f"padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}")

    @property
    def has_rope(self) -> bool:
        """Whether positions are rotations (else they are learned vectors)."""
        return self.family == "llama"

    @property
    def joined(self) -> dict[str, dict[str, int]]:
        """Return each matrix of a block that is several of transformers' -> their names and rows."""
        keys = self.kv_heads * self.head_dim
        found = {"attention.qkv": {"q_proj": self.heads * self.head_dim, "k_proj": keys, "v_proj": keys}}
        if self.family == "llama":
            found["feed_forward.gate_up"] = {"gate_proj": self.hidden, "up_proj": self.hidden}
        return found

    def padded(self, multiple: int) -> LMConfig:
        """Return the same model with its vocabulary's matrices padded to a multiple of rows."""
        return replace(self, padded_vocab_size=-(-self.vocab_size // multiple) * multiple)


def gpt2(width: int, layers: int, heads: int, vocab_size: int = 50257, context: int = 1024) -> LMConfig:
    """Return a GPT-2 of these sizes."""
    return LMConfig("gpt2", vocab_size, context, width, layers, heads, heads, 4 * width, width // heads)


def llama(
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    vocab_size: int = 128256,
    context: int = 8192,
    **changes: Any,
) -> LMConfig:
    """Return a Llama of these sizes; defaults are Llama 3's."""
    choices: dict[str, Any] = {"rope_theta": 500000.0, "tied": False} | changes
    return LMConfig("llama", vocab_size, context, width, layers, heads, kv_heads, hidden, width // heads, **choices)


_LLAMA2: dict[str, Any] = {"vocab_size": 32000, "context": 4096, "rope_theta": 10000.0}
_LLAMA31: dict[str, Any] = {"context": 131072, "rope_scaling": Llama31Scaling()}
_LLAMA32: dict[str, Any] = {"context": 131072, "rope_scaling": Llama31Scaling(factor=32.0), "tied": True}
_TINY: dict[str, Any] = {"vocab_size": 8192, "context": 256}

PRESETS: Mapping[str, LMConfig] = {
    "gpt2-tiny": gpt2(384, 6, 6, **_TINY),
    "gpt2-124m": gpt2(768, 12, 12),
    "gpt2-355m": gpt2(1024, 24, 16),
    "gpt2-774m": gpt2(1280, 36, 20),
    "gpt2-1558m": gpt2(1600, 48, 25),
    "llama-tiny": llama(384, 6, 6, 2, 1024, tied=True, **_TINY),
    "llama2-7b": llama(4096, 32, 32, 32, 11008, **_LLAMA2),
    "llama2-13b": llama(5120, 40, 40, 40, 13824, **_LLAMA2),
    "llama3-8b": llama(4096, 32, 32, 8, 14336),
    "llama3.1-8b": llama(4096, 32, 32, 8, 14336, **_LLAMA31),
    "llama3.2-1b": llama(2048, 16, 32, 8, 8192, **_LLAMA32),
    "llama3.2-3b": llama(3072, 28, 24, 8, 8192, **_LLAMA32),
}


def preset(name: str) -> LMConfig:
    """Return the row ``name`` of ``PRESETS``."""
    if name not in PRESETS:
        raise UserError(f"no model {name!r}{did_you_mean(name, PRESETS)}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def config_from_hf(values: Mapping[str, Any]) -> LMConfig:
    """Return the configuration of a transformers ``config.json`` for GPT-2 or Llama."""
    kind = values.get("model_type")
    if kind not in ("gpt2", "llama"):
        raise UserError(f"config.json: model_type {kind!r} is not supported; gpt2 and llama are")
    try:
        config = _gpt2_from_hf(values) if kind == "gpt2" else _llama_from_hf(values)
    except KeyError as error:
        raise UserError(f"config.json: {error} is missing; download the model again") from None
    eos = values.get("eos_token_id")
    ends = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    return replace(config, bos=values.get("bos_token_id"), eos=ends)


# transformers' names of our fields
_GPT2_NAMES = {
    "n_embd": "width",
    "n_head": "heads",
    "n_inner": "hidden",
    "n_layer": "layers",
    "n_positions": "context",
    "layer_norm_epsilon": "norm_eps",
    "tie_word_embeddings": "tied",
    "vocab_size": "vocab_size",
}
_LLAMA_NAMES = {
    "hidden_size": "width",
    "intermediate_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "max_position_embeddings": "context",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied",
    "vocab_size": "vocab_size",
}


def _fields(values: Mapping[str, Any], names: Mapping[str, str], **defaults: Any) -> dict[str, Any]:
    """Return our fields of transformers' ``values``; those without a default must be there."""
    missing = {ours for hf, ours in names.items() if values.get(hf) is None}
    return {ours: defaults[ours] if ours in missing & defaults.keys() else values[hf] for hf, ours in names.items()}


_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # transformers' names of one function


def _gpt2_from_hf(values: Mapping[str, Any]) -> LMConfig:
    if values.get("activation_function") not in _TANH_GELU:
        _expect(values, activation_function="gelu_new")
    _expect(values, scale_attn_by_inverse_layer_idx=False, scale_attn_weights=True)
    width, heads = values["n_embd"], values["n_head"]
    fields = _fields(values, _GPT2_NAMES, hidden=4 * width, context=1024, norm_eps=1e-5, tied=True)
    return LMConfig("gpt2", kv_heads=heads, head_dim=width // heads, **fields)


def _llama_from_hf(values: Mapping[str, Any]) -> LMConfig:
    _expect(values, hidden_act="silu", partial_rotary_factor=1.0)
    heads = values["num_attention_heads"]
    defaults = {"context": 2048, "kv_heads": heads, "head_dim": values["hidden_size"] // heads}
    defaults |= {"attention_bias": False, "mlp_bias": False}
    # transformers 5 writes rope_parameters; the published files have rope_theta and rope_scaling.
    rope = values.get("rope_parameters") or (values.get("rope_scaling") or {})
    return LMConfig(
        "llama",
        rope_theta=rope.get("rope_theta") or values.get("rope_theta") or 10000.0,
        rope_scaling=_scaling_from_hf(rope, values),
        **_fields(values, _LLAMA_NAMES, norm_eps=1e-6, tied=False, **defaults),
    )


def _scaling_from_hf(rope: Mapping[str, Any], values: Mapping[str, Any]) -> RopeScaling | None:
    """Return what ``rope_scaling`` says; ``values`` are those around it."""
    _expect(rope, partial_rotary_factor=1.0)
    context = values.get("max_position_embeddings") or 2048
    match rope.get("rope_type") or rope.get("type") or "default":
        case "default":
            return None
        case "linear":
            return LinearScaling(_positive(rope, "factor"))
        case "dynamic":
            return DynamicNTKScaling(_positive(rope, "factor"), context)
        case "yarn":
            original = values.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
            original = original or context
            factor = context / original if rope.get("factor") is None else _positive(rope, "factor")
            betas = (_positive(rope, "beta_fast", 32.0), _positive(rope, "beta_slow", 1.0))
            return YarnScaling(factor, original, _yarn_attention(rope, factor), *betas, rope.get("truncate", True))
        case "llama3":
            factor, low, high = (_positive(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
            return Llama31Scaling(factor, low, high, rope["original_max_position_embeddings"])
        case kind:
            raise UserError(
                f"config.json: rope_type {kind!r} is not supported; default, linear, dynamic, yarn and llama3 are"
            )


def _positive(rope: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a number of ``rope_scaling``; without ``default`` it must be there."""
    value = rope[key] if default is None else rope.get(key) or default
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"config.json: rope_scaling: {key} = {value!r} is no number above 0; download the model again")
    return value


def _yarn_attention(rope: Mapping[str, Any], factor: float) -> float:
    """Return by what queries and keys grow: as said, or 0.1 m ln(factor) + 1 (with m of DeepSeek's configurations)."""
    if rope.get("attention_factor") is not None:
        return _positive(rope, "attention_factor")

    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return grown(rope["mscale"]) / grown(rope["mscale_all_dim"])
    return grown(1.0)


def _expect(values: Mapping[str, Any], **wanted: Any) -> None:
    for key, value in wanted.items():
        if values.get(key, value) != value:
            raise UserError(f"config.json: {key} = {values[key]!r} is not supported, only {value!r}; use another model")


def config_to_hf(config: LMConfig) -> dict[str, Any]:
    """Return ``config.json`` for transformers; padding rows are not part of it."""
    # said even where there are none: transformers would take the numbers of the first Llama
    eos = list(config.eos) if len(config.eos) > 1 else next(iter(config.eos), None)
    values: dict[str, Any] = {"bos_token_id": config.bos, "eos_token_id": eos}
    names = _GPT2_NAMES if config.family == "gpt2" else _LLAMA_NAMES
    values |= {hf: getattr(config, ours) for hf, ours in names.items()}
    if config.family == "gpt2":
        return values | {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "activation_function": "gelu_new",
        }
    values |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
    }
    if config.rope_scaling is not None:
        values["rope_scaling"] = _scaling_to_hf(config.rope_scaling)
    return values


_SCALING_FIELDS: dict[type[RopeScaling], tuple[str, tuple[str, ...]]] = {  # transformers' rope_type and names, in order
    LinearScaling: ("linear", ("factor",)),
    DynamicNTKScaling: ("dynamic", ("factor",)),  # its original context is max_position_embeddings
    YarnScaling: (
        "yarn",
        ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    ),
    Llama31Scaling: (
        "llama3",
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ),
}


def _scaling_to_hf(scaling: RopeScaling) -> dict[str, Any]:
    kind, names = _SCALING_FIELDS[type(scaling)]
    return {"rope_type": kind, **dict(zip(names, astuple(scaling), strict=False))}
