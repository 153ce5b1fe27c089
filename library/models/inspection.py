"""What a model on disk consists of, from its headers: no weight is read, so size makes no difference.

A path becomes *weight sets* (a file, the shards of one model, each part of a pipeline), a set *components* (ComfyUI's
all-in-one files hold several, recognised by prefixes), which rows of ``Architecture``, in each family's ``names.toml``,
name. Quantised checkpoints have tensors beside the weights (scales, markers, codebooks); they count as bytes, not as
parameters. Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from library.checksums import shards_of
from library.config.model_layouts import pipeline_index, recognise_below, snapshot_of
from library.errors import UserError, printable
from library.files import broken_link
from library.precision.checkpoint import quantized_file
from library.precision.files.file_tensors import FileTensors
from library.safetensors_io import TensorEntry, find_index, read_entries, weight_files

_PREFIXES = re.compile(
    r"(model\.diffusion_model\.|diffusion_model\.|vae\.|first_stage_model\.|cond_stage_model\."
    r"|text_encoders\.[^.]+\.(?:transformer\.)?|conditioner\.embedders\.\d+\.)"
)
_BLOCK = re.compile(r"^(.*?)\.(\d+)\.(.+)$")  # names before the first number that has something below it
# Leaves that belong to a quantisation: ComfyUI's and musubi-tuner's scales and markers, bitsandbytes' tables.
_BOOKKEEPING = re.compile(
    r"(.*\.)?(scale_weight|weight_scale|weight_scale_2|scale_input|input_scale|scaled_fp8|comfy_quant|SCB)"
    r"|(.*\.weight\.)?(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*)"
)


@dataclass(frozen=True)
class Component:
    """One network.

    Attributes:
        name: its folder or prefix; "" for the only one of a file.
        architecture: its name, or "unknown architecture".
        facts: sizes worth telling.
        blocks: part -> number of blocks.
        tensors: in the file. parameters: without scales and markers. bytes: all.
        dtypes: safetensors' names -> parameters.
    """

    name: str
    architecture: str
    facts: Mapping[str, int | bool]
    blocks: Mapping[str, int]
    tensors: int
    parameters: int
    bytes: int
    dtypes: Mapping[str, int]


@dataclass(frozen=True)
class WeightSet:
    """A file, or the shards of one model, with the headers' contents.

    Attributes:
        name: the pipeline's part, "" otherwise.
        files: in order. bytes: on disk.
        tensors: by name. metadata: the files' strings.
        notes: what is wrong with the files.
    """

    name: str
    files: tuple[Path, ...]
    bytes: int
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    notes: tuple[str, ...]


def weight_sets(path: Path) -> list[WeightSet]:
    """Read the headers behind ``path``: a file, a model's folder, a pipeline's, or a folder of files."""
    path = snapshot_of(path)
    if path.is_file():
        whole = all(file.is_file() for file in shards_of(path))
        return [_read(("", weight_files(path) if whole else [path]))]
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder{broken_link(path)}; check the path")
    parts = sorted({file.parent for file in path.glob("*/*.safetensors")})
    if pipeline_index(path) is not None and parts:
        return [_read((part.name, files)) for part in parts for _, files in _sets_in(part)]
    if found := _sets_in(path):
        return [_read(one) for one in found]
    raise UserError(f"{path}: no .safetensors or .gguf weights in this folder; give a model's folder or file")


def _sets_in(folder: Path) -> list[tuple[str, list[Path]]]:
    """Return (name, files) of the models in one folder: shards together, files without an index one by one."""
    files = sorted(file for ending in ("safetensors", "gguf") for file in folder.glob(f"*.{ending}"))
    if find_index(folder):
        return [("", weight_files(folder))]
    return [(file.name if len(files) > 1 else "", [file]) for file in files]


def _read(named: tuple[str, Sequence[Path]]) -> WeightSet:
    name, files = named
    tensors: dict[str, TensorEntry] = {}
    metadata: dict[str, str] = {}
    notes: list[str] = []
    for file in files:
        entries, strings = read_entries([file], may_be_cut=True)
        tensors, metadata = tensors | entries, metadata | strings
        missing = max((each.offset + each.bytes for each in entries.values()), default=0) - file.stat().st_size
        if missing > 0:
            notes.append(f"{file}: {missing:,} bytes are missing at its end; download it again")
    if not notes:
        tensors = _unpacked(files[0], tensors, metadata)
    return WeightSet(name, tuple(files), sum(f.stat().st_size for f in files), tensors, metadata, tuple(notes))


def _unpacked(path: Path, tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> dict[str, TensorEntry]:
    """Return ``tensors`` with weights that are packed several numbers a byte as the matrices that they are."""
    try:
        found = quantized_file(FileTensors(path, tensors, metadata))
    except UserError:  # a quantisation that is not read is still shown
        found = None
    packed = {name: one for name, one in (found.weights if found else {}).items() if one.shape != tensors[name].shape}
    return dict(tensors) | {
        name: replace(tensors[name], shape=one.shape, dtype=one.scheme.name) for name, one in packed.items()
    }


def components(weights: WeightSet) -> list[Component]:
    """Return the networks in a weight set."""
    split: dict[str, dict[str, TensorEntry]] = {}
    for name, tensor in weights.tensors.items():
        match = _PREFIXES.match(name)
        prefix = match[0] if match else ""
        split.setdefault(prefix, {})[name.removeprefix(prefix)] = tensor
    if len(split) > 1 and all(_BOOKKEEPING.fullmatch(name) for name in split.get("", ())):
        marks = split.pop("", {})  # a marker for the whole file beside prefixed weights
        split[next(iter(split))] |= marks
    return [_component(prefix.rstrip(".") or weights.name, tensors) for prefix, tensors in split.items()]


def _component(name: str, tensors: Mapping[str, TensorEntry]) -> Component:
    prefix, architecture = recognise_below(tensors)
    tensors = {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}
    counted = {key: tensor for key, tensor in tensors.items() if not _BOOKKEEPING.fullmatch(key)}
    dtypes: Counter[str] = Counter()
    for tensor in counted.values():
        dtypes[tensor.dtype] += tensor.numbers
    blocks: dict[str, set[str]] = {}
    for key in counted:
        if match := _BLOCK.match(key.rpartition(".")[0]):
            blocks.setdefault(printable(match[1]), set()).add(match[2])
    return Component(
        name=name,
        architecture=architecture.name,
        facts={
            label: key in tensors if axis is None else tensors[key].shape[axis]
            for label, key, axis in architecture.facts
            if axis is None or key in tensors
        },
        blocks={part: len(numbers) for part, numbers in blocks.items()},
        tensors=len(tensors),
        parameters=sum(tensor.numbers for tensor in counted.values()),
        bytes=sum(tensor.bytes for tensor in tensors.values()),
        dtypes=dict(dtypes.most_common()),
    )
