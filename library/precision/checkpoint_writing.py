"""A high-precision checkpoint in, an fp8 file out, in one of the layouts of ``checkpoint_layouts``.

Names stay as they are: a BFL or ComfyUI file gives a file for ComfyUI, a diffusers transformer one for
diffusers. Only matrices of linear layers become fp8; the recipe says which and how. Each is read, rounded
and written before the next.

ComfyUI files are marked so that products are made in high precision on dequantised weights (``scaled_fp8``
of two elements; ``full_precision_matrix_mult``), because that is what training saw. ComfyUI otherwise also
rounds activations on GPUs that have fp8 products; ``fp8_matmul`` leaves the mark out. Scales are stored in
fp32, musubi-tuner's in the dtype of the weight as it does; values are then made for the scale as stored, so
nothing is lost between the two.

A merge writes through here too: it changes weights as they are read, brings weights that it has rounded itself, and may
start from a file that is in fp8 already. What it leaves alone in such a file keeps its values and scales bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from library.errors import UserError, counted
from library.precision.checkpoint_layouts import WeightFiles
from library.precision.names import Granularity, LayoutKind
from library.precision.quantize import E4M3FN, Quantized, block_size, fitting_granularity
from library.precision.recipe import Fp8Recipe
from library.safetensors_io import DTYPES, read_tensor, stream_safetensors, tensor_bytes

_ALLOWED: dict[LayoutKind, tuple[Granularity, ...]] = {
    "plain": ("cast",),
    "comfy_scaled": ("tensor",),
    "comfy_quant": ("tensor",),
    "musubi": ("block64", "tensor", "row", "block128"),
}
_HIGH = (torch.float32, torch.bfloat16, torch.float16)
_COMFY_PREFIX = "model.diffusion_model."


def default_granularity(kind: LayoutKind) -> Granularity:
    """Return the usual scales of a layout."""
    return _ALLOWED[kind][0]


@dataclass(frozen=True)
class WrittenFp8:
    """What was written: linear weights in fp8, linear weights that the recipe excludes, bytes in and out."""

    path: Path
    quantized: int
    excluded: int
    bytes_before: int
    bytes_after: int

    def describe(self) -> str:
        """Return the outcome as a line."""
        in_mib = f"{self.bytes_before / 2**20:.1f} -> {self.bytes_after / 2**20:.1f} MiB"
        return f"{self.path}: {counted(self.quantized, 'weight')} in fp8, {self.excluded} excluded; {in_mib}"


_Planned = tuple[torch.dtype, tuple[int, ...], Callable[[], Tensor]]  # a tensor to be written, and how it is made


class WeightChanges(Protocol):
    """What a merge does to the weights while they are written."""

    def rounded(self, name: str) -> Quantized | None:
        """Return the weight ``name`` as fp8; None for the recipe's rounding of what the source holds."""

    def high(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        """Return the tensor ``name``, which is not in fp8, in its own dtype; ``read`` gives the source's."""


def write_fp8_checkpoint(
    weights: WeightFiles,
    target: str | Path,
    kind: LayoutKind,
    recipe: Fp8Recipe,
    *,
    fp8_matmul: bool = False,
    progress: Callable[[int, int], None] | None = None,
    merge: WeightChanges | None = None,
    metadata: Mapping[str, str] | None = None,
) -> WrittenFp8:
    """Write the model ``weights`` to ``target`` with its linear weights in fp8.

    Args:
        weights: the source.
        target: a ``.safetensors`` path.
        kind: layout.
        recipe: format, scales, what is excluded.
        fp8_matmul: let ComfyUI multiply in fp8.
        progress: called with (weights done, weights in all).
        merge: what changes on the way; a source in fp8 is taken only with it, and ``kind`` must be the source's.
        metadata: strings to add to the source's.

    Raises:
        UserError: the layout cannot hold what the recipe asks for, or the source is fp8 already and not merged into.
    """
    _check_layout(kind, recipe)
    if weights.fp8 is not None and merge is None:
        raise UserError(f"{weights.path}: is in fp8 already; quantise the bf16 or fp16 file of the model")
    for name, entry in weights.entries.items():
        if entry.dtype not in DTYPES:
            raise UserError(f"{weights.path}: tensor {name!r} has dtype {entry.dtype}; give a bf16 or fp16 file")
    specs = {name: entry.spec for name, entry in weights.entries.items()}
    linears = linear_weights(weights)
    chosen = _chosen(weights, linears, recipe)
    plan: dict[str, _Planned] = {}
    for name, (dtype, shape) in specs.items():
        layer, read = name.removesuffix(".weight"), partial(read_tensor, weights.entries, name)
        if layer in chosen and name.endswith(".weight"):
            quantized = partial(_rounded, name, read, recipe, stored_scale_dtype(kind, dtype), merge)
            plan |= _quantized_tensors(name, dtype, shape, quantized, kind, recipe, fp8_matmul)
        else:
            plan[name] = dtype, shape, read if merge is None else partial(merge.high, name, read)
    if kind == "comfy_scaled":
        plan |= _marker(specs, fp8_matmul)
    strings = weights.metadata | {"fp8_recipe": recipe.describe(), **(metadata or {})}
    made = iter(range(1, len(plan) + 1))

    def make(name: str) -> Tensor:
        if progress is not None:
            progress(next(made), len(plan))
        return plan[name][2]()

    written = {name: (dtype, shape) for name, (dtype, shape, _) in plan.items()}
    stream_safetensors(target, written, make, strings)
    before, after = (sum(tensor_bytes(*spec) for spec in tensors.values()) for tensors in (specs, written))
    return WrittenFp8(Path(target), len(chosen), len(linears) - len(chosen), before, after)


def _chosen(weights: WeightFiles, linears: Sequence[str], recipe: Fp8Recipe) -> set[str]:
    """Return which of the linear layers become fp8: as the recipe says; of a source in fp8 those that are."""
    if weights.fp8 is None:
        recipe.check_patterns(linears)
        chosen = {name for name in linears if recipe.excluded_as(name) is None}
    else:
        chosen = {name for name in linears if f"{name}.weight" in weights.fp8.dtypes}
    if not chosen:
        raise UserError(
            f"{weights.path}: no linear weight is left to quantise; keep fewer layers high, or give a model file"
        )
    return chosen


def _check_layout(kind: LayoutKind, recipe: Fp8Recipe) -> None:
    allowed = _ALLOWED[kind]
    if recipe.granularity not in allowed:
        raise UserError(
            f"layout {kind}: scales {recipe.granularity!r} cannot be written in it; use {' or '.join(allowed)}"
        )
    if kind == "comfy_scaled" and recipe.fp8 is not E4M3FN:
        raise UserError(
            "layout comfy_scaled: ComfyUI reads its weights as e4m3fn whatever they are; use comfy_quant for e5m2"
        )


def linear_weights(weights: WeightFiles) -> list[str]:
    """Return the linear layers of ``weights``, by name; of an all-in-one file the transformer's alone."""
    all_in_one = any(name.startswith(_COMFY_PREFIX) for name in weights.entries)
    in_fp8 = weights.fp8.dtypes if weights.fp8 is not None else {}
    tables = Fp8Recipe(exclude=())

    def is_linear(name: str) -> bool:
        dtype, shape = weights.entries[name].spec
        inside = not all_in_one or name.startswith(_COMFY_PREFIX)
        matrix = name.endswith(".weight") and len(shape) == 2 and (dtype in _HIGH or name in in_fp8)
        return matrix and inside and tables.excluded_as(name.removesuffix(".weight")) is None

    return [name.removesuffix(".weight") for name in weights.entries if is_linear(name)]


def _rounded(
    name: str, read: Callable[[], Tensor], recipe: Fp8Recipe, scale_dtype: torch.dtype, merge: WeightChanges | None
) -> Quantized:
    """Return the weight ``name`` as fp8: as the merge has rounded it, else by the recipe."""
    made = None if merge is None else merge.rounded(name)
    return made or recipe.quantize(name.removesuffix(".weight"), read(), scale_dtype)


def stored_scale_dtype(kind: LayoutKind, weight: torch.dtype) -> torch.dtype:
    """Return the dtype a layout stores scales in: musubi-tuner's take the weight's, bf16 where that is fp8 already."""
    if kind != "musubi":
        return torch.float32
    return weight if weight in _HIGH else torch.bfloat16


def _quantized_tensors(
    name: str,
    dtype: torch.dtype,
    weight_shape: tuple[int, ...],
    quantized: Callable[[], Quantized],
    kind: LayoutKind,
    recipe: Fp8Recipe,
    fp8_matmul: bool,
) -> dict[str, _Planned]:
    """Return what stands for the weight ``name``: values, scale, marker.

    A file holds wide dtypes first, so all scales come before any values. Each is made from the weight anew, which
    reads the source twice and keeps nothing.
    """
    layer = name.removesuffix(".weight")
    scale_dtype = stored_scale_dtype(kind, dtype)
    planned: dict[str, _Planned] = {name: (recipe.fp8.dtype, weight_shape, lambda: quantized().values)}
    if kind != "plain":
        shape = _musubi_shape(weight_shape, recipe.granularity) if kind == "musubi" else ()

        def scale() -> Tensor:
            found = quantized().scale
            assert found is not None
            return found.to(scale_dtype).reshape(shape)

        leaf = "weight_scale" if kind == "comfy_quant" else "scale_weight"
        planned[f"{layer}.{leaf}"] = scale_dtype, shape, scale
    if kind == "comfy_quant":
        config: dict[str, object] = {"format": f"float8_{recipe.fp8.name}"}
        if not fp8_matmul:
            config["full_precision_matrix_mult"] = True
        marker = torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)
        planned[f"{layer}.comfy_quant"] = marker.dtype, tuple(marker.shape), lambda: marker
    return planned


def _musubi_shape(weight: tuple[int, ...], granularity: Granularity) -> tuple[int, ...]:
    granularity = fitting_granularity(granularity, weight[1])
    if granularity == "tensor":
        return (1,)
    block = block_size(granularity)
    return (weight[0], 1) if block is None else (weight[0], weight[1] // block, 1)


def _marker(names: Iterable[str], fp8_matmul: bool) -> dict[str, _Planned]:
    prefix = _COMFY_PREFIX if any(name.startswith(_COMFY_PREFIX) for name in names) else ""
    marker = torch.zeros(0 if fp8_matmul else 2, dtype=E4M3FN.dtype)
    return {f"{prefix}scaled_fp8": (marker.dtype, tuple(marker.shape), lambda: marker)}
