"""What makes the difference between a deployment and the reference: one cause at a time, and rules that name it.

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
from dataclasses import dataclass
from statistics import median, pstdev

from library.fidelity.causes import Finding
from library.fidelity.differences import Differences
from library.fidelity.layers import LayerRow
from library.fidelity.serving import Variant
from library.precision.parity.layer_errors import FLAGGED

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
