"""Every linear layer of the deployed model beside the reference's: weights, activations, outputs, update retention.

The reference runs on the evaluation set while its layers' inputs are added up: second moments, which give the output
error of any weight error (``library.precision.parity``). Then outputs of reference and
deployed weights are compared, a layer at a time; the weights themselves are in ``tensors``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from library.fidelity.grids import SURE, on_own_grid
from library.fidelity.serving import numbers, rounded
from library.fidelity.tensors import TensorRow
from library.precision.files.base import QuantizedWeight
from library.precision.linear import QuantizedLinear
from library.precision.parity.activations import LayerInputs
from library.precision.parity.layer_errors import FLAGGED, relative_output_error, update_retention
from library.precision.recipe import scheme_named
from networks.files.weights import AddedWeights

_INT8 = scheme_named("int8_convrot")


@dataclass(frozen=True)
class LayerRow:
    """One layer of the deployed model against the reference.

    Attributes:
        name: diffusers' module name. kind: dtype and granularity. size: weights in it.
        output_error: of the layer's output on the evaluation set, without its LoRA.
        expected_output_error: the same of rounding to nearest.
        compensated: the weight is changed by more than rounding, and outputs err less for it: GPTQ, for example.
        fault: of its weight, see ``TensorRow``.
        retention, retention_cosine: of the LoRA's update where it is merged; None elsewhere.
        lora_effect: rms of the update's share of the output over the output's; None without a LoRA.
        input_rms, largest_input: of what it is given.
        as_int8: the base's output error as int8_convrot, over that as deployed; None of int8 and high precision.
    """

    name: str
    kind: str
    size: int
    output_error: float
    expected_output_error: float
    compensated: bool
    fault: str
    retention: float | None
    retention_cosine: float | None
    lora_effect: float | None
    input_rms: float
    largest_input: float
    as_int8: float | None = None

    @property
    def conspicuous(self) -> bool:
        """Whether it lost some of the LoRA's update, or is not just rounded."""
        return bool(self.fault) or self.lost

    @property
    def lost(self) -> bool:
        """Whether less of a merged update is left than 0.95, beyond what rounding's noise makes of it.

        What was changed is gain * update + noise, and the noise's part of it sqrt(1 - cosine^2); over n weights it
        moves the gain by gain * tan(angle) / sqrt(n).
        """
        if self.retention is None:
            return False
        cosine = max(abs(self.retention_cosine or 0.0), 1e-3)
        doubt = abs(self.retention) * math.sqrt(max(0.0, 1 - cosine**2)) / cosine / math.sqrt(self.size)
        return self.retention + SURE * doubt < FLAGGED


def layer_row(
    tensor: TensorRow,
    reference: Tensor,
    deployed: nn.Module,
    served: nn.Module,
    inputs: LayerInputs,
    update: AddedWeights | None,
    merged: Literal["no", "here", "in the file"],
) -> LayerRow:
    """Compare one layer.

    Args:
        tensor: its weight's row of ``compare_tensors``.
        reference: [out, in] weight without the LoRA.
        deployed: the layer as the file or the recipe has it.
        served: the same with the LoRA rounded into it where that is done here; otherwise ``deployed``.
        inputs: of the layer, from the evaluation set.
        update: the LoRA's, at full strength; None without one.
        merged: whether the LoRA is rounded into ``served`` here, or came with the file.
    """
    reference = reference.float()
    delta = None if update is None else update.delta().to(reference.device)
    inside = delta is not None and merged != "no"
    target = reference + delta if delta is not None and inside else reference  # what is served should be this
    quantized = deployed.quantized() if isinstance(deployed, QuantizedLinear) else None
    weight = numbers(deployed)
    base, wanted = weight, reference
    if merged == "in the file":
        base, wanted = reference if quantized is None else on_own_grid(quantized, reference), target
    retained = update_retention(numbers(served), base, delta) if delta is not None and inside else None
    nearest = relative_output_error(rounded(quantized, target) - target, target, inputs)
    # numbers that GPTQ moved far can look zeroed or clipped
    changed = tensor.fault in ("ruined_layer", "other_lora", "zeroed", "clipped")
    compensated = changed and relative_output_error(weight - wanted, wanted, inputs) < nearest
    return LayerRow(
        name=tensor.layer,
        kind=_kind(deployed),
        size=weight.numel(),
        output_error=relative_output_error(numbers(served) - target, target, inputs),
        expected_output_error=nearest,
        as_int8=_as_int8(reference, base, quantized, inputs) if merged != "in the file" else None,
        compensated=compensated,
        fault="" if compensated else tensor.fault,
        retention=retained.gain if retained else None,
        retention_cosine=retained.cosine if retained else None,
        lora_effect=relative_output_error(delta, target, inputs) if delta is not None else None,
        input_rms=float(inputs.rms.square().mean().sqrt()),
        largest_input=float(inputs.amax.max()),
    )


def _as_int8(high: Tensor, served: Tensor, quantized: QuantizedWeight | None, inputs: LayerInputs) -> float | None:
    """Return the output error of ``high`` as int8_convrot over that of ``served``; None if that is no other format."""
    scheme = None if quantized is None or quantized.scheme.name.startswith("int8") else _INT8.fitting(high.shape)
    error = relative_output_error(served - high, high, inputs)
    if scheme is None or not error:
        return None
    return relative_output_error(scheme.quantize(high).dequantize(torch.float32) - high, high, inputs) / error


def linear_layers(model: nn.Module) -> list[str]:
    """Return the names of all linear layers; one with a LoRA around it is one layer."""
    names: list[str] = []
    for name, module in model.named_modules():
        inside = bool(names) and name.startswith(f"{names[-1]}.")
        if not inside and hasattr(module, "in_features") and hasattr(module, "out_features"):
            names.append(name)
    return names


def _kind(layer: Any) -> str:
    if not isinstance(layer, QuantizedLinear):
        return str(layer.weight.dtype).removeprefix("torch.")
    return layer.quantized().scheme.describe()
