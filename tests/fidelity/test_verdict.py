"""What is the headline, what an alarm, what is advised first: of causes whose shares of the error are planted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from library.fidelity.border import Border, BorderFigure
from library.fidelity.comparison import Comparison
from library.fidelity.differences import Differences
from library.fidelity.distilled import Distilled, StrengthRow
from library.fidelity.findings import WORTH_MENDING, Finding
from library.fidelity.fixes import Fix
from library.fidelity.intervals import Share, ratio_interval
from library.fidelity.layers import LayerRow
from library.fidelity.remedies import Remedy, in_order, of_findings
from library.fidelity.runs import Outcome
from library.fidelity.serving import Variant
from library.fidelity.verdict import Attribution, Verdict, judge


def differences(by_image: list[float]) -> Differences:
    """An error of that square on each image, the reference's size being 1."""
    size = math.sqrt(max(0.0, sum(by_image)) / len(by_image))
    return Differences(size, math.nan, math.nan, None, tuple(by_image))


def layer(number: int, retention: float | None, error: float = 0.025, effect: float = 0.024) -> LayerRow:
    return LayerRow(f"blocks.{number}", "", 4096, error, error, False, "", retention, 0.5, effect, 1.0, 9.0)


def judged(
    shares: Mapping[str, float], images: int = 8, spread: float = 0.05, seed: int = 0,
    faults: tuple[Finding, ...] = (), retention: float | None = None,
) -> Verdict:  # fmt: skip
    """Judge causes that make those shares of the squared error, give or take ``spread`` an image."""
    random = np.random.default_rng(seed)
    by_image = {
        cause: [share * float(np.exp(random.normal(0, spread))) for _ in range(images)]
        for cause, share in shares.items()
    }
    if {"merge", "weights"} <= shares.keys():  # measured with the weights' own rounding in it
        by_image["merge"] = [a + b for a, b in zip(by_image["merge"], by_image["weights"], strict=True)]
    full = differences([sum(errors) for errors in zip(*by_image.values(), strict=True)])
    causes = [Attribution(cause, cause, differences(errors), None) for cause, errors in by_image.items()]
    rows = [layer(number, retention) for number in range(52)]
    return judge(Variant(weights=True), full, causes, Comparison(rows, [], faults, 1.0, {}))


def test_rounding_alone_and_a_trace_of_something_else_are_no_alarm() -> None:
    for shares in ({"weights": 1.0}, {"weights": 0.7, "merge": 0.3}, {"weights": 0.98, "blank": 0.02}):
        verdict = judged(shares)
        assert not verdict.alarm
        assert verdict.headline.startswith("No defect")
        assert verdict.main.cause == "weights"


def test_the_largest_real_cause_is_the_headline_and_its_remedy_the_first() -> None:
    verdict = judged({"weights": 0.06, "blank": 0.74, "guidance": 0.2})
    assert verdict.alarm
    assert verdict.headline == "Look here first: the region is blanked with another colour."
    assert [each.cause for each in verdict.certain] == ["blank", "guidance"]
    files = Remedy("serve another file", makes="model", takes_off=verdict.rounding)
    small = Remedy("load it otherwise", takes_off=Share(0.01))
    found = in_order([small, files, *of_findings(verdict)], verdict.main.cause)
    assert [each.cause for each in found] == ["blank", "guidance", ""]
    assert f"takes off {verdict.main.share:.0%} of the error" in found[0].words
    assert not in_order([Remedy("made it worse", takes_off=Share(-0.06, -0.2, 0.08))], "blank")
    assert verdict.main.share == pytest.approx(0.74, abs=0.02)  # 0.05 an image, 8 images


def test_a_cause_that_hides_behind_a_larger_one_is_mended_too() -> None:
    verdict = judged({"weights": 0.01, "blank": 0.974, "lora_without": 0.015, "guidance": 0.0001})
    assert [each.cause for each in verdict.certain] == ["blank"]
    assert [each.cause for each in verdict.hidden] == ["lora_without"]
    assert not judged({"weights": 0.985, "lora_without": 0.015}).hidden


@pytest.mark.parametrize("cause", ["weights", "merge", "paste"])
def test_the_border_is_an_alarm_unless_rounding_alone_puts_it_there(cause: str) -> None:
    step = BorderFigure("step", 4.6, 2.0, 2.3, 2.0, 2.7, (2.0, 2.2, 2.7))
    worse = replace(differences([1.0] * 8), border=Border((step,), 8, 2.4))
    same = replace(differences([0.2] * 8), border=Border((replace(step, times=1.0, low=0.9, high=1.1),), 8, 2.4))
    causes = [Attribution(each, each, worse if each == cause else same, None) for each in ("weights", "merge", "paste")]
    rows = [layer(number, None) for number in range(8)]
    verdict = judge(Variant(weights=True), worse, causes, Comparison(rows, [], (), 1.0, {}))
    assert verdict.border_cause is not None
    assert verdict.border_cause.cause == cause
    rounding = judge(Variant(weights=True), worse, causes[:2], Comparison(rows, [], (), 1.0, {}))
    assert rounding.alarm == (cause == "paste")  # then nothing of the two puts it there
    assert ("it shows along the mask's border" in rounding.headline) == (cause != "paste")


@pytest.mark.parametrize("images", [1, 2, 4, 8, 30])
def test_a_share_whose_interval_has_both_sides_is_never_worded_as_yes_or_no(images: int) -> None:
    seen = set()
    for seed in range(40):
        share = 10 ** np.random.default_rng(seed).uniform(-2.5, -0.1)
        verdict = judged({"weights": 1 - share, "blank": share}, images, spread=0.6, seed=seed)
        found = next(each for each in verdict.findings if each.cause == "blank")
        seen.add(found.size)
        assert verdict.alarm == (found.size == "real")
        if not math.isnan(found.low) and found.low <= WORTH_MENDING <= found.high:
            assert found.size == "cannot tell"
        if found.size == "cannot tell":
            assert f"{images} image{'s' * (images > 1)} cannot tell whether this matters" in verdict.headline
            assert "images would" in verdict.headline
            assert "No defect" not in verdict.headline
    assert seen == {"real", "small", "cannot tell"}


def test_a_file_that_is_provably_wrong_stays_an_alarm_and_says_that_its_effect_is_small() -> None:
    wrong = Finding("wrong_scale", 0.001, ("blocks.0.weight",), "times 2", exact=True)
    verdict = judged({"weights": 1.0}, faults=(wrong,))
    assert verdict.alarm
    assert verdict.headline == "Look here first: tensors with a wrong scale (its effect is small here)."
    assert "small here" in verdict.main.claim()
    verdict = judged({"weights": 0.1, "blank": 0.9}, faults=(wrong,))
    assert verdict.main.cause == "blank"
    assert verdict.main.size == "real"


@pytest.mark.parametrize(
    ("retention", "cause"),
    [(0.15, "delta_lost"), (0.5, "delta_lost"), (0.95, "merge"), (0.87, "merge"), (1.0, "merge")],
)
def test_an_update_is_called_lost_where_that_is_a_real_part_of_what_the_layers_err(
    retention: float, cause: str
) -> None:
    """nvfp4 leaves 0.95 of it in the median layer and 0.87 in the worst: next to its own error that is nothing."""
    verdict = judged({"weights": 0.5, "merge": 0.5}, retention=retention)
    assert next(each for each in verdict.findings if each.cause in ("merge", "delta_lost")).cause == cause
    assert verdict.alarm == (cause == "delta_lost")


@pytest.mark.parametrize("kept", [0.3, 0.9, 1.0, 1.5])
def test_whether_a_fix_helps_is_yes_no_or_so_many_images_more(kept: float) -> None:
    random = np.random.default_rng(5)
    before, after = differences([1.0] * 6), differences([kept * float(np.exp(random.normal(0, 0.3))) for _ in range(6)])
    said = Fix("refit", "", 1.0, (), replace(after, latents=0.1), Outcome()).helps(before)
    low, high = ratio_interval([1 - each for each in after.by_image], before.by_image)
    assert said == ("yes" if low > 0 else "no" if high < 0 else said)
    assert ("cannot tell" in said) == (low <= 0 <= high)
    assert (said == "yes") == (kept == 0.3)
    alone = Fix("refit", "", 1.0, (), differences([kept]), Outcome()).helps(differences([1.0]))
    assert alone == "1 image cannot tell, 8 or more images would"


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.4, 0.6, "weaker"), (1.1, 1.3, "stronger"), (0.99, 1.01, "as strong"), (0.95, 1.2, ""), (0.97, 0.99, ""),
        (math.nan, math.nan, ""),
    ],
)  # fmt: skip
def test_a_lora_on_a_distilled_model_is_weaker_only_if_all_of_the_interval_is(
    low: float, high: float, said: str
) -> None:
    row = StrengthRow(1.0, 0.98, 0.9, low=low, high=high)
    found = Distilled("turbo", (1.0,) * 4, 0.1, (row,), 1.0, {}, 6)
    assert row.judgement == said
    assert ("cannot tell" in found.sentence()) == (said == "")
    assert found.alarm == (said in ("weaker", "stronger"))
