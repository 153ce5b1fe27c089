"""What number formats, scales and file layouts are called on command lines: words, without torch."""

from __future__ import annotations

from typing import Literal

FORMAT_NAMES = ("e4m3fn", "e5m2")
Granularity = Literal["cast", "tensor", "row", "block64", "block128"]
GRANULARITIES: tuple[Granularity, ...] = ("cast", "tensor", "row", "block64", "block128")
LayoutKind = Literal["plain", "comfy_scaled", "comfy_quant", "rows", "musubi", "modelopt", "gguf", "nf4"]
# layouts that are written -> the scheme that is usual in each
WRITTEN_LAYOUTS: dict[LayoutKind, str] = {
    "plain": "cast",
    "comfy_scaled": "tensor",
    "comfy_quant": "tensor",
    "rows": "row",
    "musubi": "block64",
}
# --save_precision of a merge into fp8 -> layout and granularity that a bf16 model gets
FP8_PRECISIONS: dict[str, tuple[LayoutKind, Granularity]] = {
    "fp8": ("plain", "cast"),
    "fp8_scaled": ("comfy_scaled", "tensor"),
    "fp8_comfy_quant": ("comfy_quant", "tensor"),
    "fp8_row": ("musubi", "row"),
    "fp8_block64": ("musubi", "block64"),
    "fp8_block128": ("musubi", "block128"),
}
