"""Every linear layer of the deployed model beside the reference's: weights, activations, outputs, update retention.

Two passes. The reference runs on the evaluation set while its layers' inputs are added up: second moments, which give
the output error of any weight error (``library.precision.parity``), and sizes by region of the mask. Then reference and
deployed weights are compared, a layer at a time.

What a format must cost is known: the reference's weight, rounded to nearest in the deployed layer's own format and
granularity, has a certain error. A layer that errs much more than that was not just rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from library.precision.fp8_linear import Fp8Linear
from library.precision.parity.activations import LayerInputs, watched
from library.precision.parity.layer_errors import relative_output_error, update_retention
from library.precision.parity.seam import regions
from library.precision.quantize import Quantized, format_of, holds_nan_or_inf
from library.training.fidelity.deployments import EvalSet, granularity_of, numbers, round_like
from networks.files.weights import LoraWeights

OUTLIER = 10.0  # a channel is one if its rms is over ten times the median channel's


@dataclass(frozen=True)
class ActivationSizes:
    """Sizes of one layer's inputs: rms of all, by region of the mask (image tokens only), the largest, outliers."""

    rms: float
    by_region: Mapping[str, float]
    largest: float
    outlier_channels: tuple[int, ...]


@dataclass(frozen=True)
class LayerRow:
    """One layer of the deployed model against the reference.

    Attributes:
        name: diffusers' module name. kind: dtype and granularity. size: weights in it.
        weight_error: |deployed - reference| / |reference|. expected_error: of rounding to nearest in the same format.
        sqnr_db: reference over error, in decibels.
        gain: <deployed, reference> / |reference|^2; a wrong scale is far from 1.
        error_after_gain: what is left of the weight error when the gain is taken out.
        zeros, subnormals, saturated: shares of the codes; zeros count where the reference is not zero.
        output_error: of the layer's output on the evaluation set, without its LoRA.
        expected_output_error: the same of rounding to nearest.
        survival, survival_cosine: of the LoRA's update where it is merged; None elsewhere.
        lora_effect: rms of the update's share of the output over the output's; None without a LoRA.
        benefit: share of the squared output of the model that comes back if the layer alone runs in high precision;
            None where it was not measured.
        activations: sizes of its inputs.
    """

    name: str
    kind: str
    size: int
    weight_error: float
    expected_error: float
    sqnr_db: float
    gain: float
    error_after_gain: float
    zeros: float
    subnormals: float
    saturated: float
    output_error: float
    expected_output_error: float
    survival: float | None
    survival_cosine: float | None
    lora_effect: float | None
    benefit: float | None
    activations: ActivationSizes

    @property
    def benefit_per_megabyte(self) -> float:
        """Benefit for each 2^20 bytes more in bf16."""
        return (self.benefit or 0.0) / (self.size / 2**20)

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"benefit_per_megabyte": self.benefit_per_megabyte}


def layer_row(
    name: str,
    reference: Tensor,
    deployed: nn.Module,
    served: nn.Module,
    inputs: LayerInputs,
    sizes: ActivationSizes,
    update: LoraWeights | None,
    merged: Literal["no", "here", "in the file"],
) -> LayerRow:
    """Compare one layer.

    Args:
        name: of the module.
        reference: [out, in] weight without the LoRA.
        deployed: the layer as the file or the recipe has it: what its weight errors are told of.
        served: the same with the LoRA rounded into it where that is done here; otherwise ``deployed``.
        inputs, sizes: of the layer, from the evaluation set.
        update: the LoRA's, at full strength; None without one.
        merged: whether the LoRA is rounded into ``served`` here, or came with the file.
    """
    reference = reference.float()
    delta = None if update is None else update.delta().to(reference.device)
    inside = delta is not None and merged != "no"
    whole = reference + delta if delta is not None and inside else reference  # what is served should be this
    wanted = whole if merged == "in the file" else reference
    quantized = deployed.quantized() if isinstance(deployed, Fp8Linear) else None
    weight = numbers(deployed)
    error, expected = weight - wanted, _rounded(wanted, quantized) - wanted
    size = float(wanted.double().square().sum())
    gain = float((weight.double() * wanted).sum()) / size if size else 1.0
    base = _rounded(reference, quantized) if merged == "in the file" else weight
    kept = update_retention(numbers(served), base, delta) if delta is not None and inside else None
    return LayerRow(
        name=name,
        kind=_kind(deployed),
        size=weight.numel(),
        weight_error=_relative(error, size),
        expected_error=_relative(expected, size),
        sqnr_db=_decibels(_relative(error, size)),
        gain=gain,
        error_after_gain=_relative(weight / gain - wanted, size) if gain else 1.0,
        **_codes(quantized, wanted),
        output_error=relative_output_error(numbers(served) - whole, whole, inputs),
        expected_output_error=relative_output_error(_rounded(whole, quantized) - whole, whole, inputs),
        survival=kept.gain if kept else None,
        survival_cosine=kept.cosine if kept else None,
        lora_effect=relative_output_error(delta, whole, inputs) if delta is not None else None,
        benefit=None,
        activations=sizes,
    )


def linear_layers(model: nn.Module) -> list[str]:
    """Return the names of all linear layers; one with a LoRA around it is one layer."""
    names: list[str] = []
    for name, module in model.named_modules():
        inside = bool(names) and name.startswith(f"{names[-1]}.")
        if not inside and hasattr(module, "in_features") and hasattr(module, "out_features"):
            names.append(name)
    return names


Collect = tuple[Callable[[int], None], Callable[[], dict[str, ActivationSizes]]]


@contextmanager
def watched_sizes(model: nn.Module, eval_set: EvalSet) -> Iterator[Collect]:
    """Collect the sizes of all linear layers' inputs while the block runs ``model`` on the samples, one by one.

    Yields ``(begin, finish)``: ``begin(number)`` says which sample comes next, ``finish()`` returns layer -> sizes.
    """
    sums = {name: _RegionSums() for name in linear_layers(model)}
    state = _Sample(0, 0, 0, {})

    def begin(number: int) -> None:
        batch, mask = eval_set.batches[number], eval_set.mask(number)
        state.tokens = _tokens(batch.latents)
        state.references = sum(_tokens(reference) for reference in batch.conditions.references)
        state.text = batch.text["prompt_embeds"].shape[1]
        state.masks = {} if mask is None else _token_regions(mask)

    def show(name: str) -> Callable[[Tensor], None]:
        return lambda x: sums[name].add(x.detach(), state)

    with watched(model, {name: show(name) for name in sums}):
        yield begin, lambda: {name: each.finish() for name, each in sums.items()}


@dataclass
class _Sample:
    """The sample that is running: its image's tokens, those of references and of text, and regions of the first."""

    tokens: int
    references: int
    text: int
    masks: Mapping[str, Tensor]


class _RegionSums:
    """Adds up squares of one layer's inputs, in all and by region."""

    def __init__(self) -> None:
        self.channels: Tensor | None = None
        self.count, self.largest = 0, 0.0
        self.regions: dict[str, list[float]] = {}

    def add(self, x: Tensor, sample: _Sample) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        squares = rows.square()
        self.channels = squares.sum(0) + (self.channels if self.channels is not None else 0)
        self.count += rows.shape[0]
        self.largest = max(self.largest, float(rows.abs().max()))
        # A stream holds the image's tokens, then those of references; blocks that join both have the text's first.
        own = sample.tokens + sample.references
        starts = {own: 0, own + sample.text: sample.text}
        if x.ndim != 3 or x.shape[1] not in starts:
            return
        first = starts[x.shape[1]]
        energy = squares.view(x.shape).sum(-1)[0, first : first + sample.tokens].cpu()
        for region, chosen in sample.masks.items():
            found = self.regions.setdefault(region, [0.0, 0.0])
            found[0] += float(energy[chosen].sum())
            found[1] += float(chosen.sum()) * x.shape[-1]

    def finish(self) -> ActivationSizes:
        if self.channels is None:
            return ActivationSizes(0.0, {}, 0.0, ())
        rms = (self.channels / self.count).sqrt()
        outliers = (rms > OUTLIER * rms.median()).nonzero().flatten().tolist()
        by_region = {name: math.sqrt(total / number) for name, (total, number) in self.regions.items() if number}
        return ActivationSizes(float(rms.square().mean().sqrt()), by_region, self.largest, tuple(outliers))


def _tokens(latents: Tensor) -> int:
    return latents.shape[-2] * latents.shape[-1] // 4


def _token_regions(mask: Tensor) -> dict[str, Tensor]:
    """Return region -> tokens of 2 x 2 cells, flat bool: filled, known, and both sides of the border."""
    cells = mask[: mask.shape[0] // 2 * 2, : mask.shape[1] // 2 * 2]
    tokens = cells.float().unfold(0, 2, 2).unfold(1, 2, 2).mean((-1, -2)) >= 0.5
    if not tokens.any() or tokens.all():
        return {}
    where = regions(tokens)
    border = where.inside[1] | where.outside[1]
    parts = {"filled": where.filled & ~border, "known": where.known & ~border, "border": border}
    return {name: part.flatten() for name, part in parts.items() if bool(part.any())}


def _rounded(weight: Tensor, kind: Quantized | None) -> Tensor:
    """Return ``weight`` rounded to nearest in the format of ``kind``; as it is where that is None."""
    return weight if kind is None else round_like(kind, weight, "nearest", 0).dequantize(torch.float32)


def _kind(layer: Any) -> str:
    if not isinstance(layer, Fp8Linear):
        return str(layer.weight.dtype).removeprefix("torch.")
    quantized = layer.quantized()
    fp8 = format_of(quantized.values.dtype)
    assert fp8 is not None
    return f"{fp8.name} {granularity_of(quantized)}"


def _codes(quantized: Quantized | None, wanted: Tensor) -> dict[str, float]:
    """Return the shares of codes that are zero, subnormal and at the format's end."""
    if quantized is None:
        return {"zeros": 0.0, "subnormals": 0.0, "saturated": 0.0}
    fp8 = format_of(quantized.values.dtype)
    assert fp8 is not None
    assert not holds_nan_or_inf(quantized.values)
    values = quantized.values.float().abs()
    saturated = (values == fp8.max).double().mean()
    if quantized.scale is not None:  # the largest of a group is the end of the format by intention
        limit = quantized.dequantize(torch.float32).abs() * (1 + 2.0 ** -(fp8.mantissa_bits + 2))
        saturated = ((values == fp8.max) & (wanted.abs() > limit)).double().mean()
    return {
        "zeros": float(((values == 0) & (wanted != 0)).double().mean()),
        "subnormals": float(((values > 0) & (values < fp8.min_normal)).double().mean()),
        "saturated": float(saturated),
    }


def _relative(error: Tensor, size: float) -> float:
    energy = float(error.double().square().sum())
    return math.sqrt(energy / size) if energy else 0.0


def _decibels(relative: float) -> float:
    return -20 * math.log10(relative) if relative else math.inf
