"""A high-precision checkpoint in, an fp8 file out, in one of the layouts of ``checkpoint_layouts``.

Names stay as they are: a BFL or ComfyUI file gives a file for ComfyUI, a diffusers transformer one for
diffusers. Only matrices of linear layers become fp8; the recipe says which and how. Each is read, rounded
and written before the next.

ComfyUI files are marked so that products are made in high precision on dequantised weights (``scaled_fp8``
of two elements; ``full_precision_matrix_mult``), because that is what training saw. ComfyUI otherwise also
rounds activations on GPUs that have fp8 products; ``fp8_matmul`` leaves the mark out. Scales are stored in
fp32, musubi-tuner's in the dtype of the weight as it does; codes are then made for the scale as stored, so
nothing is lost between the two.

A merge writes through here too: it changes weights as they are read, brings weights that it has rounded itself, and may
start from a file that is in fp8 already. What it leaves alone in such a file keeps its codes and scales bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from library.errors import UserError
from library.files import DTYPES, read_safetensors_header, stream_safetensors, tensor_bytes
from library.precision.checkpoint_layouts import Fp8Layout, LayoutKind, detect_layout
from library.precision.formats import E4M3FN
from library.precision.quantize import Granularity, Quantized, block_size, fitting_granularity
from library.precision.recipe import Fp8Recipe

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
    """What was written: linear weights in fp8, linear weights kept by the recipe, bytes in and out."""

    path: Path
    quantized: int
    kept: int
    bytes_before: int
    bytes_after: int

    def describe(self) -> str:
        """Return the outcome as a line."""
        before, after = self.bytes_before / 2**20, self.bytes_after / 2**20
        return f"{self.path}: {self.quantized} weights in fp8, {self.kept} kept high; {before:.1f} -> {after:.1f} MiB"


@dataclass(frozen=True)
class _Planned:
    """A tensor to be written, and how it is made."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


@dataclass(frozen=True)
class _Source:
    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


class StoredTensor(Protocol):
    """A tensor of a file, by its header."""

    @property
    def name(self) -> str:
        """Name in the file."""

    @property
    def dtype(self) -> torch.dtype:
        """As it is stored."""

    @property
    def shape(self) -> tuple[int, ...]:
        """As it is stored."""


class WeightChanges(Protocol):
    """What a merge does to the weights while they are written."""

    def rounded(self, name: str) -> Quantized | None:
        """Return the weight ``name`` as fp8; None for the recipe's rounding of what the source holds."""

    def high(self, name: str, read: Callable[[], Tensor]) -> Tensor:
        """Return the tensor ``name``, which is not in fp8, in its own dtype; ``read`` gives the source's."""


def write_fp8_checkpoint(
    source: str | Path,
    files: Sequence[Path],
    target: str | Path,
    kind: LayoutKind,
    recipe: Fp8Recipe,
    *,
    fp8_matmul: bool = False,
    progress: Callable[[int, int], None] | None = None,
    merge: WeightChanges | None = None,
    metadata: Mapping[str, str] | None = None,
) -> WrittenFp8:
    """Write the model in ``files`` to ``target`` with its linear weights in fp8.

    Args:
        source: what the user named, for messages.
        files: its safetensors file, or the shards.
        target: a ``.safetensors`` path.
        kind: layout.
        recipe: format, scales, what is kept.
        fp8_matmul: let ComfyUI multiply in fp8.
        progress: called with (weights done, weights in all).
        merge: what changes on the way; a source in fp8 is taken only with it, and ``kind`` must be the source's.
        metadata: strings to add to the source's.

    Raises:
        UserError: the layout cannot hold what the recipe asks for, the source is fp8 already or is no model,
            a weight
            is not finite, a pattern matches nothing.
    """
    _check_layout(kind, recipe)
    layout = detect_layout(source, files)
    if layout is not None and merge is None:
        raise UserError(f"{source}: is in fp8 already; quantise the bf16 or fp16 file of the model")
    sources, strings = _read_headers(source, files)
    sources = [s for s in sources if layout is None or s.name not in layout.bookkeeping]
    linears = linear_weights(sources, layout)
    if layout is None:
        recipe.check_patterns(linears)
        chosen = {name for name in linears if recipe.kept_as(name) is None}
    else:
        chosen = {name for name in linears if f"{name}.weight" in layout.dtypes}
    if not chosen:
        raise UserError(f"{source}: no linear weight is left to quantise; keep fewer layers high, or give a model file")
    plan: dict[str, _Planned] = {}
    with ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(file, "pt")) for file in files}
        for s in sources:
            read = partial(opened[s.file].get_tensor, s.name)
            if s.name.removesuffix(".weight") in chosen and s.name.endswith(".weight"):
                plan |= _quantized_tensors(s, _rounding(s, read, recipe, kind, merge), kind, recipe, fp8_matmul)
            else:
                plan[s.name] = _Planned(s.dtype, s.shape, read if merge is None else partial(merge.high, s.name, read))
        if kind == "comfy_scaled":
            plan |= _marker(sources, fp8_matmul)
        strings |= {"fp8_recipe": recipe.describe(), **(metadata or {})}
        made = iter(range(1, len(plan) + 1))

        def make(name: str) -> Tensor:
            if progress is not None:
                progress(next(made), len(plan))
            return plan[name].make()

        specs = {name: (planned.dtype, planned.shape) for name, planned in plan.items()}
        stream_safetensors(target, specs, make, strings)
    before = sum(tensor_bytes(s.dtype, s.shape) for s in sources)
    after = sum(tensor_bytes(dtype, shape) for dtype, shape in specs.values())
    return WrittenFp8(Path(target), len(chosen), len(linears) - len(chosen), before, after)


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


def _read_headers(source: str | Path, files: Sequence[Path]) -> tuple[list[_Source], dict[str, str]]:
    sources: list[_Source] = []
    metadata: dict[str, str] = {}
    for file in files:
        for name, entry in read_safetensors_header(file).items():
            if name == "__metadata__":
                metadata |= entry
            elif entry["dtype"] not in DTYPES:
                raise UserError(f"{source}: tensor {name!r} has dtype {entry['dtype']}; give a bf16 or fp16 file")
            else:
                sources.append(_Source(name, file, DTYPES[entry["dtype"]], tuple(entry["shape"])))
    return sources, metadata


def linear_weights(sources: Sequence[StoredTensor], layout: Fp8Layout | None) -> list[str]:
    """Return the linear layers among ``sources``, by name; of an all-in-one file the transformer's alone."""
    all_in_one = any(s.name.startswith(_COMFY_PREFIX) for s in sources)
    in_fp8 = layout.dtypes if layout is not None else {}

    def is_linear(tensor: StoredTensor) -> bool:
        if not tensor.name.endswith(".weight") or len(tensor.shape) != 2:
            return False
        inside = not all_in_one or tensor.name.startswith(_COMFY_PREFIX)
        layer = tensor.name.removesuffix(".weight")
        return (tensor.dtype in _HIGH or tensor.name in in_fp8) and inside and Fp8Recipe(keep=()).kept_as(layer) is None

    return [s.name.removesuffix(".weight") for s in sources if is_linear(s)]


def _rounding(
    tensor: _Source, read: Callable[[], Tensor], recipe: Fp8Recipe, kind: LayoutKind, merge: WeightChanges | None
) -> Callable[[], Quantized]:
    """Return what makes codes and scale of the weight ``tensor``."""
    layer = tensor.name.removesuffix(".weight")
    scale_dtype = stored_scale_dtype(kind, tensor.dtype)

    def make() -> Quantized:
        if merge is not None and (made := merge.rounded(tensor.name)) is not None:
            return made
        return recipe.quantize(layer, read(), scale_dtype)

    return make


def stored_scale_dtype(kind: LayoutKind, weight: torch.dtype) -> torch.dtype:
    """Return the dtype a layout stores scales in: musubi-tuner's take the weight's, bf16 where that is fp8 already."""
    if kind != "musubi":
        return torch.float32
    return weight if weight in _HIGH else torch.bfloat16


def _quantized_tensors(
    tensor: _Source, quantized: Callable[[], Quantized], kind: LayoutKind, recipe: Fp8Recipe, fp8_matmul: bool
) -> dict[str, _Planned]:
    """Return what stands for the weight ``tensor``: codes, scale, marker.

    A file holds wide dtypes first, so all scales come before any codes. Each is made from the weight anew, which
    reads the source twice and keeps nothing.
    """
    layer = tensor.name.removesuffix(".weight")
    scale_dtype = stored_scale_dtype(kind, tensor.dtype)
    planned = {tensor.name: _Planned(recipe.fp8.dtype, tensor.shape, lambda: quantized().codes)}
    if kind != "plain":
        shape = _musubi_shape(tensor.shape, recipe.granularity) if kind == "musubi" else ()

        def scale() -> Tensor:
            found = quantized().scale
            assert found is not None
            return found.to(scale_dtype).reshape(shape)

        leaf = "weight_scale" if kind == "comfy_quant" else "scale_weight"
        planned[f"{layer}.{leaf}"] = _Planned(scale_dtype, shape, scale)
    if kind == "comfy_quant":
        config: dict[str, object] = {"format": f"float8_{recipe.fp8.name}"}
        if not fp8_matmul:
            config["full_precision_matrix_mult"] = True
        marker = torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)
        planned[f"{layer}.comfy_quant"] = _Planned(marker.dtype, tuple(marker.shape), lambda: marker)
    return planned


def _musubi_shape(weight: tuple[int, ...], granularity: Granularity) -> tuple[int, ...]:
    granularity = fitting_granularity(granularity, weight[1])
    if granularity == "tensor":
        return (1,)
    block = block_size(granularity)
    return (weight[0], 1) if block is None else (weight[0], weight[1] // block, 1)


def _marker(sources: Sequence[_Source], fp8_matmul: bool) -> dict[str, _Planned]:
    prefix = _COMFY_PREFIX if any(s.name.startswith(_COMFY_PREFIX) for s in sources) else ""
    marker = torch.zeros(0 if fp8_matmul else 2, dtype=E4M3FN.dtype)
    return {f"{prefix}scaled_fp8": _Planned(marker.dtype, tuple(marker.shape), lambda: marker)}
