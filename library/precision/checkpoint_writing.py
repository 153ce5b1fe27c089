"""A high-precision checkpoint in, an fp8 file out, in one of the layouts of ``checkpoint_layouts``.

Names stay as they are: a BFL or ComfyUI file gives a file for ComfyUI, a diffusers transformer one for
diffusers. Only matrices of linear layers become fp8; the recipe says which and how. Each is read, rounded
and written before the next.

ComfyUI files are marked so that products are made in high precision on dequantised weights (``scaled_fp8``
of two elements; ``full_precision_matrix_mult``), because that is what training saw. ComfyUI otherwise also
rounds activations on GPUs that have fp8 products; ``fp8_matmul`` leaves the mark out. Scales are stored in
fp32, musubi-tuner's in the dtype of the weight as it does; codes are then made for the scale as stored, so
nothing is lost between the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from library.errors import UserError
from library.files import read_safetensors_header
from library.precision.checkpoint_layouts import LayoutKind, detect_layout
from library.precision.formats import E4M3FN
from library.precision.quantize import Granularity, block_size, fitting_granularity
from library.precision.recipe import Fp8Recipe
from library.safetensors_stream import DTYPES, stream_safetensors, tensor_bytes

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


def write_fp8_checkpoint(
    source: str | Path,
    files: Sequence[Path],
    target: str | Path,
    kind: LayoutKind,
    recipe: Fp8Recipe,
    *,
    fp8_matmul: bool = False,
    progress: Callable[[int, int], None] | None = None,
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

    Raises:
        UserError: the layout cannot hold what the recipe asks for, the source is fp8 already or is no model,
            a weight
            is not finite, a pattern matches nothing.
    """
    _check_layout(kind, recipe)
    if detect_layout(source, files) is not None:
        raise UserError(f"{source}: is in fp8 already; quantise the bf16 or fp16 file of the model")
    sources, metadata = _read_headers(source, files)
    linears = [s.name.removesuffix(".weight") for s in sources if _is_matrix(s, sources)]
    recipe.check_patterns(linears)
    chosen = {name for name in linears if recipe.kept_as(name) is None}
    if not chosen:
        raise UserError(f"{source}: no linear weight is left to quantise; keep fewer layers high, or give a model file")
    plan: dict[str, _Planned] = {}
    with ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(file, "pt")) for file in files}
        for s in sources:
            read = partial(opened[s.file].get_tensor, s.name)
            if s.name.removesuffix(".weight") in chosen and s.name.endswith(".weight"):
                plan |= _quantized_tensors(s, read, kind, recipe, fp8_matmul)
            else:
                plan[s.name] = _Planned(s.dtype, s.shape, read)
        if kind == "comfy_scaled":
            plan |= _marker(sources, fp8_matmul)
        metadata["fp8_recipe"] = recipe.describe()
        made = iter(range(1, len(plan) + 1))

        def make(name: str) -> Tensor:
            if progress is not None:
                progress(next(made), len(plan))
            return plan[name].make()

        specs = {name: (planned.dtype, planned.shape) for name, planned in plan.items()}
        stream_safetensors(target, specs, make, metadata)
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


def _is_matrix(tensor: _Source, everything: Sequence[_Source]) -> bool:
    """Return whether ``tensor`` is the weight of a linear layer, in an all-in-one file of the transformer's."""
    if not tensor.name.endswith(".weight") or len(tensor.shape) != 2 or tensor.dtype not in _HIGH:
        return False
    all_in_one = any(other.name.startswith(_COMFY_PREFIX) for other in everything)
    inside = not all_in_one or tensor.name.startswith(_COMFY_PREFIX)
    return inside and Fp8Recipe(keep=()).kept_as(tensor.name.removesuffix(".weight")) is None


def _quantized_tensors(
    tensor: _Source, read: Callable[[], Tensor], kind: LayoutKind, recipe: Fp8Recipe, fp8_matmul: bool
) -> dict[str, _Planned]:
    """Return what stands for the weight ``tensor``: codes, scale, marker.

    A file holds wide dtypes first, so all scales come before any codes. Each is made from the weight anew, which
    reads the source twice and keeps nothing.
    """
    layer = tensor.name.removesuffix(".weight")
    scale_dtype = tensor.dtype if kind == "musubi" else torch.float32
    planned = {
        tensor.name: _Planned(recipe.fp8.dtype, tensor.shape, lambda: recipe.quantize(layer, read(), scale_dtype).codes)
    }
    if kind != "plain":
        shape = _musubi_shape(tensor.shape, recipe.granularity) if kind == "musubi" else ()

        def scale() -> Tensor:
            found = recipe.scale(read(), scale_dtype)
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
