"""Qwen3 as a text encoder, the language model of Qwen3-VL too: loaded as far as its layers are read.

Diffusion models read the vectors between its layers. What follows the last one that is read is never loaded: the layers
after it, the norm and the head. Qwen3-VL's language model is the same network with a larger base of the rotary
positions, which no tensor shows; where there are no images its three position axes agree and turn like Qwen3's one
(https://github.com/huggingface/transformers, ``modeling_qwen3_vl.py``: ``mrope_interleaved``).

The file is a transformers folder or one of ComfyUI's (``qwen_3_4b.safetensors``), whose configuration follows from its
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3Model

from library.errors import UserError
from library.models.family import Family
from library.models.layer_names import count_blocks
from library.models.text import LanguageModelEncoder, byte_tokenizer, load_qwen_tokenizer
from library.models.weights import load_into, read_config
from library.precision.checkpoint import WeightFiles
from library.precision.recipe import Recipe, WeightLoader
from library.safetensors_io import RowRange

THETA, VL_THETA = 1e6, 5e6  # config.json of Qwen/Qwen3-4B and of Qwen/Qwen3-VL-4B-Instruct
_TYPES = {"qwen3": THETA, "qwen3_vl": VL_THETA, "qwen3_vl_text": VL_THETA}
_NAMES = {THETA: "Qwen3", VL_THETA: "Qwen3-VL"}
_EMBEDDINGS = "embed_tokens.weight"
_SIZES = {"4B": (2560, 9728), "8B": (4096, 12288)}  # width, inner width


class _Qwen3VLTextConfig(Qwen3Config):
    """The configuration of Qwen3-VL's language model, which a folder then says that it is."""

    model_type = "qwen3_vl_text"


def published_qwen3(size: str, layers: int, theta: float = THETA) -> dict[str, Callable[[], Any]]:
    """Return what builds the first ``layers`` of Qwen3-4B or 8B, and a tokenizer of single bytes for it, by folder.

    Negative: all but so many, as of :func:`load_qwen3`.
    """
    width, inner = _SIZES[size]
    kind = Qwen3Config if theta == THETA else _Qwen3VLTextConfig
    config = _config(sizes(151936, width, inner, len(range(36)[:layers]), 32, 8, 128), theta, kind)
    return {"text_encoder": lambda: without_norm(Qwen3Model(config)), "tokenizer": byte_tokenizer}


def load_qwen3(
    path: Path,
    layers: int | None,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    recipe: Recipe | None = None,
    theta: float = THETA,
) -> Qwen3Model:
    """Load the first ``layers`` of Qwen3, without the norm behind them.

    Args:
        path: a transformers folder or a file.
        layers: how many; negative: all but so many; None: all.
        dtype, device: of the weights.
        recipe: how linear weights become fp8; None leaves them as the file has them.
        theta: base of the rotary positions, of a single file; a folder says it itself.
    """
    weights = WeightFiles(path)
    prefix, config = _describe(weights, theta)
    kept = layers if layers is not None and layers >= 0 else config.num_hidden_layers + (layers or 0)
    return load_layers(Qwen3Model, weights, prefix, config, kept, dtype, device, recipe)


def load_layers(
    model: Any,
    weights: WeightFiles,
    prefix: str,
    config: Any,
    layers: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    recipe: Recipe | None = None,
) -> Any:
    """Load the first ``layers`` of a ``model`` of ``config``, without the norm behind them.

    ``prefix``: what stands before its names in ``weights``.
    """
    if layers > config.num_hidden_layers:
        raise UserError(
            f"{weights.path}: a language model of {config.num_hidden_layers} layers, {layers} are read; give the text "
            "encoder of the model"
        )
    settings = config.to_dict() | {"num_hidden_layers": layers}
    config = type(config).from_dict(settings | ({"layer_types": None} if "layer_types" in settings else {}))
    wanted = (_EMBEDDINGS, *(f"layers.{i}." for i in range(layers)))
    names = {name.removeprefix(prefix): name for name in weights.names if name.startswith(prefix)}
    key_map = {name: [RowRange(source)] for name, source in names.items() if name.startswith(wanted)}
    loader = WeightLoader(recipe, compute="dequant")
    return load_into(lambda: without_norm(model(config)), weights, key_map, dtype, device, fp8=loader)


def qwen3_width(path: Path, theta: float = THETA) -> int:
    """Return the width of the vectors that the Qwen3 in ``path`` gives, with ``VL_THETA`` Qwen3-VL's.

    Reads headers only.

    Raises:
        UserError: it is the other of the two, which has the same shapes.
    """
    return _describe(WeightFiles(path), theta)[1].hidden_size


def prefix_of(weights: WeightFiles) -> str:
    """Return what stands before the names of the language model in a file."""
    found = [name for name in weights.names if name.endswith(_EMBEDDINGS)]
    return found[0].removesuffix(_EMBEDDINGS) if found else "model."


def without_norm(model: Any) -> Any:
    """Return a language model whose last layer's output nothing follows."""
    model.norm = nn.Identity()
    return model


def _kind(weights: WeightFiles) -> str | None:
    """Return which of the two the file is; None if nothing tells, as of a language model in a file by itself."""
    if weights.path.is_dir():
        return _NAMES.get(_TYPES.get(str(read_config(weights.path).get("model_type")), 0.0))
    if (architecture := weights.metadata.get("general.architecture")) is not None:  # of GGUF
        return {"qwen3": _NAMES[THETA], "qwen3vl": _NAMES[VL_THETA]}.get(architecture)
    return _NAMES[VL_THETA] if any("visual.deepstack_merger_list." in name for name in weights.names) else None


def sizes_of(
    shape: Callable[[str], tuple[int, ...]], names: Collection[str], prefix: str, head_dim: int = 0
) -> dict[str, int]:
    """Return the arguments of a language model's configuration that its tensors show.

    Args:
        shape: from a tensor's name to its shape. names: of all tensors.
        prefix: before the model's names.
        head_dim: width of a head, where there is no norm of queries that shows it.
    """
    first = f"{prefix}layers.0"
    if (norm := f"{first}.self_attn.q_norm.weight") in names:
        (head_dim,) = shape(norm)
    vocabulary, width = shape(prefix + _EMBEDDINGS)
    inner, layers = shape(f"{first}.mlp.gate_proj.weight")[0], count_blocks(names, f"{prefix}layers.")
    heads = (shape(f"{first}.self_attn.{name}_proj.weight")[0] // head_dim for name in "qk")
    return sizes(vocabulary, width, inner, layers, *heads, head_dim)


def sizes(*numbers: int) -> dict[str, int]:
    """Return the arguments of a language model's configuration for its sizes.

    These are the vocabulary's, the width, that of the MLP, layers, heads, those of keys, and a head's width.
    """
    names: tuple[str, ...] = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "num_key_value_heads", "head_dim")
    return dict(zip(names, numbers, strict=True))


def _config(of: dict[str, int], theta: float, kind: type[Qwen3Config] = Qwen3Config) -> Qwen3Config:
    """Return a configuration of such sizes; what no tensor shows is Qwen3's."""
    rope = {"rope_type": "default", "rope_theta": theta}
    return kind(**of, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_parameters=rope)


def _describe(weights: WeightFiles, theta: float) -> tuple[str, Qwen3Config]:
    """Return what stands before the language model's names, and the configuration of all its layers."""
    prefix, wanted, found = prefix_of(weights), _NAMES[theta], _kind(weights)
    if found not in (None, wanted):
        raise UserError(f"{weights.path}: {found}, not {wanted}; give {wanted} as text_encoder")
    if weights.path.is_dir():
        known = read_config(weights.path)
        if known.get("model_type") not in _TYPES:
            raise UserError(
                f"{weights.path / 'config.json'}: {known.get('model_type')!r}, not qwen3; give the text encoder of "
                "the model"
            )
        base = _TYPES[known["model_type"]]
        text = known.get("text_config", known)
        ropes = text.get("rope_parameters") or text.get("rope_scaling") or text
        text = {key: value for key, value in text.items() if key not in ("rope_scaling", "rope_theta", "model_type")}
        theta = ropes.get("rope_theta") or known.get("text_config", known).get("rope_theta") or base
        return prefix, Qwen3Config.from_dict(
            text | {"layer_types": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
        )
    first = f"{prefix}layers.0"
    if f"{first}.self_attn.q_norm.weight" not in weights or f"{first}.mlp.gate_proj.weight" not in weights:
        raise UserError(f"{weights.path}: not {wanted} (no {first}.self_attn.q_norm); give {wanted} as text_encoder")
    return prefix, _config(sizes_of(weights.shape, weights.names, prefix), theta)


class Qwen3Family(Family):
    """A family whose captions are read by Qwen3, or by the language model of Qwen3-VL.

    Attributes:
        text_encoder: what puts captions to it and keeps of its vectors what the transformer is given.
        text_layers: how many layers are loaded; negative: all but so many.
        read_layers: after which the vectors are read; default: as ``text_encoder`` says.
        text_settings: what its vectors depend on, for the names of cached ones.
        text_argument: of the transformer, how wide they are.
        text_model: to give, for messages.
        theta: base of the rotary positions.
    """

    text_encoder: type[LanguageModelEncoder]
    text_layers: int
    read_layers: tuple[int, ...] = ()
    text_settings: tuple[object, ...]
    text_argument = "joint_attention_dim"
    text_model = "Qwen3-4B"
    theta = THETA

    @classmethod
    def published_texts(cls) -> dict[str, Callable[[], Any]]:
        """Return the layers of the 4B model that are loaded."""
        return published_qwen3("4B", cls.text_layers, cls.theta)

    def check_text_encoders(self) -> None:
        """Compare the width of the vectors with what the transformer takes."""
        width = qwen3_width(self.files.text_encoders[0], self.theta)
        self.check_text_width(width, self.text_argument, self.text_model, len(self.text_encoder.layers) or 1)

    def load_text_encoder(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", *, recipe: Recipe | None = None
    ) -> LanguageModelEncoder:
        """Return the text encoder; its tokenizer is loaded now."""
        (path,), (folder,) = self.files.text_encoders, self.files.tokenizers
        tokenizer = load_qwen_tokenizer(folder, "<|im_start|>", _NAMES[self.theta])
        load = partial(load_qwen3, path, self.text_layers, dtype, device, recipe, self.theta)
        encoder = self.text_encoder(load, tokenizer, self.text_fingerprint(dtype, recipe, *self.text_settings))
        encoder.layers = self.read_layers or encoder.layers
        return encoder
