"""The tensors of a model's files by name, before their formats are known, and formats that are known and not read.

Each of those is refused by name, with the file to use instead. Tensors' names tell which it is:

    SVDQuant (Nunchaku)    ``qweight`` int8 with ``wscales``, ``smooth_factor``, ``proj_down``, ``proj_up``; modulations
                           ``qweight`` int32 with ``wscales``, ``wzeros``; older files ``lora_down``, ``smooth``
    GPTQ, AWQ              ``qweight`` int32 with ``qzeros``, ``scales``, GPTQ's also ``g_idx``
    compressed-tensors     ``weight_packed`` with ``weight_shape``, ``weight_scale``
    Quanto                 ``weight._data``, ``weight._scale``
    torchao                ``_weight_qdata`` (in names from its ``tensor_names`` in the header), ``_weight_scale``
    bitsandbytes' int8     ``weight`` int8 with ``SCB``, ``weight_format``
    SDNQ                   ``weight`` with ``scale``, ``zero_point``, ``svd_up``, ``svd_down``
    HQQ                    ``W_q`` with ``meta``
    ComfyUI's 4 bits       a ``comfy_quant`` whose format is ``convrot_w4a4``, ``asym_w4a8_int8`` or ``awq_w4a16``

and in folders of diffusers and transformers by ``quant_method`` in ``config.json``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library.config.model_layouts import MODEL_PREFIXES
from library.errors import UserError
from library.files import read_json, read_toml
from library.safetensors_io import RowRange, TensorEntry, read_rows

COMFY_PREFIX = MODEL_PREFIXES[0]
# What may stand before a transformer's names, in the order in which it is tried: ComfyUI's in all-in-one files and
# alone, nothing, trainers' that save a whole pipeline or a wrapped model.

_OTHER_FILE = "use the bf16 model, or its fp8, int8, GGUF or bitsandbytes nf4 file"
_NUNCHAKU = "train on the bf16 file of the same model: Nunchaku puts a LoRA beside its weights, where it is not rounded"
_COMFY = "use the int8_convrot, nvfp4, GGUF or bf16 file of the same model"
_COMFY_FORMATS = ("convrot_w4a4", "asym_w4a8_int8", "awq_w4a16")
_UNDERFLOWN = 1 / 16  # of a weight's blocks
_SAMPLED, _BY_CHANCE = 256, -16.0  # rows that are looked at; logarithm of the chance that all reach the largest number
_RUNS = (128, 64)  # inputs that share a scale in fp8 files
_UNREAD = read_toml(Path(__file__).with_name("unread.toml"))[0]


@dataclass(frozen=True)
class FileTensors:
    """The tensors of a model's files by name, and their strings.

    What would be damage is asked with ``any``: a dry run reads tensors without numbers, of which none is true.
    """

    path: Path
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]

    def dtype(self, name: str) -> str | None:
        """Return the dtype of tensor ``name`` as the file calls it; None if there is no such tensor."""
        entry = self.entries.get(name)
        return entry.dtype if entry is not None else None

    def read(self, name: str, rows: slice = slice(None), byte_shape: tuple[int, ...] | None = None) -> Tensor:
        """Return some rows of tensor ``name``; with ``byte_shape`` as bytes of that shape, whatever the file says."""
        entry = self.entries[name]
        if byte_shape is not None:
            entry = replace(entry, dtype="U8", shape=byte_shape)
        return read_rows({name: entry}, [RowRange(name, rows.start or 0, rows.stop)])

    def read_scale(self, name: str, zeros: bool = False) -> Tensor:
        """Return tensor ``name`` in fp32, a scale: positive and finite; ``zeros``: 0 may be among it."""
        scale = self.read(name).float()
        if not (torch.isfinite(scale) & ((scale >= 0) if zeros else (scale > 0))).all():
            raise self.damaged(name, "holds a scale that is not positive and finite")
        return scale

    def used_scale(self, name: str, scale: Tensor, used: Callable[[], Tensor], most: float = _UNDERFLOWN) -> Tensor:
        """Return ``scale``, of tensor ``name``, with 1 for its zeros, which only groups of zeros have.

        Args:
            used: returns, in the shape of ``scale``, whether a group holds a number that is not zero.
            most: share of the scales that may be zero all the same: a quantiser whose scales underflow leaves a few,
                and every reader takes their blocks for zeros.
        """
        zero = scale == 0
        if zero.any() and (zero & used()).float().mean() > most:
            raise self.damaged(name, "holds a scale that is not positive and finite, of numbers that are not zero")
        return scale.masked_fill(zero, 1)

    def refuse_shared(self, name: str, magnitudes: Tensor, largest: float, run: int, rows: bool) -> None:
        """Raise a UserError if the scale ``name`` is one of several that its weight was made with.

        The largest number of a group is the format's: if all rows or runs reach it with few numbers, each of them had
        its own scale.

        Args:
            magnitudes: [n, in] of the numbers of some rows (:func:`sampled`). largest: of the format.
            run: inputs that share a scale. rows: whether each row has its own.
        """
        outputs, inputs = magnitudes.shape
        for size in (inputs, *_RUNS):
            if inputs % size or size > run or (size == run and rows):
                continue
            groups = magnitudes.reshape(outputs * inputs // size, size)
            empty, full = (groups == 0).all(-1), groups == largest
            share = full.sum() / (~empty).sum()
            chance = -torch.expm1(-share)  # that a group has any, were they spread at random
            if ((full.any(-1) | empty).all() & ((~empty).sum() * chance.log() < _BY_CHANCE)).any():
                what = f"each run of {size} inputs" if size < inputs else "each row"
                raise self.damaged(name, f"is too few scales: {what} of its weight reaches the largest number")

    def damaged(self, name: str, why: str) -> UserError:
        """Return the error for tensor ``name`` of a file that was not meant so."""
        return self.refuse(name, why, "download or convert it again")

    def refuse(
        self, name: str, why: str, remedy: str = "use the bf16 file, or one of a format that is read"
    ) -> UserError:
        """Return the error for tensor ``name``, of the file that holds it or its layer's weight."""
        entry = self.entries.get(name) or self.entries.get(f"{name.rpartition('.')[0]}.weight")
        return UserError(f"{entry.file if entry else self.path}: {name!r} {why}; {remedy}")

    @cached_property
    def layer_configs(self) -> dict[str, dict[str, Any]]:
        """Layer -> what ComfyUI's ``comfy_quant`` says of it, from its marker or from the header."""
        configs: dict[str, dict[str, Any]] = {}
        if "_quantization_metadata" in self.metadata:
            try:
                layers = json.loads(self.metadata["_quantization_metadata"])["layers"]
                configs |= {self.full_name(layer): dict(config) for layer, config in layers.items()}
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise self.damaged("_quantization_metadata", "is not the JSON object ComfyUI writes") from None
        for name in (name for name in self.entries if name.rpartition(".")[2] == "comfy_quant"):
            try:
                configs[name.rpartition(".")[0]] = dict(json.loads(bytes(self.read(name).tolist())))
            except (ValueError, TypeError, RecursionError):
                raise self.damaged(name, "is not the JSON object ComfyUI writes") from None
        for layer, config in configs.items():
            if not isinstance(kind := config.get("format"), str | None):
                raise self.refuse(f"{layer}.comfy_quant", f"names the format {kind!r}, which is not read")
        return configs

    def full_name(self, layer: str) -> str:
        """Return ``layer`` with the file's prefix, which some writers leave out of the header."""
        for prefix in MODEL_PREFIXES:
            if f"{prefix}{layer}.weight" in self.entries:
                return prefix + layer
        return layer


def sampled(values: Tensor) -> Tensor:
    """Return some rows of ``values`` [out, in], from everywhere."""
    return values[:: max(1, len(values) // _SAMPLED)]


def quantization_method(path: Path) -> str:
    """Return ``quant_method`` of the ``config.json`` in or beside ``path``, lower case; "" if nothing says it."""
    config = (path if path.is_dir() else path.parent) / "config.json"
    said = read_json(config) if config.is_file() else {}
    try:
        return str(said["quantization_config"]["quant_method"]).lower()
    except (LookupError, TypeError):
        return ""


def refuse_unread(file: FileTensors) -> None:
    """Raise a UserError if ``file`` is of a format that is known and not read."""
    for layer, config in file.layer_configs.items():
        if config.get("format") in _COMFY_FORMATS:
            raise file.refuse(f"{layer}.comfy_quant", f"is ComfyUI's {config['format']}, which is not read", _COMFY)
    for leaf, title in _UNREAD["tensors"].items():
        pattern, remedy = re.compile(rf".*\.({leaf})"), _NUNCHAKU if "Nunchaku" in title else _OTHER_FILE
        if name := next(filter(pattern.fullmatch, file.entries), None):
            raise file.refuse(name, f"belongs to {title}, which is not read", remedy)
    if "tensor_names" in file.metadata:
        raise file.refuse("tensor_names", "in the header is that of a torchao model, which is not read", _OTHER_FILE)
    if file.path.is_dir() and (known := _UNREAD["methods"].get(quantization_method(file.path))):
        raise file.refuse("config.json", f"says {known}, which is not read", _OTHER_FILE)
