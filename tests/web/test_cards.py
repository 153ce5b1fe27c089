"""What the GPUs do, as a stand-in for nvidia-smi says: shown where it answers, never waited for."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from library.web.jobs import Jobs
from tests.web.page import Tab, expect, get, serve, until

pytestmark = pytest.mark.slow
TWO = "0, NVIDIA A, 87, 71, 20480, 24576\n1, NVIDIA B, [N/A], 35, [N/A], [N/A]\n"


def stand_in(folder: Path, body: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return program


def test_what_each_gpu_does_is_shown_and_a_run_is_given_one(
    tmp_path: Path, browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "said").write_text(TWO)
    program = stand_in(tmp_path / "bin", f"cat '{tmp_path / 'said'}'", monkeypatch)
    with serve(tmp_path) as server:
        tab = Tab(browser, server)
        tab.open()
        expect(tab.page.get_by_text("GPU 0")).to_have_text("GPU 0 87 % busy, 71 °C, 20.0 of 24 GiB")
        expect(tab.page.get_by_text("GPU 1")).to_have_text("GPU 1 35 °C")
        (tmp_path / "said").write_text(TWO.replace("87", "12"))
        expect(tab.page.get_by_text("GPU 0")).to_contain_text("12 % busy")
        tab.open("/new")
        choice = tab.page.get_by_label("GPU", exact=False).locator("option")
        expect(choice).to_have_text(
            ["all of them", "0: NVIDIA A, 12 % busy, 71 °C, 20.0 of 24 GiB", "1: NVIDIA B, 35 °C"]
        )
        # a job sees the GPU that it was given, as its program and not the page does
        jobs = Jobs(server.output / ".tandem")
        names = ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"]
        code = f"import json, os; print(json.dumps([*map(os.environ.get, {names})]))"
        given = jobs.add("train", "one", ["-c", code], card="1")
        free = jobs.add("train", "all", ["-c", code])
        until(lambda: jobs.get(given.id).is_over and jobs.get(free.id).is_over)
        assert json.loads(given.log) == ["1", "PCI_BUS_ID"]
        assert json.loads(free.log)[0] == os.environ.get("CUDA_VISIBLE_DEVICES")
        # one that hangs holds up no screen, and what it said before is not shown for long
        program.write_text("#!/bin/sh\nsleep 1000\n")
        tab.open()
        for _ in range(5):
            begun = time.monotonic()
            assert get(server, "/gpus")[0] == get(server, "/new")[0] == 200
            assert time.monotonic() - begun < 5
        expect(tab.page.get_by_text("GPU 0")).to_have_count(0)
        tab.close()


@pytest.mark.parametrize("body", ["echo 'NVIDIA-SMI has failed'; exit 9", "printf '\\377\\n0, x\\n'", "exit 0"])
def test_a_program_that_says_something_else_shows_nothing(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from library.web import cards

    stand_in(tmp_path / "bin", body, monkeypatch)
    monkeypatch.setattr(cards, "_answer", (-1e9, []))
    assert cards.cards() == []
    until(lambda: cards._answer[0] > 0, seconds=20)
    assert cards.cards() == []
