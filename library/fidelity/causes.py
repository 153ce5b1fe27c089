"""How far a variant is from the reference, and what makes the difference: one cause at a time, and rules that name it.

Differences are measured by noise level, by region, along the mask boundary, over a sampling run.

Two questions are kept apart. *What makes the error?* is answered by size: each cause alone, and all without it. *What
puts it on the border?* is answered by the step of the error across the mask's border and the ring's error over the
interior's: a cause may change little in all and everything there.

Causes in the weights show in the layers. A format's own rounding error is known (``layers.LayerRow``), so a layer that
errs more was damaged, scaled wrongly, merged at another strength, lost its update to rounding, or is another model's.
The thresholds are wide of what rounding does: it moves a gain by under 0.01 and a weight error by a few percent of
itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, pstdev
from typing import Any

import torch
from torch import Tensor

from library.fidelity.deployments import EvalSet, Outcome, Variant
from library.fidelity.layers import LayerRow
from library.precision.parity.layer_errors import FLAGGED
from library.precision.parity.seam import SeamMetrics, edge_regions, seam_metrics, spectrum


@dataclass(frozen=True)
class Differences:
    """Relative rms errors over all of the evaluation set's samples, and what the border sees.

    Attributes:
        velocity: over all noise levels.
        velocity_by_sigma: sigma -> region (all, filled, known, ring; those that there are) -> error.
        latents_by_step: after each step of the sampling run.
        latents, image: of the finished ones; NaN where there was no sampling or no decoding.
        seam: metrics of the finished latents along the mask's border, medians over samples; empty without masks.
        image_seam: the same of the decoded images, in pixels.
        edges: rms error on the reference image's own edges over that on its flat half.
        spectrum: frequencies and mean power of the finished latents' error.
    """

    velocity: float
    velocity_by_sigma: dict[float, dict[str, float]]
    latents_by_step: list[float]
    latents: float
    image: float
    seam: SeamMetrics
    image_seam: SeamMetrics
    edges: float
    spectrum: tuple[list[float], list[float]]

    @property
    def error(self) -> float:
        """The error people see: of the decoded image, else of the latents, else of the velocity."""
        return next((size for size in (self.image, self.latents, self.velocity) if math.isfinite(size)), 0.0)

    @property
    def border_ring(self) -> float:
        """Error of the ring inside the border over the interior's, 8 pixels wide or 2 latent cells; NaN without one."""
        if self.image_seam:
            return self.image_seam["inside"][8]
        return self.seam["inside"][2] if self.seam else math.nan

    @property
    def border_step(self) -> float:
        """Step of the error across the border over the interior's, of the image, else of the latents; NaN without."""
        seam = self.image_seam or self.seam
        return seam["step"] if seam else math.nan


def compare(reference: Outcome, other: Outcome, eval_set: EvalSet) -> Differences:
    """Measure how far ``other`` is from ``reference``."""
    masks = [eval_set.mask(number) for number in range(len(eval_set.batches))]
    by_sigma = {
        sigma: _by_region(reference.velocities[sigma], other.velocities[sigma], masks) for sigma in eval_set.sigmas
    }
    velocities = [
        [velocity for sigma in eval_set.sigmas for velocity in outcome.velocities[sigma]]
        for outcome in (reference, other)
    ]
    steps = [relative_error(a, b) for a, b in zip(reference.path, other.path, strict=False)]
    sampled = bool(reference.path and other.path)
    finished = list(zip(reference.latents, other.latents, strict=True)) if sampled else []
    images = list(zip(reference.images, other.images, strict=True)) if other.images else []
    return Differences(
        velocity=relative_error(*velocities),
        velocity_by_sigma=by_sigma,
        latents_by_step=steps,
        latents=steps[-1] if steps else math.nan,
        image=relative_error(reference.images, other.images) if images else math.nan,
        seam=median_seam(finished, masks),
        image_seam=median_seam(
            images, [None if m is None else mask_in_pixels(m, a) for m, (a, _) in zip(masks, images, strict=False)]
        ),
        edges=_on_edges(finished),
        spectrum=_mean_spectrum([b - a for a, b in finished]),
    )


def relative_error(reference: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the rms of all differences over the rms of the reference; 0 of 0 is 0."""
    error = sum(float((b.double() - a.double()).square().sum()) for a, b in zip(reference, other, strict=True))
    size = sum(float(a.double().square().sum()) for a in reference)
    return math.sqrt(error / size) if error else 0.0


def median_seam(pairs: Sequence[tuple[Tensor, Tensor]], masks: Sequence[Tensor | None]) -> SeamMetrics:
    """Return the median of each seam metric over the samples that have a border; infinities are left out.

    Not the mean: where an interior of a few cells happens to have no error, a ratio has no bound.
    """
    found = [seam_metrics(a, b, m) for (a, b), m in zip(pairs, masks, strict=False) if m is not None]
    return _median_of(found) if found else {}


def _median_of(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: _median_of([value[key] for value in values]) for key in values[0]}
    finite = [value for value in values if math.isfinite(value)]
    return median(finite) if finite else math.nan


def _by_region(
    reference: Sequence[Tensor], other: Sequence[Tensor], masks: Sequence[Tensor | None]
) -> dict[str, float]:
    found = {"all": relative_error(reference, other)}
    seams = median_seam(list(zip(reference, other, strict=True)), masks)
    if seams:
        found |= {"filled": seams["error_filled"], "known": seams["error_known"]}
        found |= {"ring": seams["inside"][2] * seams["error_interior"]}
    return found


def mask_in_pixels(mask: Tensor, image: Tensor) -> Tensor:
    """Return ``mask`` [h, w] of latent cells as one of the pixels of ``image`` [3, H, W]."""
    factor = image.shape[-1] // mask.shape[-1]
    return mask.repeat_interleave(factor, 0).repeat_interleave(factor, 1)


def _on_edges(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    ratios = []
    for reference, other in pairs:
        edges, flat = edge_regions(reference)
        error = (other - reference).double().square().mean(0)
        if bool(flat.any()) and float(error[flat].mean()) > 0:
            ratios.append(math.sqrt(float(error[edges].mean() / error[flat].mean())))
    return sum(ratios) / len(ratios) if ratios else math.nan


def _mean_spectrum(errors: Sequence[Tensor]) -> tuple[list[float], list[float]]:
    """Return the mean spectrum of errors of the commonest size."""
    sizes = [error.shape[-2:] for error in errors if bool(error.any())]
    if not sizes:
        return [], []
    commonest = max(set(sizes), key=sizes.count)
    spectra = [spectrum(error) for error in errors if error.shape[-2:] == commonest and bool(error.any())]
    powers = torch.tensor([power for _, power in spectra]).mean(0)
    return spectra[0][0], powers.tolist()


CAUSES = {
    "weights": "rounding of the weights to fp8",
    "wrong_base": "the deployed file is not this model in fp8",
    "wrong_scale": "weights with a wrong scale",
    "ruined_layer": "a damaged layer",
    "sensitive_layer": "a layer that does not bear fp8",
    "delta_lost": "the LoRA's update was rounded away in the merge",
    "strength": "the LoRA runs at another strength",
    "merge": "rounding the LoRA into the weights",
    "activations": "rounding of activations to fp8",
    "activation_scale": "a scale of the activations that does not fit them",
    "text": "the text encoder in low precision",
    "vae": "the VAE in low precision",
    "timestep": "timesteps in low precision",
    "positions": "position tables (RoPE) in low precision",
    "paste": "known pixels pasted over the model's own",
}
REMEDIES = {
    "weights": "refit the LoRA to this file (tools/refit_lora.py), or keep the first layers of the table in bf16",
    "wrong_base": "deploy the fp8 file that was made from the reference, or train on the one you deploy",
    "wrong_scale": "make the file again with tools/quantize_model.py; its scales do not belong to its weights",
    "ruined_layer": "make or download the file again; the named layers are not the reference's",
    "sensitive_layer": "keep the named layers in bf16 (tools/quantize_model.py --exclude_pattern)",
    "delta_lost": "keep the LoRA beside the weights, or merge with tools/merge_lora.py --rounding compensated",
    "strength": "set the strength to the one it was trained for; one minute's test: 1 / retention",
    "merge": "keep the LoRA beside the weights, or merge with tools/merge_lora.py --rounding compensated",
    "activations": "multiply in bf16 (in ComfyUI without --fast fp8_matrix_mult), or train with fp8_activations",
    "activation_scale": "use dynamic scales, or calibrate the input scales again on images like yours",
    "text": "run the text encoder in bf16, or with scales in blocks",
    "vae": "run the VAE in bf16: it is 0.2 GB",
    "timestep": "carry timesteps in fp32",
    "positions": "compute cosines and sines in fp32",
    "paste": "leave the model's own pixels near the border, or blend over two latent cells",
}
_CHANGED_ERROR = 1.5  # times the format's own rounding error; rounding differs from itself by a few percent
_CHANGED_GAIN = 0.03
_MOST = 0.5
_ONE_LAYER = 0.65
_WORTH_MENDING = 0.05
_SHARP = 1.8  # times the interior's step: rounding alone gives 0.9 to 1.5 with an image's own edges at the border


@dataclass(frozen=True)
class Attribution:
    """One cause: the differences with it alone, and of the deployment without it."""

    cause: str
    alone: Differences
    without: Differences | None


@dataclass(frozen=True)
class Finding:
    """A cause that was found.

    Attributes:
        cause: key of ``CAUSES``. share: of the squared error, as far as causes add up.
        layers: that show it; empty where it is not about layers.
        evidence: the numbers that speak for it, in words.
    """

    cause: str
    share: float
    layers: tuple[str, ...]
    evidence: str

    def sentence(self) -> str:
        """Return cause, evidence and remedy in words."""
        remedy = REMEDIES[self.cause]
        return f"{CAUSES[self.cause]}: {self.evidence}. {remedy[0].upper()}{remedy[1:]}."

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"title": CAUSES[self.cause], "remedy": REMEDIES[self.cause]}


@dataclass(frozen=True)
class Verdict:
    """What the numbers name: findings by their share, and what puts the error on the border (None: nothing does)."""

    findings: tuple[Finding, ...]
    border: Finding | None

    @property
    def cause(self) -> str:
        """The one cause to look at first: what is at the border, then what can be had for nothing.

        Rounding that is as it must be is the price of the format. Anything else that makes a twentieth of the error is
        a defect, and mended first.
        """
        if self.border:
            return self.border.cause
        defects = (each for each in self.findings if each.cause != "weights" and each.share >= _WORTH_MENDING)
        return next(defects, self.findings[0]).cause


def judge(
    variant: Variant,
    full: Differences,
    attributions: Sequence[Attribution],
    layers: Sequence[LayerRow],
    input_scales: Mapping[str, float] | None = None,
) -> Verdict:
    """Return what makes the difference.

    Args:
        variant: the deployment.
        full: its differences.
        attributions: one for each of its causes.
        layers: the deployed layers against the reference.
        input_scales: layer -> static scale of its activations.
    """
    sizes = _own_sizes(attributions)
    total = sum(sizes.values()) or 1.0
    findings: list[Finding] = []
    for each in attributions:
        share = sizes[each.cause] / total
        if each.cause == "weights":
            findings.append(_in_weights(share, layers, each.alone.error, variant.merge is None))
        elif each.cause == "merge":
            findings.append(_in_merge(share, layers, math.sqrt(sizes["merge"])))
        elif each.cause == "activations":
            findings.append(_in_activations(share, each, variant, layers, input_scales or {}))
        else:
            findings.append(Finding(each.cause, share, (), _alone(each)))
    findings.sort(key=lambda finding: -finding.share)
    return Verdict(tuple(findings), _on_the_border(full, attributions))


def _own_sizes(attributions: Sequence[Attribution]) -> dict[str, float]:
    """Return each cause's squared error; a merge is rounded into fp8 weights, whose own error is not its doing."""
    sizes = {each.cause: each.alone.error**2 for each in attributions}
    if "merge" in sizes and "weights" in sizes:
        sizes["merge"] = max(0.0, sizes["merge"] - sizes["weights"])
    return sizes


def _in_weights(share: float, layers: Sequence[LayerRow], error: float, merged_file: bool) -> Finding:
    """Say what is wrong with the weights, by their layers; ``merged_file``: a LoRA in them came with the file."""
    rounded = [row for row in layers if row.expected_error > 0 or row.weight_error > 0]
    changed = [row for row in rounded if row.weight_error > _CHANGED_ERROR * row.expected_error + 1e-3]
    merged = [row for row in layers if row.retention is not None] if merged_file else []
    if merged and (found := _strength(share, merged)):
        return found
    scaled = [
        row for row in changed if abs(row.gain - 1) > _CHANGED_GAIN and row.error_after_gain < 0.5 * row.weight_error
    ]
    others = [row for row in changed if row not in scaled]
    if rounded and len(others) > _MOST * len(rounded):
        typical = median(row.weight_error for row in others)
        text = f"{len(others)} of {len(rounded)} layers differ from the reference by {typical:.0%}"
        return Finding("wrong_base", share, (), text)
    if scaled:
        worst = max(scaled, key=lambda row: abs(math.log(abs(row.gain) or 1e-9)))
        text = f"{len(scaled)} layers are the reference's times a factor ({worst.name}: {worst.gain:.3g})"
        return Finding("wrong_scale", share, _names(scaled), text)
    if others:
        worst = max(others, key=lambda row: row.weight_error)
        usual = f"{worst.expected_error:.1%} would be rounding"
        text = f"{worst.name} differs from the reference by {worst.weight_error:.0%}, {usual}"
        return Finding("ruined_layer", share, _names(others), text)
    if merged and (found := _lost(share, merged)):
        return found
    return _rounding(share, layers, error)


def _rounding(share: float, layers: Sequence[LayerRow], error: float) -> Finding:
    benefits = sorted(((row.benefit or 0.0, row) for row in layers), key=lambda pair: -pair[0])
    total = sum(benefit for benefit, _ in benefits)
    if total and benefits[0][0] > _ONE_LAYER * total:
        row = benefits[0][1]
        text = f"{row.name} alone makes {benefits[0][0] / total:.0%} of the error that rounding the weights makes"
        return Finding("sensitive_layer", share, (row.name,), text)
    text = f"every layer errs as its format must; together the output is {error:.1%} off"
    return Finding("weights", share, (), text)


def _strength(share: float, merged: Sequence[LayerRow]) -> Finding | None:
    """A merge at another strength: the same share of the update in every layer, and not 1."""
    gains = [row.retention for row in merged if row.retention is not None]
    middle = median(gains)
    if abs(middle - 1) < 0.08 or pstdev(gains) > 0.04 * max(1.0, abs(middle)):
        return None
    return Finding("strength", share, (), f"every layer holds {middle:.2f} of the LoRA's update")


def _lost(share: float, merged: Sequence[LayerRow]) -> Finding | None:
    lost = [row for row in merged if row.retention is not None and row.retention < FLAGGED]
    if not lost:
        return None
    worst = min(lost, key=lambda row: row.retention or 0.0)
    gains = sorted(row.retention for row in merged if row.retention is not None)
    text = (
        f"{len(lost)} of {len(merged)} layers hold less than {FLAGGED:.0%} of the update: "
        f"{median(gains):.2f} in the median, {worst.retention:.2f} in the worst ({worst.name})"
    )
    return Finding("delta_lost", share, _names(lost), text)


def _in_merge(share: float, layers: Sequence[LayerRow], error: float) -> Finding:
    merged = [row for row in layers if row.retention is not None]
    lost = _lost(share, merged) if merged else None
    return lost or Finding("merge", share, (), f"beyond the weights' own rounding it puts the output {error:.1%} off")


def _in_activations(
    share: float,
    each: Attribution,
    variant: Variant,
    layers: Sequence[LayerRow],
    scales: Mapping[str, float],
) -> Finding:
    """Blame the scale where it clips what the layers are given, or is far too coarse for it."""
    unfit: list[str] = []
    for row in layers:
        scale = (
            scales.get(row.name) if variant.activations == "static" else 1.0 if variant.activations == "unit" else None
        )
        if scale is None or not row.activations.rms:
            continue
        clips, drowns = 448 * scale < 0.9 * row.activations.largest, 2**-6 * scale > row.activations.rms
        if clips or drowns:
            unfit.append(row.name)
    if unfit:
        text = f"{len(unfit)} layers are given more than their scale can hold, or far less ({unfit[0]}); {_alone(each)}"
        return Finding("activation_scale", share, tuple(unfit), text)
    return Finding("activations", share, (), _alone(each))


def _on_the_border(full: Differences, attributions: Sequence[Attribution]) -> Finding | None:
    """Return the cause without which the border is no longer worse than the interior, if it is."""
    sharp = _border(full)
    others = [(each, _border(each.without)) for each in attributions if each.without is not None and each.without.seam]
    if not sharp > _SHARP or not others:
        return None
    best, left = min(others, key=lambda pair: pair[1])
    if not left < 1 + _MOST * (sharp - 1):
        return None
    text = f"the error's step across the border is {sharp:.1f} times the interior's, {left:.1f} without it"
    return Finding(best.cause, 1.0, (), text)


def _border(differences: Differences) -> float:
    """Return the step across the border, infinite beside an interior without an error; NaN without masks."""
    step = differences.border_step
    if not differences.seam or math.isfinite(step):
        return step
    return math.inf if differences.error else 1.0


def _alone(each: Attribution) -> str:
    return f"alone it puts the output {each.alone.error:.2%} off"


def _names(rows: Sequence[LayerRow]) -> tuple[str, ...]:
    return tuple(row.name for row in rows)
