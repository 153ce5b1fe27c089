"""Every script in dev/ and bench/ says what it is for, and does nothing else."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT

SCRIPTS = [
    path for folder in ("dev", "bench") for path in (ROOT / folder).glob("*.py") if "__main__" in path.read_text()
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_script_answers_help_without_running(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr("library.files._beside", lambda *_: pytest.fail("it has begun to write"))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    first_words = script.read_text().removeprefix('"""').split()[:4]
    assert first_words == capsys.readouterr().out.split("\n\n")[1].split()[:4]
