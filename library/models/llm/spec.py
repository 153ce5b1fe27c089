"""What distinguishes one language model from another: a row of numbers and a few choices.

GPT-2 (Radford et al. 2019) and Llama 2, 3, 3.1 and 3.2 (arXiv 2307.09288, 2407.21783) are the same decoder, and so are
those that differ from Llama by a line: Mistral (arXiv 2310.06825: a window of attention), Qwen 2.5 (2412.15115: biases
of q, k and v), Qwen 3 (2505.09388: q and k are normed) and SmolLM 3 (no positions in every fourth block, 2501.18795).
The choices in which they differ are fields here, what a ``model_type`` of transformers always has is a row of
``KINDS``, the published sizes are rows of ``PRESETS``; ``docs/llm.md`` walks from one to the next. A ``config.json`` in
transformers' form is read by :func:`config_from_hf` and written by :func:`config_to_hf`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from library.errors import UserError, did_you_mean
from library.files import read_toml
from library.nn.rope import LinearScaling, Llama31Scaling, RopeScaling, YarnScaling

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
        no_rope: numbers of the blocks without positions.
        attention_bias, mlp_bias: whether these linear layers have one; a GPT-2's have.
        out_bias: whether the layer behind attention has one; default: as ``attention_bias``.
        qk_norm: heads of queries and keys are normed before they are turned.
        window: a token sees itself and so many before it, less one; None: all.
        kind: transformers' ``model_type``, a row of ``KINDS``; default: the family.
        bos, eos, pad: tokens that begin and end a text, and that fill up a row, for the configuration file.
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
    out_bias: bool | None = None
    qk_norm: bool = False
    window: int | None = None
    no_rope: tuple[int, ...] = ()
    kind: str = ""
    padded_vocab_size: int = 0
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None

    def __post_init__(self) -> None:
        """Check what the blocks take for granted."""
        if not self.padded_vocab_size:
            object.__setattr__(self, "padded_vocab_size", self.vocab_size)
        if self.family == "gpt2":
            object.__setattr__(self, "attention_bias", True)
            object.__setattr__(self, "mlp_bias", True)
        if self.out_bias is None:
            object.__setattr__(self, "out_bias", self.attention_bias)
        object.__setattr__(self, "kind", self.kind or self.family)
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
    """Return a Llama, or one of its kin, of these sizes; defaults are Llama 3's."""
    choices: dict[str, Any] = {"rope_theta": 500000.0, "tied": False, "head_dim": width // heads} | changes
    choices |= KINDS[choices.get("kind", "llama")].fixed
    return LMConfig("llama", vocab_size, context, width, layers, heads, kv_heads, hidden, **choices)


@dataclass(frozen=True)
class Kind:
    """A ``model_type`` of transformers.

    Attributes:
        implementation: transformers' class.
        defaults: what its configuration means where ``config.json`` is silent, and Llama's means another.
        fixed: fields that all such models have.
        keys: transformers' names of fields that only this one has.
    """

    implementation: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)


NAMES = read_toml(Path(__file__).with_name("names.toml"))[0]
KINDS: Mapping[str, Kind] = {name: Kind(**row) for name, row in NAMES["kinds"].items()}


def fourth_blocks(layers: int, every: int = 4) -> tuple[int, ...]:
    """Return the blocks of a SmolLM 3 that have no positions: every fourth."""
    return tuple(range(every - 1, layers, every))


def _presets() -> Iterator[tuple[str, LMConfig]]:
    """Yield the rows of ``presets.toml`` by name."""
    for group in read_toml(Path(__file__).with_name("presets.toml"))[0]["groups"]:
        common = {key: tuple(v) if isinstance(v, list) else v for key, v in group.get("common", {}).items()}
        if "rope_scaling" in group:
            common["rope_scaling"] = Llama31Scaling(**group["rope_scaling"])
        for name, sizes in group["models"].items():
            sizes = common | sizes
            yield name, gpt2(**sizes) if group["family"] == "gpt2" else llama(**sizes)


PRESETS: Mapping[str, LMConfig] = dict(_presets())


def preset(name: str) -> LMConfig:
    """Return the row ``name`` of ``PRESETS``."""
    if name not in PRESETS:
        raise UserError(f"no model {name!r}{did_you_mean(name, PRESETS)}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


def config_from_hf(values: Mapping[str, Any]) -> LMConfig:
    """Return the configuration of a transformers ``config.json``.

    Raises:
        UserError: the ``model_type`` is no row of ``KINDS``, or a key has a value that the model here does not carry.
    """
    kind = str(values.get("model_type"))
    if kind not in KINDS:
        raise UserError(f"config.json: model_type {kind!r} is not supported; {', '.join(KINDS)} are")
    try:
        config = _gpt2_from_hf(values) if kind == "gpt2" else _llama_from_hf(values, KINDS[kind])
    except KeyError as error:
        raise UserError(f"config.json: {error} is missing; download the model again") from None
    eos = as_tokens(values.get("eos_token_id"))
    return replace(config, bos=values.get("bos_token_id"), eos=eos, pad=values.get("pad_token_id"))


def as_tokens(value: int | list[int] | None) -> tuple[int, ...]:
    """Return what a configuration says of ``eos_token_id``: nothing, a token, or a list of them."""
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


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
    fields = _fields(values, NAMES["config"]["gpt2"], hidden=4 * width, context=1024, norm_eps=1e-5, tied=True)
    return LMConfig("gpt2", kv_heads=heads, head_dim=width // heads, **fields)


def _llama_from_hf(values: Mapping[str, Any], kind: Kind) -> LMConfig:
    _expect(values, hidden_act="silu", partial_rotary_factor=1.0, use_sliding_window=False)
    if windows := set(values.get("layer_types") or ()) - {"full_attention"}:
        raise UserError(f"config.json: layer_types has {windows.pop()!r}, only 'full_attention' is supported")
    heads, layers = values["num_attention_heads"], values["num_hidden_layers"]
    defaults: dict[str, Any] = {"context": 2048, "kv_heads": heads, "head_dim": values["hidden_size"] // heads}
    defaults |= {"norm_eps": 1e-6, "tied": False, "rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False}
    defaults |= kind.defaults
    if "kv_heads" in kind.defaults and values.get("num_key_value_heads", 0) is None:  # null is none of its own
        defaults["kv_heads"] = heads
    fields = _fields(values, NAMES["config"]["llama"] | kind.keys, **defaults)
    if values.get("sliding_window", 0) is None:
        fields["window"] = None
    if kind.implementation.startswith("SmolLM3"):
        turned = values.get("no_rope_layers")  # 1 for blocks that have positions
        of_step = fourth_blocks(layers, values.get("no_rope_layer_interval") or 4)
        fields["no_rope"] = of_step if turned is None else tuple(i for i, has in enumerate(turned) if not has)
    # transformers 5 writes rope_parameters; the published files have rope_theta and rope_scaling.
    rope = values.get("rope_parameters") or (values.get("rope_scaling") or {})
    fields["rope_theta"] = rope.get("rope_theta") or values.get("rope_theta") or defaults["rope_theta"]
    return LMConfig("llama", rope_scaling=_scaling_from_hf(rope, values), **{**fields, **kind.fixed})


def _scaling_from_hf(rope: Mapping[str, Any], values: Mapping[str, Any]) -> RopeScaling | None:
    """Return what ``rope_scaling`` says; ``values`` are those around it."""
    _expect(rope, partial_rotary_factor=1.0)
    context = values.get("max_position_embeddings") or 2048
    match rope.get("rope_type") or rope.get("type") or "default":
        case "default":
            return None
        case "linear":
            return LinearScaling(_positive(rope, "factor"))
        case "yarn":
            original = values.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
            original = original or context
            factor = context / original if rope.get("factor") is None else _positive(rope, "factor")
            betas = (_positive(rope, "beta_fast", 32.0), _positive(rope, "beta_slow", 1.0))
            _expect(rope, mscale=None, mscale_all_dim=None)  # of DeepSeek's configurations
            growth = _positive(rope, "attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
            return YarnScaling(factor, original, growth, *betas, rope.get("truncate", True))
        case "llama3":
            factor, low, high = (_positive(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
            return Llama31Scaling(factor, low, high, rope["original_max_position_embeddings"])
        case kind:
            raise UserError(f"config.json: rope_type {kind!r} is not supported; default, linear, yarn and llama3 are")


def _positive(rope: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """Return a number of ``rope_scaling``; without ``default`` it must be there."""
    value = rope[key] if default is None else rope.get(key) or default
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"config.json: rope_scaling: {key} = {value!r} is no number above 0; download the model again")
    return value


def _expect(values: Mapping[str, Any], **wanted: Any) -> None:
    for key, value in wanted.items():
        if values.get(key, value) != value:
            raise UserError(f"config.json: {key} = {values[key]!r} is not supported, only {value!r}; use another model")


def config_to_hf(config: LMConfig) -> dict[str, Any]:
    """Return ``config.json`` for transformers; padding rows are not part of it."""
    values = special_to_hf(config)
    kind = KINDS[config.kind]
    names = NAMES["config"][config.family] | kind.keys
    values |= {hf: getattr(config, ours) for hf, ours in names.items()}
    values |= {"architectures": [kind.implementation], "model_type": config.kind}
    if config.family == "gpt2":
        return values | {"activation_function": "gelu_new"}
    values |= {"hidden_act": "silu", "rope_theta": config.rope_theta}
    if config.kind == "smollm3":
        values["no_rope_layers"] = [int(i not in config.no_rope) for i in range(config.layers)]
    if config.rope_scaling is not None:
        values["rope_scaling"] = _scaling_to_hf(config.rope_scaling)
    return values


def special_to_hf(config: LMConfig) -> dict[str, Any]:
    """Return the tokens that begin, end and fill up, as ``config.json`` and ``generation_config.json`` have them.

    They are said even where there are none: transformers would take the numbers of the family's first model.
    """
    eos = list(config.eos) if len(config.eos) > 1 else next(iter(config.eos), None)
    return {"bos_token_id": config.bos, "eos_token_id": eos, "pad_token_id": config.pad}


_SCALING_FIELDS: dict[type[RopeScaling], tuple[str, tuple[str, ...]]] = {  # transformers' rope_type and names, in order
    LinearScaling: ("linear", ("factor",)),
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
