"""What programs do with a LoRA and with activations: one row a program, completed by what the deployed file says.

A server adds a LoRA to the weights in one of a few ways, and makes products with quantised weights in their own format
or in high precision. The second is the file's choice more than the server's: ComfyUI multiplies a scaled fp8 file in
fp8 unless the file forbids it, an int8 file always in int8. Each stored weight says so itself
(``StoredWeight.served_rounding``); a row here says which conventions the program heeds.

Where products are made in the weights' own format, there is nothing but a rounded sum to multiply with, whatever the
row says (``Models.rounded_in``). Sources, with commits and functions: docs/precision.md, "What each program does with a
LoRA".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zlib import crc32

import torch

from library.fidelity import SERVERS
from library.models.layer_names import KeyPlace, LoraTargets
from library.precision.names import LayoutKind
from library.safetensors_io import read_entries
from networks.files.layouts import find_place, split_key
from networks.files.metadata import weight_file

Merge = Literal["nearest", "stochastic", "stochastic_fp16", "unrounded"]
SUMMED_IN: dict[Merge, torch.dtype] = {  # the dtype that a LoRA's update is made and added in
    "nearest": torch.float32,
    "stochastic": torch.bfloat16,
    "stochastic_fp16": torch.float16,
    "unrounded": torch.bfloat16,
}
_COMFY: tuple[LayoutKind, ...] = ("comfy_scaled", "comfy_quant")


@dataclass(frozen=True)
class Merging:
    """One way in which a server merges: when, how, and whether only one step of a picture sees it."""

    when: str
    how: Merge
    one_step: bool = False


@dataclass(frozen=True)
class Server:
    """A program that serves.

    Attributes:
        name: its word. words: for people.
        merges: how the LoRA is merged; empty where it stays beside the weights.
        heeds: layouts of files that it multiplies in their own format where the file says so.
    """

    name: str
    words: str
    merges: tuple[Merging, ...] = ()
    heeds: tuple[LayoutKind, ...] = ()

    @property
    def is_comfyui(self) -> bool:
        """Whether it is ComfyUI, which can load a LoRA beside the weights."""
        return self.name.startswith("comfyui")


_ROWS = (
    Server(
        "comfyui",
        "ComfyUI, Load LoRA, dynamic VRAM",
        (
            Merging("first use of a layer that stays in memory", "unrounded", one_step=True),
            Merging("resident: the same layer afterwards", "stochastic"),
            Merging("streamed: a layer that does not fit", "unrounded"),
        ),
        _COMFY,
    ),
    Server("comfyui-bypass", "ComfyUI, Load LoRA (Bypass)", (), _COMFY),
    Server(
        "comfyui-legacy",
        "ComfyUI, Load LoRA, --disable-dynamic-vram",
        (Merging("merged when it is loaded", "stochastic_fp16"),),
        _COMFY,
    ),
    Server("diffusers", "diffusers, load_lora_weights", (), ("rows", "modelopt")),
    Server("gguf", "ComfyUI-GGUF", (Merging("merged at every use", "unrounded"),)),
)
BY_NAME = dict(zip(SERVERS, _ROWS, strict=True))


def usual_server(layout: LayoutKind | None) -> Server:
    """Return what runs files of ``layout`` usually; None is a file in high precision.

    musubi-tuner's files are run by nothing but itself, which dequantises them.
    """
    if layout in ("plain", *_COMFY):
        return BY_NAME["comfyui"]
    return BY_NAME["gguf" if layout == "gguf" else "diffusers"]


def comfyui_seed(place: KeyPlace | None, name: str) -> int:
    """Return what ComfyUI seeds the rounding of a layer with: the CRC-32 of its name there (``string_to_seed``)."""
    return crc32(f"diffusion_model.{place.original if place else name}".encode())


def dropped_by_bypass(loras: Sequence[Path], targets: LoraTargets) -> list[str]:
    """Return the modules of LoRA files that ComfyUI's bypass leaves out: parts of what is one layer there.

    "Load LoRA" adds ``to_q`` to the rows of ``qkv`` that it is; the bypass looks for a layer of that name
    (``load_bypass_lora_for_models``).
    """
    dropped: dict[str, None] = {}
    for path in loras:
        for key in read_entries([weight_file(path)])[0]:
            found = find_place(split_key(key)[0], targets)
            place = found.place if found and found.encoder is None else None
            if place and place.part is not None and (len(place.modules) > 1 or place.row.halves_swapped):
                dropped[place.modules[place.part]] = None
    return list(dropped)
