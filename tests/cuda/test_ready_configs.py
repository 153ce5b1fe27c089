"""Each ready configuration at its full depth: what it says of the memory it takes is what is counted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from library.config import load_config
from library.training.memory import dry_run
from library.training.memory.budget import GIB
from library.training.memory.dry_run import plan_memory
from library.training.memory.policy import room_in
from library.training.tasks.image_lora import ImageLora
from tests.cuda.device import FakeDevice

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*_lora*.toml"))


@pytest.mark.slow  # test_plan_memory and test_dry_run count smaller models
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_ready_configuration_takes_what_it_says(
    path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it fits into the card that its name says, with a GiB to spare."""
    monkeypatch.setattr(dry_run, "device_processes", device.processes)
    stated = re.search(r"^# Takes ([\d.]+) GiB", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert stated, f"{path.name}: say what it takes, as tools/plan_memory.py counts it"
    config = load_config(["--config_file", str(path)])
    plan = plan_memory(ImageLora, config)
    assert plan.source == "fake device"
    assert plan.peak / GIB == pytest.approx(float(stated[1]), abs=0.11)
    if card := re.search(r"_(\d+)gb$", path.stem):
        assert plan.peak <= room_in(int(card[1]) * GIB)
