"""What makes the difference between a deployment and the reference: one cause at a time, and rules that name it.

Two questions are kept apart. *What makes the error?* is answered by size: each cause alone, and all without it. *What
puts it on the border?* is answered by the figures of ``border``, of each cause alone: a cause may change little in all
and everything there.

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

from library.fidelity.border import Border, BorderFigure
from library.fidelity.causes import CAUSES, Finding
from library.fidelity.differences import Differences
from library.fidelity.layers import LayerRow
from library.fidelity.serving import Variant
from library.precision.parity.layer_errors import FLAGGED

_CHANGED_ERROR = 1.5  # times the format's own rounding error; rounding differs from itself by a few percent
_CHANGED_GAIN = 0.03
_MOST = 0.5
_ONE_LAYER = 0.65
_WORTH_MENDING = 0.05
_EXPLAINED = 0.99


@dataclass(frozen=True)
class Attribution:
    """One cause: the differences with it alone, and of the deployment without it."""

    cause: str
    alone: Differences
    without: Differences | None


NORMAL = ("weights", "merge")  # rounding that is as it must be: the price of the format


@dataclass(frozen=True)
class Verdict:
    """What the numbers name.

    Attributes:
        findings: causes by their share of the error.
        border: whether the error lies along the mask's border; None without masks or images.
        border_cause: what puts it there; None where nothing does, or no single cause.
        explained: share of the weights' squared velocity error that is gone with every compared tensor put back; None
            where the reference's weights run.
    """

    findings: tuple[Finding, ...]
    border: Border | None
    border_cause: Finding | None
    explained: float | None = None

    @property
    def defects(self) -> tuple[Finding, ...]:
        """What is no honest rounding."""
        return tuple(each for each in self.findings if each.cause not in NORMAL)

    @property
    def alarm(self) -> bool:
        """Whether there is anything to mend."""
        return bool(self.defects) or (self.border is not None and self.border.state == "worse")

    @property
    def cause(self) -> str:
        """The one cause to look at first: what is at the border, then the defect with the largest share."""
        if self.border_cause:
            return self.border_cause.cause
        large = [each for each in self.defects if not each.share < _WORTH_MENDING]
        return (large or self.findings)[0].cause

    def lines(self, full: Differences) -> list[str]:
        """Return the verdict in words, a line a sentence: the cause, the border, every finding, the error."""
        first = (
            f"Look here first: {CAUSES[self.cause]}." if self.alarm else "No defect: the deployment errs as it must."
        )
        lines = [first]
        if self.border:
            lines.append(self.border.sentence())
            if self.border_cause:
                lines.append(f"It comes from {self.border_cause.sentence()}")
            elif self.border.state == "worse":
                lines.append("No single cause puts it there; --explain tries what servers do to masks, one at a time.")
        lines += [f"{finding.share:.1%} of the error: {finding.sentence()}" for finding in self.findings]
        if self.explained is not None and self.explained < _EXPLAINED:
            lines.append(
                f"Unexplained: {1 - self.explained:.0%} of the error stays with every tensor put back to the "
                "reference's; it is not in the weights."
            )
        sizes = f"velocity {full.velocity:.2%}"
        sizes += f", finished latents {full.latents:.2%}" if math.isfinite(full.latents) else ""
        sizes += f", decoded image {full.image:.2%}" if math.isfinite(full.image) else ""
        return [*lines, f"Off by: {sizes}."]


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
    return Verdict(tuple(findings), full.border, _on_the_border(full, attributions))


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
    """Return the cause that alone puts the error on the border, or without which it is no longer there."""
    if full.border is None or full.border.state != "worse":
        return None
    alone = [(each.alone.border.worst, each) for each in attributions if each.alone.border and _worse(each.alone)]
    if alone:
        figure, best = max(alone, key=lambda pair: pair[0].times)
        return Finding(best.cause, math.nan, (), f"alone it gives {figure.words()}")
    name = full.border.worst.name
    without = [
        (_figure(each.without, name), each) for each in attributions if each.without and not _worse(each.without)
    ]
    found = [(figure, each) for figure, each in without if figure]
    if not found:
        return None
    figure, best = min(found, key=lambda pair: pair[0].times)
    return Finding(best.cause, math.nan, (), f"without it there is {figure.words()}")


def _worse(differences: Differences) -> bool:
    return differences.border is not None and differences.border.state == "worse"


def _figure(differences: Differences, name: str) -> BorderFigure | None:
    figures = differences.border.figures if differences.border else ()
    return next((figure for figure in figures if figure.name == name), None)


def _alone(each: Attribution) -> str:
    return f"alone it puts the output {each.alone.error:.2%} off"


def _names(rows: Sequence[LayerRow]) -> tuple[str, ...]:
    return tuple(row.name for row in rows)
