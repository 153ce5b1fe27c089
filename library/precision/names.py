"""What number formats, scales and file layouts are called on command lines: words, without torch."""

from __future__ import annotations

from typing import Literal, get_args

FORMAT_NAMES = ("e4m3fn", "e5m2")
Granularity = Literal["cast", "tensor", "row", "block64", "block128"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)
# how a server rounds a layer's inputs, see ``library.precision.activations``; auto: as the file's server does
ActivationRounding = Literal["row", "tensor", "unit", "static", "int8", "nvfp4", "mxfp8"]
LayoutKind = Literal["plain", "comfy_scaled", "comfy_quant", "rows", "musubi", "modelopt", "gguf", "nf4"]
READ_ONLY = ("mxfp8", "gguf", "nf4")  # formats that are read and never written
# layouts that are written -> the scales that fp8 may have in each, the usual ones first
WRITTEN_LAYOUTS: dict[LayoutKind, tuple[Granularity, ...]] = {
    "plain": ("cast",),
    "comfy_scaled": ("tensor",),
    "comfy_quant": ("tensor",),
    "rows": ("row",),
    "musubi": ("block64", "tensor", "row", "block128"),
}
# scheme -> the layout that is usual for it
USUAL_LAYOUTS: dict[str, LayoutKind] = {
    "cast": "plain",
    "tensor": "comfy_scaled",
    "row": "musubi",
    "block64": "musubi",
    "block128": "musubi",
    "int8": "comfy_quant",
    "int8_row": "comfy_quant",
    "int8_convrot": "comfy_quant",
    "nvfp4": "comfy_quant",
}
SCHEME_NAMES = tuple(USUAL_LAYOUTS)  # that weights are written by
# --save_precision of a merge into a quantised model -> layout and scheme that a bf16 model gets
QUANTIZED_PRECISIONS: dict[str, tuple[LayoutKind, str]] = {
    "fp8": ("plain", "cast"),
    "fp8_scaled": ("comfy_scaled", "tensor"),
    "fp8_comfy_quant": ("comfy_quant", "tensor"),
    **{f"fp8_{scales}": (USUAL_LAYOUTS[scales], scales) for scales in ("row", "block64", "block128")},
    **{name: (layout, name) for name, layout in USUAL_LAYOUTS.items() if name not in GRANULARITIES},
}
