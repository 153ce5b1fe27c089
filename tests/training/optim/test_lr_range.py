"""The watch over d, and the learning rate range test."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from library.config import load_config
from library.errors import UserError
from library.training.optim.lr_range import RangeTest
from library.training.optim.lr_tracker import StepSizeMonitor
from tests.runs import ROOT, arguments, run
from tools.lr_range_test import range_test


def test_a_d_that_never_leaves_d0_is_told_once_with_the_step(
    base: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # the estimate is multiplied by d_coef: this one holds it below d0, as noise in every gradient would
    run(
        base, dataset, tmp_path, optimizer_type="Prodigy", learning_rate=1.0, max_train_steps=53,
        optimizer_args=["d_coef=1e-9", "d0=1e-6"],
    )  # fmt: skip
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("is still 1e-06, where it began: nothing is learned; set optimizer_args d0=1e-5") == 1
    assert "warning: step 50: d of lora" in told


def test_a_d_that_settles_is_not_told(
    base: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        base, dataset, tmp_path, optimizer_type="Prodigy", learning_rate=1.0, max_train_steps=53, save_state=True,
        optimizer_args=["d0=1e-5", "use_bias_correction=True"],
    )  # fmt: skip
    assert "warning: step" not in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["d/lora"] > 2e-5  # it did leave d0


def test_a_d_without_bound_is_told_once() -> None:
    watch = StepSizeMonitor(1000, {"lora": 1e-6})
    rates = [{"d/lora": 1e-6 * 2**i, "d*lr/lora": 1e-6 * 2**i} for i in range(25)]
    told = [(i, remark) for i, rate in enumerate(rates) for remark in watch.look(i, rate)]
    ((step, remark),) = told
    assert 1e-6 * 2 ** (step - 1) <= 0.1 < 1e-6 * 2**step
    assert f"step {step}: " in remark
    assert "d_coef" in remark
    assert StepSizeMonitor(1000, {}).look(3, {"d/lora": math.nan, "d*lr/lora": math.nan})


def test_a_resumed_run_whose_d_has_settled_is_not_stuck() -> None:
    watch = StepSizeMonitor(1000, {"lora": 1e-6})
    assert [watch.look(step, {"d/lora": 3e-4, "d*lr/lora": 3e-4}) for step in (500, 600, 999)] == [[], [], []]


def test_the_suggestion_is_a_tenth_of_the_rate_at_the_lowest_loss() -> None:
    rates = [10.0 ** (-6 + i / 10) for i in range(60)]
    losses = [1 - 0.5 * math.exp(-((math.log10(rate) + 2) ** 2)) for rate in rates]  # lowest at 1e-2
    rate, reason = RangeTest(rates, losses, 1.0, True).suggestion()
    assert rate == pytest.approx(1e-3, rel=2)  # the average lags behind by less than half a decade
    assert "fastai" in reason
    assert RangeTest(rates, [1.0] * 60, 1.0, True).suggestion()[0] is None
    assert RangeTest(rates, [1 - i / 100 for i in range(60)], 1.0, False).suggestion()[0] is None


def test_the_command_draws_the_tiny_models_curve(base: Path, dataset: Path, tmp_path: Path) -> None:
    flags = arguments(base, dataset, tmp_path / "out", max_train_steps=None, learning_rate=None)
    words = [sys.executable, str(ROOT / "tools/lr_range_test.py"), *flags]
    words += ["--lr_from", "1e-4", "--lr_to", "10", "--range_steps", "20"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out" / "lr_range.jsonl").read_text().splitlines()]
    assert lines[0]["lr"] == pytest.approx(1e-4)
    ratios = {round(b["lr"] / a["lr"], 9) for a, b in pairwise(lines)}
    assert ratios == {round(1e5 ** (1 / 19), 9)}  # the same factor in every step
    assert "suggest" in done.stdout
    assert (tmp_path / "out" / "lr_range.png").stat().st_size > 10_000
    assert list((tmp_path / "out").glob("*.safetensors")) == []


@pytest.mark.parametrize(
    ("optimizer", "args"), [("Prodigy", []), ("DAdaptAdam", []), ("Adafactor", ["relative_step=True"])]
)
def test_optimizers_with_a_rate_of_their_own_are_refused(
    base: Path, dataset: Path, tmp_path: Path, optimizer: str, args: list[str]
) -> None:
    flags = arguments(
        base, dataset, tmp_path, optimizer_type=optimizer, optimizer_args=args or None, learning_rate=None
    )
    with pytest.raises(UserError, match=f"{optimizer} finds its own step size"):
        range_test(load_config(flags), 1e-6, 1.0, 10)
