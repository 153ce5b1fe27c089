"""How the models of a family are kept, and what the shapes of a file say of its transformer.

``[files]`` in a family's ``names.toml`` has the fields of :class:`FamilyFiles`, each part as a list of the fields of a
:class:`Part`; ``others`` has what some of its models have otherwise.

A transformer file needs no sidecar: the arguments of diffusers' class follow from the shapes of its tensors, under
diffusers' names, but for the few that no tensor shows. Nothing of diffusers is imported here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from library.config.model_types import IMAGE_MODELS, MODEL_TYPES
from library.files import read_toml
from library.models.layer_names import KeyNames, count_blocks, original_key_map
from library.models.registry import family_names, folder_of
from library.models.weights import KeyMap
from library.precision.checkpoint import WeightFiles

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Part:
    """A part of a model beside its transformer.

    Attributes:
        option: the key of ``[model]`` that names it. folder: where a diffusers folder has it. published: the file that
        the option is to name; of a tokenizer its name on the hub, if the option has no default.
    """

    option: str
    folder: str
    published: str = ""


@dataclass(frozen=True)
class FamilyFiles:
    """How the models of a family are kept.

    Attributes:
        model_type: the family's first; its rows in ``library.models.inspection`` name it too.
        arguments: from the shapes of a file, under diffusers' names, to the arguments of that class.
        keys, norms: names of a file that are not diffusers' (``library.models.layer_names``).
        vae, text_encoders, tokenizers: the other parts.
        unused: regular expressions of a file's tensors that no parameter takes.
        variants: tensor -> a variant that has it and is not supported.
    """

    model_type: str
    arguments: Callable[[Shapes], dict[str, Any]]
    keys: KeyNames
    vae: Part
    text_encoders: tuple[Part, ...]
    tokenizers: tuple[Part, ...]
    norms: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    variants: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Return what people call the architecture."""
        return MODEL_TYPES[self.model_type].title

    @property
    def transformer(self) -> str:
        """Return diffusers' class."""
        return MODEL_TYPES[self.model_type].transformer

    def key_map(self, weights: WeightFiles, prefix: str) -> KeyMap:
        """Return where each parameter of the transformer lies in ``weights``, whatever the layout of their names."""
        found = original_key_map(weights, prefix, self.keys, self.norms)
        return {name: pieces for name, pieces in found.items() if not any(re.fullmatch(u, name) for u in self.unused)}


def family_files() -> list[FamilyFiles]:
    """Return every family's row."""
    return [files_of(name) for name in dict(zip(map(folder_of, IMAGE_MODELS), IMAGE_MODELS, strict=True)).values()]


@functools.cache
def files_of(model_type: str) -> FamilyFiles:
    """Return the row of a ``model_type``'s family, with the parts that this model has otherwise."""
    folder = folder_of(model_type)
    names, files = family_names(folder), read_toml(Path(__file__).parent / folder / "names.toml")[0]["files"]
    for other in files.pop("others", ()):
        files |= {key: value for key, value in other.items() if key != "models" and model_type in other["models"]}
    files |= {"vae": Part(*files["vae"]), "keys": names.keys, "norms": names.norms}
    files |= {key: tuple(Part(*part) for part in files[key]) for key in ("text_encoders", "tokenizers")}
    first = next(name for name in IMAGE_MODELS if folder_of(name) == folder)
    return FamilyFiles(first, _ARGUMENTS[folder], **files)


# The arguments of each family's transformer.


def block_sizes(shapes: Shapes, inputs: str, norm: str, **stacks: str) -> dict[str, Any]:
    """Return the arguments of a transformer that its first layer and its blocks show: channels, heads, blocks.

    Args:
        shapes: of a file.
        inputs: the layer that latents go into.
        norm: that of a head's queries.
        stacks: argument -> what stands before the index of the blocks that it counts.
    """
    width, in_channels = shapes[f"{inputs}.weight"]
    (head_dim,) = shapes[f"{norm}.weight"]
    blocks = {argument: count_blocks(shapes, f"{stack}.") for argument, stack in stacks.items()}
    heads = {"attention_head_dim": head_dim, "num_attention_heads": width // head_dim}
    return {"in_channels": in_channels, **blocks, **heads}


def rope_axes(head_dim: int) -> tuple[int, int, int]:
    """Return how a head is shared among index, row and column: (16, 56, 56) for 128.

    No tensor shows the split. An eighth for the index is FLUX.1's and Qwen-Image's; for narrower heads, which only
    small test models have, at least 8, so 32 gives (8, 12, 12).
    """
    first = max(8, head_dim // 8)
    return (first, (head_dim - first) // 2, (head_dim - first) // 2)


_FLUX_STACKS = {"num_layers": "transformer_blocks", "num_single_layers": "single_transformer_blocks"}


def _flux(shapes: Shapes) -> dict[str, Any]:
    """Return the arguments of ``FluxTransformer2DModel`` that fit a file; schnell has no guidance input."""
    sizes = block_sizes(shapes, "x_embedder", "transformer_blocks.0.attn.norm_q", **_FLUX_STACKS)
    return sizes | {
        "patch_size": 1,
        "out_channels": shapes["proj_out.weight"][0],
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in shapes,
        "axes_dims_rope": rope_axes(sizes["attention_head_dim"]),
    }


def _flux2(shapes: Shapes) -> dict[str, Any]:
    """Return the arguments of ``Flux2Transformer2DModel`` that fit a file; klein has no guidance input."""
    sizes = block_sizes(shapes, "x_embedder", "single_transformer_blocks.0.attn.norm_q", **_FLUX_STACKS)
    width, inner = shapes["transformer_blocks.0.ff.linear_out.weight"]
    return sizes | {
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "timestep_guidance_channels": shapes["time_guidance_embed.timestep_embedder.linear_1.weight"][1],
        "mlp_ratio": inner / width,
        "axes_dims_rope": [sizes["attention_head_dim"] // 4] * 4,
        "guidance_embeds": "time_guidance_embed.guidance_embedder.linear_1.weight" in shapes,
    }


def _flux3(shapes: Shapes) -> dict[str, Any]:
    """Return the arguments of ``Flux3Transformer2DModel`` that fit a file."""
    sizes = block_sizes(
        shapes,
        "x_embedders.image",
        "single_transformer_blocks.0.attn.norm_q",
        num_layers="txt_mode_blocks",
        num_single_layers="single_transformer_blocks",
    )
    width, inner = shapes["single_transformer_blocks.0.ff.linear_out.weight"]
    return sizes | {
        # a file may leave out what only reference images go through
        "cond_in_channels": shapes.get("x_embedders.image_cond.weight", shapes["x_embedders.image.weight"])[1],
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "timestep_channels": shapes["timestep_embedder.linear_1.weight"][1],
        "mlp_ratio": inner / width,
        "axes_dims_rope": (sizes["attention_head_dim"] // 4,) * 4,  # no tensor shows it
        "flow_map": "target_timestep_embedder.linear_1.weight" in shapes,
    }


def _ernie_image(shapes: Shapes) -> dict[str, Any]:
    """Return the arguments of ``ErnieImageTransformer2DModel`` that fit a file."""
    width, channels, patch, _ = shapes["x_embedder.proj.weight"]
    (head_dim,) = shapes["layers.0.self_attention.norm_q.weight"]
    return {
        "hidden_size": width,
        "num_attention_heads": width // head_dim,
        "num_layers": count_blocks(shapes, "layers."),
        "ffn_hidden_size": shapes["layers.0.mlp.gate_proj.weight"][0],
        "in_channels": channels,
        "out_channels": shapes["final_linear.weight"][0] // patch**2,
        "patch_size": patch,
        "text_in_dim": shapes.get("text_proj.weight", (width, width))[1],
        # diffusers' default, (32, 48, 48); no tensor shows how a head is shared among the axes
        "rope_axes_dim": (head_dim // 4, head_dim * 3 // 8, head_dim * 3 // 8),
    }


def _krea2(shapes: Shapes) -> dict[str, Any]:
    """Return the arguments of ``Krea2Transformer2DModel`` that fit a file."""
    text_width = shapes["txt_in.linear_1.weight"][1]
    block, fusion = "transformer_blocks.0", "text_fusion.layerwise_blocks.0"
    (text_head_dim,) = shapes[f"{fusion}.attn.norm_q.weight"]
    sizes = block_sizes(
        shapes,
        "img_in",
        f"{block}.attn.norm_q",
        num_layers="transformer_blocks",
        num_layerwise_text_blocks="text_fusion.layerwise_blocks",
        num_refiner_text_blocks="text_fusion.refiner_blocks",
    )
    head_dim = sizes["attention_head_dim"]
    return sizes | {
        "num_key_value_heads": shapes[f"{block}.attn.to_k.weight"][0] // head_dim,
        "intermediate_size": shapes[f"{block}.ff.gate.weight"][0],
        "timestep_embed_dim": shapes["time_embed.linear_1.weight"][1],
        "text_hidden_dim": text_width,
        "num_text_layers": shapes["text_fusion.projector.weight"][-1],  # GGUF keeps a single row as a vector
        "text_num_attention_heads": text_width // text_head_dim,
        "text_num_key_value_heads": shapes[f"{fusion}.attn.to_k.weight"][0] // text_head_dim,
        "text_intermediate_size": shapes[f"{fusion}.ff.gate.weight"][0],
        # diffusers' default; no tensor shows how a head is shared among the axes
        "axes_dims_rope": (head_dim // 4, head_dim * 3 // 8, head_dim * 3 // 8),
    }


def _qwen_image(shapes: Shapes) -> dict[str, Any]:
    """Return the arguments of ``QwenImageTransformer2DModel`` that fit a file."""
    sizes = block_sizes(shapes, "img_in", "transformer_blocks.0.attn.norm_q", num_layers="transformer_blocks")
    return sizes | {
        "patch_size": 2,
        "out_channels": shapes["proj_out.weight"][0] // 4,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "axes_dims_rope": rope_axes(sizes["attention_head_dim"]),
        "zero_cond_t": "__index_timestep_zero__" in shapes,
    }


def _qwen_image_21(shapes: Shapes) -> dict[str, Any]:
    """Return the arguments of ``QwenImage21Transformer2DModel`` that fit a file."""
    sizes = block_sizes(shapes, "img_in", "transformer_blocks.0.attn.norm_q", num_layers="transformer_blocks")
    width, inner = shapes["transformer_blocks.0.img_mlp.out.weight"]
    return sizes | {
        "patch_size": 1,
        "out_channels": shapes["proj_out.weight"][0],
        "context_in_dim": shapes["txt_in.in_layer.weight"][1],
        "mlp_ratio": inner // width,
        "axes_dims_rope": rope_axes(sizes["attention_head_dim"]),
    }


def _z_image(shapes: Shapes) -> dict[str, Any]:
    """Return the arguments of ``ZImageTransformer2DModel`` that fit a file."""
    width, inputs = shapes["all_x_embedder.2-1.weight"]
    (head_dim,) = shapes["layers.0.attention.norm_q.weight"]
    return {
        "in_channels": inputs // 4,
        "dim": width,
        "n_layers": count_blocks(shapes, "layers."),
        "n_refiner_layers": count_blocks(shapes, "noise_refiner."),
        "n_heads": width // head_dim,
        "n_kv_heads": width // head_dim,
        "cap_feat_dim": shapes["cap_embedder.1.weight"][1],
        # transformer/config.json of Tongyi-MAI/Z-Image; no tensor shows how a head is shared among the axes
        "axes_dims": [head_dim // 4, head_dim * 3 // 8, head_dim * 3 // 8],
        "axes_lens": [1536, 512, 512],
    }


_ARGUMENTS: Mapping[str, Callable[[Shapes], dict[str, Any]]] = {
    "ernie_image": _ernie_image,
    "flux": _flux,
    "flux2": _flux2,
    "flux3": _flux3,
    "krea2": _krea2,
    "qwen_image": _qwen_image,
    "qwen_image_21": _qwen_image_21,
    "z_image": _z_image,
}
