"""Where the parts of a FLUX.1 model lie: ``[model]`` options in, checked paths out, no weights read.

Three ways of keeping a model are understood:

- a diffusers folder with everything in it (``model_index.json``, ``transformer/``, ``vae/``, ...);
- BFL's single file (``flux1-dev.safetensors``) with ``ae``, ``clip_l`` and ``t5xxl`` beside it;
- ComfyUI's split files, the same with or without ``model.diffusion_model.`` before each name. A file that
  also holds the other parts is read for its transformer; the others still come from ``ae``, ``clip_l`` and
  ``t5xxl``.

With a folder ``ae``, ``clip_l`` and ``t5xxl`` replace the folder's own parts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.config.schema import ModelConfig
from library.errors import UserError
from library.models import flux_layout
from library.models.text_encoders import check_t5, clip_positions
from library.models.vae import vae_config
from library.models.weights import KeyMap, WeightFiles, identity_map, read_config


@dataclass(frozen=True)
class FluxFiles:
    """Checked locations. ``transformer_config`` holds the arguments of ``FluxTransformer2DModel``."""

    transformer: Path
    transformer_config: dict[str, Any]
    transformer_prefix: str | None  # of a BFL-layout file; None for diffusers' layout
    vae: Path
    clip: Path
    t5: Path
    clip_tokenizer: str | Path
    t5_tokenizer: str | Path
    scheduler: Path | None

    def key_map(self, weights: WeightFiles) -> KeyMap:
        """Return where each transformer parameter lies in ``weights``."""
        if self.transformer_prefix is None:
            return identity_map(weights.names)
        return flux_layout.bfl_key_map(weights, self.transformer_prefix, self.transformer_config)


def locate(config: ModelConfig) -> FluxFiles:
    """Find and check every part of the model.

    Raises:
        UserError: a part is missing, unreadable, quantised with scales, of another architecture, or the transformer is
            of another variant than ``model_type`` says.
    """
    root = Path(config.pretrained_model_name_or_path).expanduser()
    if root.is_dir():
        files = _locate_in_folder(root, config)
    elif root.is_file():
        files = _locate_single_file(root, config)
    else:
        raise UserError(
            f"pretrained_model_name_or_path {str(root)!r} does not exist; give a local diffusers folder or a "
            ".safetensors file"
        )
    flux_layout.check_inputs(files.transformer, {"in_channels": 64} | files.transformer_config, config.model_type)
    vae_config(files.vae)
    clip_positions(files.clip)
    check_t5(files.t5)
    return files


def _locate_in_folder(root: Path, config: ModelConfig) -> FluxFiles:
    index = root / "model_index.json"
    if not index.is_file():
        raise UserError(f"{root}: no model_index.json, so no diffusers pipeline; give the folder that holds it")
    try:
        pipeline = json.loads(index.read_text(encoding="utf-8")).get("_class_name", "")
    except ValueError as error:
        raise UserError(f"{index}: not valid JSON ({error}); download it again") from error
    if not (root / "transformer").is_dir():
        raise UserError(f"{root}: a {pipeline or 'pipeline'} without a transformer folder; give a FLUX.1 folder")
    transformer_config = read_config(root / "transformer")
    kind = transformer_config.get("_class_name")
    if kind != "FluxTransformer2DModel":
        remedy = 'set model_type = "qwen_image"' if str(kind).startswith("Qwen") else "give a FLUX.1 folder"
        raise UserError(f"{root / 'transformer'}: {kind!r}, not FluxTransformer2DModel; {remedy}")
    own_clip, own_t5 = config.clip_l is None, config.t5xxl is None
    return FluxFiles(
        transformer=root / "transformer",
        transformer_config=transformer_config,
        transformer_prefix=None,
        vae=_vae_path(config.ae) if config.ae else root / "vae",
        clip=root / "text_encoder" if own_clip else _part(config.clip_l, "clip_l", "text_encoder"),
        t5=root / "text_encoder_2" if own_t5 else _part(config.t5xxl, "t5xxl", "text_encoder_2"),
        # The folder's tokenizers fit CLIP-L and T5-XXL wherever their weights come from.
        clip_tokenizer=_own_tokenizer(root / "tokenizer", config.clip_l_tokenizer),
        t5_tokenizer=_own_tokenizer(root / "tokenizer_2", config.t5xxl_tokenizer),
        scheduler=root / "scheduler" if (root / "scheduler" / "scheduler_config.json").is_file() else None,
    )


def _locate_single_file(root: Path, config: ModelConfig) -> FluxFiles:
    weights = WeightFiles(root)
    flux_layout.refuse_other_architectures(weights)
    prefix = flux_layout.bfl_prefix(weights)
    if prefix is None:
        transformer_config = flux_layout.diffusers_config(weights)
    else:
        transformer_config = flux_layout.bfl_config(weights, prefix)
    return FluxFiles(
        transformer=root,
        transformer_config=transformer_config,
        transformer_prefix=prefix,
        vae=_vae_path(_needed(config.ae, "ae", "ae.safetensors", root)),
        clip=_part(_needed(config.clip_l, "clip_l", "clip_l.safetensors", root), "clip_l", "text_encoder"),
        t5=_part(_needed(config.t5xxl, "t5xxl", "t5xxl_fp16.safetensors", root), "t5xxl", "text_encoder_2"),
        clip_tokenizer=config.clip_l_tokenizer,
        t5_tokenizer=config.t5xxl_tokenizer,
        scheduler=None,
    )


def _needed(value: str | None, option: str, published: str, root: Path) -> str:
    if not value:
        raise UserError(f"{root}: a transformer file needs {option} beside it; set {option} to {published}")
    return value


def _part(value: str | None, option: str, subfolder: str) -> Path:
    """Return the file or model folder that ``option`` names; a pipeline's folder stands for its part."""
    path = Path(value or "").expanduser()
    if not path.exists():
        raise UserError(f"{option} {str(path)!r} does not exist; give a .safetensors file or a model folder")
    return path / subfolder if (path / subfolder).is_dir() else path


def _vae_path(value: str) -> Path:
    return _part(value, "ae", "vae")


def _own_tokenizer(folder: Path, otherwise: str) -> str | Path:
    return folder if folder.is_dir() else otherwise
