"""The report names what is planted in a deployment of the built-in fill model, and nothing where nothing is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fidelity.planted_faults import prepare
from tests.fidelity.report_faults import FAULTS, Answer, Fault, ask, examine, judge, ratios_of

QUICK = ("--images", "1", "--steps", "2", "--sigmas", "0.6")
CHOSEN = (
    "scale of one layer times 2",
    "row scales rolled by one",
    "weight transposed (square)",
    "rows permuted",
    "truncated instead of rounded (cast)",
    "subnormals flushed",
    "a quarter in e5m2 (scaled)",
    "modulation biases zeroed",
    "LoRA merged at 0.5",
    "merged without the single blocks",
    "LoRA in the file and beside it",
    "guidance ignored, declared",
    "mask snapped to cells, declared",
    "clean: row",
    "clean: copy",
    "clean: merged: row, nearest at 1",
)
# of weights, of the LoRA, of what is declared, and nothing: in every test run
SAMPLE = ("row scales rolled by one", "LoRA merged at 0.5", "guidance ignored, declared", "clean: row")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    prepare(folder, steps=0)
    return folder


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=() if fault.name in SAMPLE else pytest.mark.slow)
        for fault in FAULTS
        if fault.name in CHOSEN
    ],
)
def test_what_was_planted_is_named_and_what_is_clean_is_not(
    fault: Fault, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("library.fidelity.page.as_data_uri", lambda *_: "")  # figures take a third of the time
    answer = ask(fault, place, tmp_path, QUICK)
    expected = "normal" if fault.section == "clean" else "wholly"
    assert judge(fault, answer) == expected, answer.words or answer.refusal


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a hundred reports
def test_nine_in_ten_listed_faults_are_named_wholly_none_is_called_normal_and_no_clean_one_alarms(place: Path) -> None:
    found = ratios_of([examine(fault, place) for fault in FAULTS])
    assert found["listed_named_wholly"] >= 0.9
    assert found["listed_called_normal"] == found["further_called_normal"] == found["false_alarms"] == 0


def answer(cause: str, title: str, evidence: str, layers: tuple[str, ...] = (), share: float = 1.0) -> Answer:
    finding = {"cause": cause, "title": title, "evidence": evidence, "layers": layers, "remedy": "Make it again"}
    return Answer({"cause": cause, "alarm": cause != "weights", "findings": [finding | {"share": share}]})


def test_a_verdict_is_judged_by_its_words_alone() -> None:
    fault = Fault("scale", lambda place, folder: place, "scale", ("blocks.0", r"\b2\b"), "again")
    assert judge(fault, answer("any", "a wrong scale", "blocks.0 times 2")) == "wholly"
    assert judge(fault, answer("any", "a wrong scale", "times 2", ("blocks.0",))) == "wholly"
    assert judge(fault, answer("any", "a wrong scale", "blocks.0 times 3")) == "partly"
    assert judge(fault, answer("any", "a damaged layer", "blocks.0")) == "partly"
    assert judge(fault, answer("any", "a damaged layer", "blocks.1")) == "not"
    assert judge(fault, answer("any", "a small scale", "blocks.1", share=0.01)) == "partly"
    assert judge(fault, answer("weights", "rounding", "as the format must")) == "normal"
    assert judge(fault, Answer(refusal="file: scale of blocks.0 is 2")) == "wholly"
    assert judge(fault, Answer(refusal="it did not work")) == "refused"
