"""Where the parts of an image model lie: ``[model]`` options in, checked paths out, no weights read.

Every family is kept in two ways: a diffusers folder with everything in it, and a transformer file, the publisher's own
or one of ComfyUI's split files, with options that name the other parts. A transformer file needs no sidecar: its
configuration follows from its shapes. Its names may stand below one of ``MODEL_PREFIXES``; what else an all-in-one
file holds is passed over, the other parts still come from their options, and a line says so. A folder may be the
pipeline's, with which these options replace its own parts, or the transformer's alone.

What differs between families is a row, ``FamilyFiles``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.config.kinds import likely_type, refuse_lora
from library.config.model_layouts import UNKNOWN, pipeline_index, pipeline_of, recognise_below, unsupported
from library.config.published_models import find_published
from library.config.schema import ModelConfig
from library.errors import UserError
from library.models.family_files import FamilyFiles, Part, family_files, files_of
from library.models.hub import find_model
from library.models.layer_names import original_key_map
from library.models.weights import read_config
from library.precision.checkpoint import WeightFiles


@dataclass(frozen=True)
class ModelFiles:
    """Checked locations of one model.

    Attributes:
        transformer: a file or a folder; ``prefix`` stands before a file's names.
        transformer_config: arguments of the transformer's class.
        text_encoders, tokenizers: in the family's order; a tokenizer may be a name on the hub.
        processor: folder of settings for reference images, if it is there.
        scheduler: of a diffusers folder.
        index: the file that tells of a diffusers folder's parts.
    """

    transformer: Path
    transformer_config: dict[str, Any]
    prefix: str
    vae: Path
    text_encoders: tuple[Path, ...]
    tokenizers: tuple[str | Path, ...]
    processor: Path
    scheduler: Path | None
    index: Path | None


def locate(config: ModelConfig, family: FamilyFiles) -> ModelFiles:
    """Find every part of the model."""
    given = [part.folder for part in (family.vae, *family.text_encoders) if getattr(config, part.option)]
    root = find_model(config.pretrained_model_name_or_path, "pretrained_model_name_or_path", True, given)
    root = pipeline_of(root) or root
    transformer = _transformer_in(root)
    if root.is_dir():
        prefix, arguments = "", _folder_arguments(root, transformer, family)
    else:
        prefix, arguments = file_arguments(WeightFiles(root), family)
    _refuse_missing(root, config, (family.vae, *family.text_encoders))
    scheduler = root / "scheduler"
    return ModelFiles(
        transformer=transformer,
        transformer_config=arguments,
        prefix=prefix,
        vae=_part(root, config, family.vae),
        text_encoders=tuple(_part(root, config, part) for part in family.text_encoders),
        tokenizers=tuple(_tokenizer(root, config, part) for part in family.tokenizers),
        processor=root / "processor",
        scheduler=scheduler if (scheduler / "scheduler_config.json").is_file() else None,
        index=pipeline_index(root),
    )


def _refuse_missing(root: Path, config: ModelConfig, parts: Sequence[Part]) -> None:
    """Raise a UserError with all ``parts`` that neither an option names nor the model's folder has."""
    missing = [part for part in parts if not getattr(config, part.option) and not (root / part.folder).is_dir()]
    if missing and not pipeline_index(root):
        needs = ", ".join(part.option for part in missing)
        files = ", ".join(f"{part.option} to {part.published}" for part in missing)
        instead = f"; or give {known.hub}, which has all parts" if (known := find_published(str(root))) else ""
        what = "folder" if root.is_dir() else "file"
        raise UserError(f"{root}: a transformer {what} needs {needs} beside it; set {files}{instead}")


def _part(root: Path, config: ModelConfig, part: Part) -> Path:
    """Return the file or model folder that the option names (of a pipeline's folder its part), or the model's own."""
    value = getattr(config, part.option)
    if not value:
        return root / part.folder
    path = find_model(value, part.option, part=part.folder)
    return path / part.folder if (path / part.folder).is_dir() else path


def _tokenizer(root: Path, config: ModelConfig, part: Part) -> str | Path:
    """Return the folder's tokenizer, which fits wherever the encoder's weights come from, else the option's."""
    given = getattr(config, part.option) or part.published
    return next((own for each in (root, Path(given)) if (own := each / part.folder).is_dir()), given)


def pipeline_class(root: Path) -> str:
    """Return the class that a diffusers folder names."""
    if (index := pipeline_index(root)) is None:
        raise UserError(f"{root}: no model_index.json, so no diffusers pipeline; give the folder that holds it")
    return read_config(root, index.name).get("_class_name", "")


def _transformer_in(root: Path) -> Path:
    """Return the folder or file of the transformer: a part of the pipeline ``root``, or that itself."""
    return root / "transformer" if (root / "transformer").is_dir() else root


def _folder_arguments(root: Path, transformer: Path, family: FamilyFiles) -> dict[str, Any]:
    if pipeline_index(root) or not (transformer / "config.json").is_file():
        pipeline = pipeline_class(root) or "pipeline"
        if transformer == root:
            raise UserError(f"{root}: a {pipeline} without a transformer folder; give a {family.title} folder")
    arguments = read_config(transformer)
    kind = arguments.get("_class_name")
    if kind != family.transformer:
        other = next((one for one in family_files() if one.transformer == kind), None)
        remedy = f'set model_type = "{likely_type(str(transformer))}"' if other else f"give a {family.title} folder"
        raise UserError(f"{transformer}: {kind!r}, not {family.transformer}; {remedy}")
    return arguments


def file_arguments(weights: WeightFiles, family: FamilyFiles) -> tuple[str, dict[str, Any]]:
    """Return what stands before the transformer's names in a file, and the arguments of its class."""
    refuse_lora(weights.path, weights.names, f"a {family.title} model")
    if other := unsupported(weights.names):
        raise UserError(f"{weights.path}: a {other} checkpoint, not {family.title}; give a {family.title} transformer")
    prefix, found = recognise_below(weights.names)
    if found.model_type != family.model_type:
        article = "an" if found.name[0] in "aeiouE" else "a"
        what = "of no known layout" if found is UNKNOWN else f"{article} {found.name}"
        remedy = (
            f'set model_type = "{likely_type(str(weights.path))}"'
            if found.model_type
            else f"give a {family.title} transformer"
        )
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


def transformer_arguments(path: Path, model_type: str) -> dict[str, Any]:
    """Return the arguments of the transformer's class, from the settings in a folder or the header of a file."""
    if path.is_dir():
        return read_config(_transformer_in(path))
    return file_arguments(WeightFiles(path), files_of(model_type))[1]
