"""Who paints which of the pictures of general prompts."""

from __future__ import annotations

from pathlib import Path

from library.training.sampling.painting import PaintedSet, missing_of
from library.training.sampling.prompts import SamplePrompt


def test_processes_that_look_at_different_times_leave_no_picture_out(tmp_path: Path) -> None:
    folders = [tmp_path / "regularisation", tmp_path / "general"]
    sets = {f.name: PaintedSet(f, [SamplePrompt(f"{f.name} {i}") for i in range(5)]) for f in folders}
    first = missing_of(sets, 0, 2)
    folders[0].mkdir()
    first[0][0].touch()  # painted before the other process looks
    second = missing_of(sets, 1, 2)
    assert {path for path, _ in (*first, *second)} == {path for each in sets.values() for path in each.paths}
    assert len(first) + len(second) == 10
    assert [prompt.prompt for path, prompt in second if path.parent.name == "general"] == [
        "general 0",
        "general 2",
        "general 4",
    ]
    assert len(missing_of(sets)) == 9
