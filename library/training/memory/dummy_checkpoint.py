"""Models and datasets of the right shape with nothing in them: what is counted where the real ones are not there yet.

A model's files are headers with holes behind them (sparse files: names, dtypes, shapes, and no disk space), a
diffusers folder of the sizes that were published. Walks on fake tensors (``trace``) read no more than that.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from library.config.model_types import MODEL_TYPES, ConditionKind
from library.config.schema import ModelConfig, TrainConfig
from library.models.family_by_name import family_class
from library.models.weights import statistics
from library.safetensors_io import DTYPE_NAMES, TensorSpecs

_CAPTION = "a " * 256  # with a byte a token as long as what the published pipelines take, 512 tokens


def with_dummies(config: TrainConfig, folder: Path) -> tuple[TrainConfig, list[str]]:
    """Return ``config`` with what is missing of its model and dataset replaced, and a sentence for each."""
    notes, changes = list[str](), dict[str, Any]()
    model = _complete(config.model, folder / "model", notes)
    if model is not config.model:
        changes["model"] = model
    if missing := [path for path in config.network.base_weights if not Path(path).expanduser().exists()]:
        left = [path for path in config.network.base_weights if path not in missing]
        changes["network"] = config.network.model_copy(update={"base_weights": left, "base_weights_multiplier": []})
        notes.append(f"{missing[0]} is not there: merged as the base is loaded, it takes no memory of its own")
    if not Path(config.dataset.dataset_config).expanduser().exists():
        conditioning = family_class(config.model.model_type).conditioning
        pairs = config.pairs.train_on != "images" and not config.pairs.slider_prompts
        toml = write_dataset(folder / "dataset", conditioning, pairs=pairs)
        changes["dataset"] = config.dataset.model_copy(update={"dataset_config": str(toml)})
        notes.append(f"{config.dataset.dataset_config} is not there: one image of 1024 x 1024, 512 text tokens")
    return config.model_copy(update=changes), notes


def _complete(model: ModelConfig, folder: Path, notes: list[str]) -> ModelConfig:
    layout, root = family_class(model.model_type).layout, Path(model.pretrained_model_name_or_path).expanduser()
    parts = (layout.vae, *layout.text_encoders)
    if root.is_dir():
        return model
    write_model(model.model_type, folder, name=root.name)
    tokenizers = {part.option: str(folder / part.folder) for part in layout.tokenizers}
    if not root.exists():
        notes.append(f"{root} is not there: {layout.title} at its published size")
        nothing = {part.option: None for part in parts}
        return model.model_copy(update={"pretrained_model_name_or_path": str(folder), **nothing})
    missing = [part for part in parts if not Path(getattr(model, part.option) or "-").expanduser().exists()]
    notes += [f"{part.option} is not there: its published size" for part in missing]
    return model.model_copy(update={part.option: str(folder / part.folder) for part in missing} | tokenizers)


def write_model(model_type: str, folder: Path, most_blocks: int | None = None, name: str = "") -> Path:
    """Write a published model's pipeline folder without weights, of ``most_blocks`` of each kind; return it.

    ``name`` is that of a file, which may tell one of several sizes.
    """
    family: Any = family_class(model_type)
    arguments, builds = family.published_like(name)
    with torch.device("meta"):
        transformer = family.build(arguments, most_blocks)
        parts = {part: build() for part, build in builds.items()}
    transformer.save_config(folder / "transformer")
    write_specs(folder / "transformer" / "diffusion_pytorch_model.safetensors", _specs(transformer))
    for name, part in parts.items():
        if not isinstance(part, nn.Module):  # a tokenizer
            part.save_pretrained(folder / name)
            continue
        file = "diffusion_pytorch_model" if name == "vae" else "model"
        write_specs(folder / name / f"{file}.safetensors", _specs(part))
        settings: Any = part if name == "vae" else part.config
        settings.save_config(folder / name) if name == "vae" else settings.save_pretrained(folder / name)
    index = {"_class_name": MODEL_TYPES[family.name].pipeline}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def _specs(module: nn.Module) -> TensorSpecs:
    tensors = {**dict(module.named_parameters()), **statistics(module)}
    return {name: (torch.bfloat16, tuple(tensor.shape)) for name, tensor in tensors.items()}


def write_specs(path: Path, specs: TensorSpecs, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file of such tensors whose data is a hole."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for name, (dtype, shape) in specs.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def write_dataset(folder: Path, conditioning: ConditionKind = "none", side: int = 1024, pairs: bool = False) -> Path:
    """Write a grey image with a caption, what it is conditioned on, and the other of a pair; return the TOML."""
    given = {"none": "", "fill": 'inpaint_masks = ["rectangles"]', "references": 'control_directory = "images"'}
    paired = 'paired_directory = "others"\n' if pairs else ""
    for name in ("images", "others") if pairs else ("images",):
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (side, side), (0, 127, 127)).save(folder / name / "0.png")
    (folder / "images" / "0.txt").write_text(_CAPTION, encoding="utf-8")
    toml = folder / "dataset.toml"
    toml.write_text(
        f'[general]\ncaption_extension = ".txt"\n[[datasets]]\nresolution = {side}\nbatch_size = 1\n'
        f'[[datasets.subsets]]\nimage_dir = "images"\n{paired}{given[conditioning]}\n',
        encoding="utf-8",
    )
    return toml
