"""What number formats, scales and file layouts of fp8 are called on command lines: words, without torch."""

from __future__ import annotations

from typing import Literal

FORMAT_NAMES = ("e4m3fn", "e5m2")
Granularity = Literal["cast", "tensor", "row", "block64", "block128"]
GRANULARITIES: tuple[Granularity, ...] = ("cast", "tensor", "row", "block64", "block128")
LayoutKind = Literal["plain", "comfy_scaled", "comfy_quant", "musubi"]
# --save_precision of a merge into fp8 -> layout and granularity that a bf16 model gets
FP8_PRECISIONS: dict[str, tuple[LayoutKind, Granularity]] = {
    "fp8": ("plain", "cast"),
    "fp8_scaled": ("comfy_scaled", "tensor"),
    "fp8_comfy_quant": ("comfy_quant", "tensor"),
    "fp8_row": ("musubi", "row"),
    "fp8_block64": ("musubi", "block64"),
    "fp8_block128": ("musubi", "block128"),
}
