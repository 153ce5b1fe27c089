"""What makes the difference between a deployment and the reference: one cause at a time, and rules that name it.

Two questions are kept apart. *What makes the error?* is answered by size: each cause alone, and all without it. *What
puts it on the border?* is answered by the figures of ``border``, of each cause alone: a cause may change little in all
and everything there.

What is wrong with the weights is named by ``tensors``, and its shares are measured by ``comparison``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from library.errors import counted
from library.fidelity.border import Border, BorderFigure
from library.fidelity.comparison import Comparison
from library.fidelity.differences import Differences
from library.fidelity.findings import CAUSES, WORTH_MENDING, Finding
from library.fidelity.intervals import Share, images_to_tell, ratio_interval
from library.fidelity.layers import LayerRow
from library.fidelity.serving import Variant
from library.precision.parity.layer_errors import FLAGGED

_REST = 0.01  # of the weights' error, below which rounding is not worth a line beside a fault
_EXPLAINED = 0.99


@dataclass(frozen=True)
class Attribution:
    """One cause: what it is in words, the differences with it alone, and of the deployment without it."""

    cause: str
    words: str
    alone: Differences
    without: Differences | None


NORMAL = ("weights", "merge", "modulation_in_fp8")  # rounding as it must be, and a choice: the price of the format
_ROUNDING = ("weights", "modulation_in_fp8", "embedders_in_fp8", "sensitive_layer")


@dataclass(frozen=True)
class Verdict:
    """What the numbers name.

    Attributes:
        findings: causes by their share of the error.
        border: whether the error lies along the mask's border; None without masks or images.
        border_cause: what puts it there; None where nothing does, or no single cause.
        explained: share of the weights' squared velocity error that is gone with every compared tensor put back; None
            where the reference's weights run.
        normal: causes that are no defects, the price of the format.
        shares: cause of a run -> what it makes of the error. images: that they are measured on.
    """

    findings: tuple[Finding, ...]
    border: Border | None
    border_cause: Finding | None
    explained: float | None = None
    normal: tuple[str, ...] = NORMAL
    shares: Mapping[str, Share] = field(default_factory=dict)
    images: int = 0

    @property
    def defects(self) -> tuple[Finding, ...]:
        """What is no honest rounding."""
        return tuple(each for each in self.findings if each.cause not in self.normal)

    @property
    def certain(self) -> tuple[Finding, ...]:
        """Defects that make a real part of the error, or of a file that is provably wrong, by their share."""
        return tuple(each for each in self.defects if each.exact or each.size == "real")

    @property
    def uncertain(self) -> tuple[Finding, ...]:
        """Defects of which so few images cannot tell whether they make a real part of the error."""
        return tuple(each for each in self.defects if not each.exact and each.size == "cannot tell")

    @property
    def hidden(self) -> tuple[Finding, ...]:
        """Defects that are small beside the certain ones, and make a real part of what those leave when mended."""
        limit = WORTH_MENDING * (1 - sum(each.share for each in self.certain))
        small = (each for each in self.defects if each not in self.certain)
        return tuple(each for each in small if Share(each.share, each.low, each.high).side(limit) == "above")

    @property
    def alarm(self) -> bool:
        """Whether there is anything to mend; rounding that shows along the border is the format's price there, too."""
        by_rounding = self.border_cause is not None and self.border_cause.cause in self.normal
        return bool(self.certain) or (self._at_the_border and not by_rounding)

    @property
    def _at_the_border(self) -> bool:
        return self.border is not None and self.border.state == "worse"

    @property
    def main(self) -> Finding:
        """What to look at first: what is at the border but rounding, then the defect, then the largest rounding."""
        if self.border_cause and self.border_cause.cause not in self.normal:
            return self.border_cause
        rounding = tuple(each for each in self.findings if each.cause in self.normal)
        return (self.certain or self.uncertain or rounding or self.findings)[0]

    @property
    def rounding(self) -> Share:
        """What rounding the weights makes of the error: a better format, or a LoRA fitted to it, can take off that."""
        share = self.shares.get("weights", Share(0.0))
        found = sum(each.share for each in self.findings if each.cause in _ROUNDING)
        return share.times(found / share.value) if share.value else share

    @property
    def headline(self) -> str:
        """What to do first, that there is nothing to mend, or that so few images cannot tell."""
        main, images = self.main, counted(self.images, "image")
        if self.alarm:
            small = " (its effect is small here)" if main.exact and main.size == "small" else ""
            return f"Look here first: {CAUSES[main.cause]}{small}."
        if self.uncertain:
            return f"{images} cannot tell whether this matters: {CAUSES[main.cause]}; {self.images_wanted(main)} would."
        if self.border is not None and self.border.state == "cannot tell":
            return f"Only rounding found so far; run {self.border.images_wanted} to judge the mask's border."
        also = "; it shows along the mask's border" if self._at_the_border else ""
        return f"No defect: only rounding separates the served model from the original{also}."

    def images_wanted(self, finding: Finding) -> str:
        """Return how many images would tell whether a finding makes a real part of the error, in words."""
        return images_to_tell(self.images, finding.share, finding.low, finding.high, WORTH_MENDING)

    def on_the_border(self, has_server_image: bool) -> list[str]:
        """Return what there is to say about the border; nothing without one.

        ``has_server_image``: a picture that the server painted is explained beside it.
        """
        lines = [self.border.sentence()] if self.border else []
        if self.border_cause:
            lines.append(f"What puts it there: {self.border_cause.claim()}")
        elif self._at_the_border:
            more = "give a picture that the server painted (--server_image)"
            more = "see what explains the picture that the server painted" if has_server_image else more
            lines.append(f"No single cause puts it there; {more}.")
        return lines

    def unexplained(self) -> str:
        """Return what no tensor explains, in words; empty where they explain the error."""
        if self.explained is None or self.explained >= _EXPLAINED:
            return ""
        return (
            f"{1 - self.explained:.0%} of the error stays with every tensor put back to the reference's; it is not in "
            "the weights."
        )

    def sizes(self, full: Differences) -> str:
        """Return how far off the deployment is."""
        sizes = {"one step of the model": full.velocity, "the finished latents": full.latents, "pictures": full.image}
        return ", ".join(f"{name} by {size:.2%}" for name, size in sizes.items() if math.isfinite(size))


def judge(
    variant: Variant,
    full: Differences,
    attributions: Sequence[Attribution],
    comparison: Comparison,
) -> Verdict:
    """Return what makes the difference.

    Args:
        variant: the deployment.
        full: its differences.
        attributions: one for each of its causes.
        comparison: of the deployed tensors with the reference's.
    """
    sizes, shares, layers = _squared_errors(attributions), _shares(attributions), comparison.layers
    findings: list[Finding] = []
    for each in attributions:
        share = shares[each.cause]
        if each.cause == "weights":
            findings += _in_weights(share, comparison, each.alone.error)
        elif each.cause == "merge":
            findings.append(_in_merge(share, layers, math.sqrt(sizes["merge"])))
        elif each.cause == "activations":
            findings.append(_in_activations(share, each, comparison))
        else:
            findings.append(Finding(each.cause, math.nan, (), f"{each.words}; {_alone(each)}").with_share(share))
    unfit = _unfit(layers, comparison.input_scales)
    if unfit and not comparison.used_scales.keys() & {*unfit}:
        text = f"{len(unfit)} layers are given more than the file's scale can hold, or far less ({unfit[0]}); a server "
        text += "that multiplies in fp8 uses them (--activations static shows what it paints)"
        gross = bool(_unfit(layers, comparison.input_scales, gross=True))
        findings.append(Finding("activation_scale", 0.0, unfit, text, 0.0, 0.0, exact=gross))
    findings.sort(key=lambda finding: -finding.share)
    explained = comparison.explained if variant.weights else None
    return Verdict(
        tuple(findings),
        full.border,
        _named(_on_the_border(full, attributions), findings),
        explained,
        (*NORMAL, "activations") if variant.activations == "auto" else NORMAL,
        shares,
        len(full.by_image),
    )


def _squared_errors(attributions: Sequence[Attribution]) -> dict[str, float]:
    """Return each cause's squared error; a merge is rounded into fp8 weights, whose own error is not its doing."""
    sizes = {each.cause: each.alone.error**2 for each in attributions}
    if "merge" in sizes and "weights" in sizes:
        sizes["merge"] = max(0.0, sizes["merge"] - sizes["weights"])
    return sizes


def _shares(attributions: Sequence[Attribution]) -> dict[str, Share]:
    """Return what each cause makes of the squared error, with intervals over images."""
    sizes, by_image = _squared_errors(attributions), {each.cause: each.alone.by_image for each in attributions}
    if "merge" in by_image and "weights" in by_image:
        pairs = zip(by_image["merge"], by_image["weights"], strict=True)
        by_image["merge"] = tuple(merge - weights for merge, weights in pairs)
    total, wholes = sum(sizes.values()) or 1.0, [sum(parts) for parts in zip(*by_image.values(), strict=True)]
    return {cause: Share(size / total, *ratio_interval(by_image[cause], wholes)) for cause, size in sizes.items()}


def _in_weights(share: Share, comparison: Comparison, error: float) -> list[Finding]:
    """Return what is wrong with the weights, by measured shares, and what is left of them: rounding."""
    together = max(1.0, sum(max(0.0, finding.share) for finding in comparison.findings))  # put back one at a time
    faults = [each.with_share(share.times(max(0.0, each.share) / together)) for each in comparison.findings]
    left = max(0.0, share.value * comparison.explained - sum(finding.share for finding in faults))
    if faults and left < _REST * share.value:
        return faults
    rest = share.times(left / share.value) if faults and share.value else share
    off = error * math.sqrt(rest.value / share.value) if share.value else error
    tensor = "no other tensor" if any(each.cause not in _ROUNDING for each in faults) else "no tensor"
    text = f"{tensor} is off by more than its format's rounding, which alone changes what the model makes by {off:.1%}"
    return [*faults, Finding("weights", math.nan, (), text).with_share(rest)]


def _in_merge(share: Share, layers: Sequence[LayerRow], error: float) -> Finding:
    """Blame the update that was rounded away where it is a real part of what the layers err; else rounding it is."""
    merged = [row for row in layers if row.retention is not None]
    gains = [row.retention or 0.0 for row in merged]
    lost = [row for row in merged if row.lost]
    missing = sum(((1 - (row.retention or 0.0)) * (row.lora_effect or 0.0)) ** 2 for row in lost)
    left = f"the median layer keeps {median(gains):.2f} of the update" if gains else ""
    if missing <= WORTH_MENDING * sum(row.output_error**2 for row in merged):
        text = f"beyond the weights' own rounding it changes what the model makes by {error:.1%}"
        return Finding("merge", math.nan, (), f"{text}; {left}" if left else text).with_share(share)
    worst = min(lost, key=lambda row: row.retention or 0.0)
    text = f"{len(lost)} of {len(merged)} layers hold less than {FLAGGED:.0%} of the update: {left}, "
    text += f"{worst.retention:.2f} in the worst ({worst.name})"
    return Finding("delta_lost", math.nan, tuple(row.name for row in lost), text).with_share(share)


def _in_activations(share: Share, each: Attribution, comparison: Comparison) -> Finding:
    """Blame the scale where it clips what the layers are given, or is far too coarse for it."""
    if unfit := _unfit(comparison.layers, comparison.used_scales):
        text = f"{len(unfit)} layers are given more than their scale can hold, or far less ({unfit[0]})"
        gross = bool(_unfit(comparison.layers, comparison.used_scales, gross=True))
        found = Finding("activation_scale", math.nan, unfit, f"{each.words}: {text}; {_alone(each)}", exact=gross)
        return found.with_share(share)
    return Finding("activations", math.nan, (), f"{each.words}; {_alone(each)}").with_share(share)


def _unfit(layers: Sequence[LayerRow], scales: Mapping[str, float], gross: bool = False) -> tuple[str, ...]:
    """Return the layers whose inputs are clipped by their scale in e4m3fn, or vanish among its subnormals.

    ``gross``: those alone where it is the usual number that is clipped, not the largest.
    """
    unfit = []
    for row in layers:
        scale = scales.get(row.name)
        if scale is None or not row.input_rms:
            continue
        most = row.input_rms if gross else 0.9 * row.largest_input
        if 448 * scale < most or 2**-6 * scale > row.input_rms:
            unfit.append(row.name)
    return tuple(unfit)


def _on_the_border(full: Differences, attributions: Sequence[Attribution]) -> Finding | None:
    """Return the cause that alone puts the error on the border, or without which it is no longer there."""
    if full.border is None or not is_worse(full):
        return None
    alone = [(each.alone.border.worst, each) for each in attributions if each.alone.border and is_worse(each.alone)]
    if alone:
        figure, best = max(alone, key=lambda pair: (pair[1].cause not in NORMAL, pair[0].times))
        return Finding(best.cause, math.nan, (), f"with it alone {figure.in_short()}")
    name = full.border.worst.name
    mended = [each for each in attributions if each.without and not is_worse(each.without)]
    found = [(left, each) for each in mended if (left := _figure(each.without, name))]
    if not found:
        return None
    figure, best = min(found, key=lambda pair: pair[0].times)
    return Finding(best.cause, math.nan, (), f"without it {figure.in_short()}")


def _named(border: Finding | None, findings: Sequence[Finding]) -> Finding | None:
    """Return what is at the border by its own name: of weights that are not just rounded, what is wrong with them."""
    wrong = [each for each in findings if each.layers and each.cause not in NORMAL and each.size != "small"]
    if border is None or border.cause not in NORMAL or not wrong:
        return border
    worst = max(wrong, key=lambda finding: finding.share)
    return replace(worst, share=math.nan, evidence=f"{worst.evidence}; with the weights alone: {border.evidence}")


def is_worse(differences: Differences) -> bool:
    """Return whether the border is worse than honest rounding makes it."""
    return differences.border is not None and differences.border.state == "worse"


def _figure(differences: Differences | None, name: str) -> BorderFigure | None:
    figures = differences.border.figures if differences and differences.border else ()
    return next((figure for figure in figures if figure.name == name), None)


def _alone(each: Attribution) -> str:
    return f"alone it puts the output {each.alone.error:.2%} off"
