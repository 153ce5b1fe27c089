"""A high-precision checkpoint in, a quantised file out, in one of the layouts of ``library.precision.files``.

Names stay as they are: a BFL or ComfyUI file gives a file for ComfyUI, a diffusers transformer one for diffusers. Only
matrices of linear layers are quantised; the recipe says which and how. Each is read, rounded and written before the
next.

ComfyUI files are marked so that products are made in high precision on dequantised weights (``scaled_fp8`` of two
elements; ``full_precision_matrix_mult``), because that is what training saw. ComfyUI otherwise also rounds activations
on GPUs that multiply the format; ``low_precision_products`` leaves the mark out. Values are made for the scales as they
are stored and as readers cast them, so nothing is lost between the two.

A merge writes through here too: it changes weights as they are read, brings weights that it has rounded itself, and may
start from a file that is quantised already. What it leaves alone in such a file, markers and scales of activations
included, stays bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from library.errors import UserError, counted
from library.precision.checkpoint import QuantizedFile, WeightFiles
from library.precision.files.base import HIGH_PRODUCTS, QuantizedWeight, StoredWeight
from library.precision.files.file_tensors import COMFY_PREFIX, MODEL_PREFIXES
from library.precision.fp8_numbers import E4M3FN
from library.precision.names import GRANULARITIES, LayoutKind
from library.precision.recipe import Recipe
from library.safetensors_io import DTYPES, read_tensor, stream_safetensors, tensor_bytes

_HIGH = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Written:
    """What was written: linear weights that are quantised, those that the recipe excludes, bytes in and out.

    ``products``: how ComfyUI is to multiply, of a file of which nothing else was changed.
    """

    path: Path
    quantized: int
    excluded: int
    bytes_before: int
    bytes_after: int
    products: str = ""

    def describe(self) -> str:
        """Return the outcome as a line."""
        if self.products:
            return f"{self.path}: asks ComfyUI for products in {self.products}; nothing else is changed"
        in_mib = f"{self.bytes_before / 2**20:.1f} -> {self.bytes_after / 2**20:.1f} MiB"
        return f"{self.path}: {counted(self.quantized, 'weight')} quantised, {self.excluded} excluded; {in_mib}"


_Planned = tuple[torch.dtype, tuple[int, ...], Callable[[], Tensor]]  # a tensor to be written, and how it is made
Progress = Callable[[int, int], None]  # called with tensors done, tensors in all


class WeightChanges(Protocol):
    """What a merge does to the weights while they are written.

    Attributes:
        metadata: strings that it adds to the source's.
    """

    metadata: dict[str, str]

    def rounded(self, name: str) -> QuantizedWeight | None:
        """Return the weight ``name`` as it is to be; None for what the source holds, rounded by the recipe."""

    def high(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        """Return the tensor ``name``, which is not quantised, in its own dtype; ``read`` gives the source's."""


def write_quantized(
    weights: WeightFiles,
    target: str | Path,
    layout: LayoutKind,
    recipe: Recipe,
    *,
    low_precision_products: bool | None = None,
    progress: Progress | None = None,
    merge: WeightChanges | None = None,
) -> Written:
    """Write the model ``weights`` to ``target`` with its linear weights quantised.

    Args:
        weights: the source.
        target: a ``.safetensors`` path.
        layout, recipe: of a source in high precision: how it becomes quantised. One that is so already stays as it is.
        low_precision_products: let ComfyUI multiply in the format; None: as is usual for it. All that is changed of a
            source that is quantised already and not merged into.
        progress: called with (weights done, weights in all).
        merge: what changes on the way; a quantised source is taken only with it.

    Raises:
        UserError: the layout cannot hold what the recipe asks for, or the source is quantised and nothing changes it.
    """
    source = weights.quantized
    if source is not None and merge is None and low_precision_products is None:
        raise UserError(f"{weights.path}: is quantised already; quantise the bf16 or fp16 file of the model")
    for name, entry in weights.entries.items():
        if entry.dtype not in DTYPES:
            raise UserError(f"{weights.path}: tensor {name!r} has dtype {entry.dtype}; give a bf16 or fp16 file")
    if source is not None and merge is None and low_precision_products is not None:
        return _write_products(source, target, low_precision_products, progress)
    if low_precision_products is None:
        # fp8 is multiplied in high precision, as training saw it; int8 and nvfp4 are chosen for their products, and no
        # published file in them asks for others
        low_precision_products = recipe.scheme.name not in GRANULARITIES
    specs = {name: entry.spec for name, entry in weights.entries.items()}
    linears = linear_weights(weights)
    stored = _stored(weights, linears, layout, recipe)
    plan: dict[str, _Planned] = {}
    for name, (dtype, shape) in specs.items():
        read = partial(read_tensor, weights.entries, name)
        if name not in stored:
            plan[name] = dtype, shape, read if merge is None else partial(merge.high, name, read)
        elif source is None:
            plan |= _tensors(stored[name], partial(_rounded, name, read, recipe, stored[name], merge))
            if layout == "comfy_quant":
                config = _asking(stored[name].comfy_config(), low_precision_products)
                plan[f"{name.removesuffix('.weight')}.comfy_quant"] = _made(_json_tensor(config))
        else:
            assert merge is not None
            plan |= _tensors(stored[name], partial(merge.rounded, name), weights)
    if source is not None:
        for name in source.bookkeeping - plan.keys():
            plan[name] = *source.file.entries[name].spec, partial(source.file.read, name)
    elif layout == "comfy_scaled":
        prefix = next(each for each in MODEL_PREFIXES if any(name.startswith(each) for name in specs))
        plan[f"{prefix}scaled_fp8"] = _made(_asking_marker(E4M3FN.dtype, low_precision_products))
    strings = dict(weights.metadata) | ({"quantised": recipe.describe()} if source is None else {})
    before, after = sum(tensor_bytes(*spec) for spec in specs.values()), _planned_bytes(plan)
    _stream(target, plan, strings | ({} if merge is None else merge.metadata), progress)
    return Written(Path(target), len(stored), len(linears) - len(stored), before, after)


def _write_products(
    source: QuantizedFile, target: str | Path, low_precision_products: bool, progress: Progress | None
) -> Written:
    """Write the file ``source`` as it is, but for what it asks of ComfyUI's products."""
    markers, strings = _changed_markers(source, low_precision_products)
    plan: dict[str, _Planned] = {
        name: (*entry.spec, partial(source.file.read, name)) for name, entry in source.file.entries.items()
    }
    plan |= {name: _made(marker) for name, marker in markers.items()}
    _stream(target, plan, dict(source.file.metadata) | strings, progress)
    products, size = "the format" if low_precision_products else "high precision", _planned_bytes(plan)
    return Written(Path(target), len(source.weights), 0, size, size, products)


def _stream(
    target: str | Path, plan: Mapping[str, _Planned], strings: Mapping[str, str], progress: Progress | None
) -> None:
    """Make and write the tensors of ``plan``, one at a time."""
    count = iter(range(1, len(plan) + 1))

    def make(name: str) -> Tensor:
        if progress is not None:
            progress(next(count), len(plan))
        return plan[name][2]()

    stream_safetensors(target, {name: (dtype, shape) for name, (dtype, shape, _) in plan.items()}, make, strings)


def _planned_bytes(plan: Mapping[str, _Planned]) -> int:
    return sum(tensor_bytes(dtype, shape) for dtype, shape, _ in plan.values())


def _stored(
    weights: WeightFiles, linears: Sequence[str], layout: LayoutKind, recipe: Recipe
) -> dict[str, StoredWeight]:
    """Return which linear weights are quantised and how they lie in the file: as the recipe says, or as they do."""
    chosen: dict[str, StoredWeight] = {}
    if (source := weights.quantized) is not None:
        chosen = {name: source.weights[name] for layer in linears if (name := f"{layer}.weight") in source.weights}
    else:
        recipe.check_patterns(linears)
        for layer in linears:
            name = f"{layer}.weight"
            dtype, shape = weights.entries[name].spec
            if recipe.scheme_of(layer, shape) is not None:  # the layout is asked for the scheme, not for what fits
                chosen[name] = recipe.scheme.store(layout, name, shape, dtype)
    if not chosen:
        raise UserError(
            f"{weights.path}: no linear weight is left to quantise; keep fewer layers high, or give a model file"
        )
    return chosen


def linear_weights(weights: WeightFiles) -> list[str]:
    """Return the linear layers of ``weights``, by name; of an all-in-one file the transformer's alone."""
    all_in_one = any(name.startswith(COMFY_PREFIX) for name in weights.entries)
    quantized = weights.quantized.weights if weights.quantized is not None else {}
    tables = Recipe(exclude=())

    def is_linear(name: str) -> bool:
        inside = not all_in_one or name.startswith(COMFY_PREFIX)
        if not inside or not name.endswith(".weight") or len(weights.shape(name)) != 2:
            return False
        known = name in quantized or DTYPES.get(weights.entries[name].dtype) in _HIGH
        return known and tables.excluded_as(name.removesuffix(".weight")) is None

    return [name.removesuffix(".weight") for name in weights.entries if is_linear(name)]


def _rounded(
    name: str, read: Callable[[], Tensor], recipe: Recipe, stored: StoredWeight, merge: WeightChanges | None
) -> QuantizedWeight:
    """Return the weight ``name`` quantised: as the merge has rounded it, else by the recipe."""
    made = None if merge is None else merge.rounded(name)
    return made or recipe.quantize(name.removesuffix(".weight"), read(), stored.scheme)


def _tensors(
    stored: StoredWeight, made: Callable[[], QuantizedWeight | None], source: WeightFiles | None = None
) -> dict[str, _Planned]:
    """Return the tensors that stand for a weight; where nothing is ``made`` they are those of ``source``.

    A file holds wide dtypes first, so all scales come before any values. Each is made from the weight anew, which
    reads the source several times and keeps nothing.
    """

    def tensor(name: str) -> Tensor:
        if (weight := made()) is not None:
            return stored.written(weight)[name].contiguous()
        assert source is not None
        assert source.quantized is not None
        return source.quantized.file.read(name)

    return {name: (dtype, shape, partial(tensor, name)) for name, (dtype, shape) in stored.specs().items()}


def _made(marker: Tensor) -> _Planned:
    return marker.dtype, tuple(marker.shape), lambda: marker


def _asking(config: Mapping[str, Any], low_precision_products: bool) -> dict[str, Any]:
    """Return ComfyUI's word about a layer with what it asks of products changed."""
    kept = {key: value for key, value in config.items() if key != HIGH_PRODUCTS}
    return kept if low_precision_products else kept | {HIGH_PRODUCTS: True}


def _json_tensor(config: Mapping[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)


def _asking_marker(dtype: torch.dtype, low_precision_products: bool) -> Tensor:
    """Return ComfyUI's older marker of a file, whose number of elements says what it asks of products."""
    return torch.zeros(0 if low_precision_products else 2, dtype=dtype)


def _changed_markers(source: QuantizedFile, low_precision_products: bool) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the markers, and strings of the header, of the file ``source`` that ask ComfyUI for other products.

    Raises:
        UserError: ComfyUI would follow none of them.
    """
    followed = [name for name, stored in source.weights.items() if stored.follows_products]
    if not followed:
        raise UserError(
            f"{source.path}: {source.formats}: ComfyUI multiplies such weights in one way, whatever the file says; "
            "products can be chosen for its scaled fp8, nvfp4 and mxfp8 files"
        )
    entries, configs, strings = source.file.entries, source.file.layer_configs, {}
    markers, changed = dict[str, Tensor](), dict[str, dict[str, Any]]()
    for name, entry in entries.items():
        if name.rpartition(".")[2] == "scaled_fp8":
            markers[name] = _asking_marker(DTYPES[entry.dtype], low_precision_products)
    for layer in (name.removesuffix(".weight") for name in followed):
        if layer in configs:
            changed[layer] = _asking(configs[layer], low_precision_products)
            if f"{layer}.comfy_quant" in entries:
                markers[f"{layer}.comfy_quant"] = _json_tensor(changed[layer])
    if (text := source.file.metadata.get("_quantization_metadata")) is not None:
        header = json.loads(text)
        full_names = {layer: source.file.full_name(layer) for layer in header["layers"]}
        header["layers"] |= {layer: changed[full] for layer, full in full_names.items() if full in changed}
        strings["_quantization_metadata"] = json.dumps(header)
    return markers, strings
