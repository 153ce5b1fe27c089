"""Where the parts of an image model lie: ``[model]`` options in, checked paths out, no weights read.

Every family is kept in two ways: a diffusers folder with everything in it, and a transformer file, the publisher's own
or one of ComfyUI's split files, with options that name the other parts. A transformer file needs no sidecar: its
configuration follows from its shapes. Its names may stand below ``model.diffusion_model.``; what else an all-in-one
file holds is passed over, the other parts still come from their options. With a folder these options replace its own
parts.

What differs between families is a row, :class:`FamilyFiles`, in each family's ``files.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from library.config.schema import ModelConfig
from library.errors import UserError
from library.models.hub import find_model, pipeline_index
from library.models.inspection import UNKNOWN, Architecture, is_lora, recognise
from library.models.layer_names import KeyNames, count_blocks, original_key_map
from library.models.registry import family_modules
from library.models.weights import KeyMap, read_config
from library.precision.checkpoint import WeightFiles

COMFY_PREFIX = "model.diffusion_model."
Shapes = Mapping[str, tuple[int, ...]]
# What tells models that no family here is, by a part of a tensor's name.
_UNSUPPORTED = {
    ".input_blocks.": "Stable Diffusion or SDXL",
    "distilled_guidance_layer": "Chroma",
    "joint_blocks.": "Stable Diffusion 3",
}


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
        title: of the architecture, for messages.
        model_type: the family's first; its rows in ``library.models.inspection`` name it too.
        transformer: diffusers' class.
        arguments: from the shapes of a file, under diffusers' names, to the arguments of that class.
        keys, norms: names of a file that are not diffusers' (``library.models.layer_names``).
        vae, text_encoders, tokenizers: the other parts.
        unused: regular expressions of a file's tensors that no parameter takes.
        variants: tensor -> a variant that has it and is not supported.
    """

    title: str
    model_type: str
    transformer: str
    arguments: Callable[[Shapes], dict[str, Any]]
    keys: KeyNames
    vae: Part
    text_encoders: tuple[Part, ...]
    tokenizers: tuple[Part, ...]
    norms: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    variants: Mapping[str, str] = field(default_factory=dict)

    def key_map(self, weights: WeightFiles, prefix: str) -> KeyMap:
        """Return where each parameter of the transformer lies in ``weights``, whatever the layout of their names."""
        found = original_key_map(weights, prefix, self.keys, self.norms)
        return {name: pieces for name, pieces in found.items() if not any(re.fullmatch(u, name) for u in self.unused)}


@dataclass(frozen=True)
class ModelFiles:
    """Checked locations of one model.

    Attributes:
        transformer: a file or a folder; ``prefix`` stands before a file's names.
        transformer_config: arguments of the transformer's class.
        text_encoders, tokenizers: in the family's order; a tokenizer may be a name on the hub.
        processor: folder of settings for reference images, if it is there.
        scheduler: of a diffusers folder.
    """

    transformer: Path
    transformer_config: dict[str, Any]
    prefix: str
    vae: Path
    text_encoders: tuple[Path, ...]
    tokenizers: tuple[str | Path, ...]
    processor: Path
    scheduler: Path | None


def locate(config: ModelConfig, family: FamilyFiles) -> ModelFiles:
    """Find every part of the model."""
    given = [part.folder for part in (family.vae, *family.text_encoders) if getattr(config, part.option)]
    root = find_model(config.pretrained_model_name_or_path, "pretrained_model_name_or_path", True, given)
    if root.is_dir():
        prefix, arguments = "", _folder_arguments(root, family)
    else:
        prefix, arguments = file_arguments(WeightFiles(root), family)
    scheduler = root / "scheduler"
    return ModelFiles(
        transformer=root / "transformer" if root.is_dir() else root,
        transformer_config=arguments,
        prefix=prefix,
        vae=_part(root, config, family.vae),
        text_encoders=tuple(_part(root, config, part) for part in family.text_encoders),
        tokenizers=tuple(_tokenizer(root, config, part) for part in family.tokenizers),
        processor=root / "processor",
        scheduler=scheduler if (scheduler / "scheduler_config.json").is_file() else None,
    )


def _part(root: Path, config: ModelConfig, part: Part) -> Path:
    """Return the file or model folder that the option names (of a pipeline's folder its part), or the model's own."""
    value = getattr(config, part.option)
    if not value:
        if root.is_dir():
            return root / part.folder
        raise UserError(
            f"{root}: a transformer file needs {part.option} beside it; set {part.option} to {part.published}"
        )
    path = Path(value).expanduser()
    if not path.exists():
        raise UserError(f"{part.option} {str(path)!r} does not exist; give a .safetensors file or a model folder")
    return path / part.folder if (path / part.folder).is_dir() else path


def _tokenizer(root: Path, config: ModelConfig, part: Part) -> str | Path:
    """Return the folder's tokenizer, which fits wherever the encoder's weights come from, else the option's."""
    own = root / part.folder
    return own if own.is_dir() else getattr(config, part.option) or part.published


def pipeline_class(root: Path) -> str:
    """Return the class that a diffusers folder names."""
    if (index := pipeline_index(root)) is None:
        raise UserError(f"{root}: no model_index.json, so no diffusers pipeline; give the folder that holds it")
    return read_config(root, index.name).get("_class_name", "")


def _folder_arguments(root: Path, family: FamilyFiles) -> dict[str, Any]:
    pipeline = pipeline_class(root)
    if not (root / "transformer").is_dir():
        raise UserError(
            f"{root}: a {pipeline or 'pipeline'} without a transformer folder; give a {family.title} folder"
        )
    arguments = read_config(root / "transformer")
    kind = arguments.get("_class_name")
    if kind != family.transformer:
        other = next((one for one in family_files() if one.transformer == kind), None)
        remedy = f'set model_type = "{other.model_type}"' if other else f"give a {family.title} folder"
        raise UserError(f"{root / 'transformer'}: {kind!r}, not {family.transformer}; {remedy}")
    return arguments


def file_arguments(weights: WeightFiles, family: FamilyFiles) -> tuple[str, dict[str, Any]]:
    """Return what stands before the transformer's names in a file, and the arguments of its class."""
    if is_lora(weights.names):
        raise UserError(
            f"{weights.path}: a LoRA, not a base model; give it as network_weights, and a {family.title} model as "
            "pretrained_model_name_or_path"
        )
    if other := next((what for part, what in _UNSUPPORTED.items() if any(part in name for name in weights.names)), ""):
        raise UserError(f"{weights.path}: a {other} checkpoint, not {family.title}; give a {family.title} transformer")
    prefix, found = _recognised(weights)
    if found.model_type != family.model_type:
        article = "an" if found.name.startswith("image") else "a"
        what = "of no known layout" if found is UNKNOWN else f"{article} {found.name}"
        remedy = f'set model_type = "{found.model_type}"' if found.model_type else f"give a {family.title} transformer"
        raise UserError(f"{weights.path}: {what}, not {family.title}; {remedy}")
    for tensor, variant in family.variants.items():
        if prefix + tensor in weights:
            raise UserError(
                f"{weights.path}: {variant}, not a model family of this version; give another {family.title} model"
            )
    pieces = original_key_map(weights, prefix, family.keys, family.norms)
    shapes = {name: weights.shape_of(rows) for name, rows in pieces.items() if rows[0].source in weights}
    try:
        return prefix, family.arguments(shapes)
    except KeyError as error:
        raise UserError(f"{weights.path}: tensor {error} is missing; the file is incomplete or another model") from None


def _recognised(weights: WeightFiles) -> tuple[str, Architecture]:
    prefix = COMFY_PREFIX if any(name.startswith(COMFY_PREFIX) for name in weights.names) else ""
    return prefix, recognise({name.removeprefix(prefix) for name in weights.names})


def transformer_of(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the ``model_type`` and the transformer's arguments of a pipeline's folder or a transformer file.

    Of a family's variants, which headers do not always tell apart, it is the first.
    """
    families, arguments, what = family_files(), dict[str, Any](), "of no known layout"
    if path.is_dir():
        arguments = read_config(path / "transformer")
        what = f"a {arguments.get('_class_name')}"
        found = next((one for one in families if one.transformer == arguments.get("_class_name")), None)
    else:
        weights = WeightFiles(path)
        _, architecture = _recognised(weights)
        found = next((one for one in families if one.model_type == architecture.model_type), None)
        if found is not None:
            _, arguments = file_arguments(weights, found)
    if found is None:
        titles = ", ".join(one.title for one in families)
        raise UserError(f"{path}: {what}, no family of this version; give one of {titles}")
    return found.model_type, arguments


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


def family_files() -> list[FamilyFiles]:
    """Return every family's row."""
    return [module.FILES for module in family_modules()]
