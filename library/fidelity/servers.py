"""What programs do with a LoRA and with activations: one row a program, completed by what the deployed file says.

A server adds a LoRA to the weights in one of a few ways, and makes products with quantised weights in their own format
or in high precision. The second is the file's choice more than the server's: ComfyUI multiplies a scaled fp8 file in
fp8 unless the file forbids it, an int8 file always in int8. Each stored weight says so itself
(``StoredWeight.served_rounding``); a row here says which conventions the program heeds.

Where products are made in the weights' own format, there is nothing but a rounded sum to multiply with, whatever the
row says (``Models.rounded_in``). Sources, with commits and functions: docs/precision.md, "What each program does with a
LoRA". What a program gives a model besides (:class:`Inputs`) is there too, under "What each program does with mask and
blank".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from library.config.model_types import Blank
from library.fidelity import SERVERS
from library.files import read_toml
from library.models.layer_names import LoraTargets
from library.precision.names import LayoutKind
from library.safetensors_io import read_entries
from networks.files.layouts import find_place, split_key
from networks.files.metadata import weight_file
from networks.files.weights import DoraWeights

Merge = Literal["nearest", "stochastic", "stochastic_fp16", "unrounded"]
SUMMED_IN: dict[Merge, torch.dtype] = {  # the dtype that a LoRA's update is made and added in
    "nearest": torch.float32,
    "stochastic": torch.bfloat16,
    "stochastic_fp16": torch.float16,
    "unrounded": torch.bfloat16,
}
_TABLES = read_toml(Path(__file__).with_name("servers.toml"))[0]


@dataclass(frozen=True)
class Merging:
    """One way in which a server merges: when, how, and whether only one step of a picture sees it."""

    when: str
    how: Merge
    one_step: bool = False


@dataclass(frozen=True)
class Inputs:
    """What a program gives a model by itself: where no node, argument or flag of the report says otherwise.

    Attributes:
        blank: under the mask of a fill model. t5_tokens: that FLUX's T5 is given of a caption, padded.
        others: the mask of a fill model, guidance and shift, in words.
    """

    blank: Blank
    others: str
    t5_tokens: int

    def words(self) -> str:
        """Return them for people."""
        return f"blank {self.blank}; {self.others}; FLUX's T5 at {self.t5_tokens} tokens"


@dataclass(frozen=True)
class Server:
    """A program that serves.

    Attributes:
        name: its word. words: for people. gives: what it gives a model by itself.
        merges: how the LoRA is merged; empty where it stays beside the weights.
        heeds: layouts of files that it multiplies in their own format where the file says so.
    """

    name: str
    words: str
    gives: Inputs
    merges: tuple[Merging, ...]
    heeds: tuple[LayoutKind, ...]

    @property
    def is_comfyui(self) -> bool:
        """Whether it is ComfyUI, which can load a LoRA beside the weights."""
        return self.name.startswith("comfyui")


def _server(name: str) -> Server:
    """Return the row ``name`` of ``servers.toml``."""
    row = _TABLES["servers"][name]
    merges = tuple(Merging(**each) for each in row["merges"])
    return Server(name, row["words"], Inputs(**_TABLES["gives"][row["gives"]]), merges, tuple(row["heeds"]))


BY_NAME = {name: _server(name) for name in SERVERS}


def usual_server(layout: LayoutKind | None) -> Server:
    """Return what runs files of ``layout`` usually; None is a file in high precision.

    musubi-tuner's files are run by nothing but itself, which dequantises them.
    """
    if layout in ("plain", "comfy_scaled", "comfy_quant"):
        return BY_NAME["comfyui"]
    return BY_NAME["gguf" if layout == "gguf" else "diffusers"]


def dora_error(
    doras: Mapping[str, DoraWeights], weight_of: Callable[[str], Tensor], strength: float, how: Merge
) -> float:
    """Return how far the update of DoRAs is off as ComfyUI merges them ``how``, over its size; before any rounding.

    With dynamic VRAM the arithmetic is in the dtype of the activations: a row's factor is rounded to bf16's 0.4 %, and
    its norm is larger by 0.0078, which moves the whole row; an update is small beside it
    (https://github.com/Comfy-Org/ComfyUI/pull/15389).

    Args:
        weight_of: returns the base's weight of a layer, [out, in] fp32.
    """
    off, size = 0.0, 0.0
    for name, dora in doras.items():
        weight = weight_of(name)
        exact = dora.apply(weight, strength)
        off += float((dora.apply_in(SUMMED_IN[how], weight, strength).float() - exact).square().sum())
        size += float((exact - weight).square().sum())
    return math.sqrt(off / size) if size else 0.0


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
