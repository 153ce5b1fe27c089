"""Do memory and open files stay where they are in a run of thousands of steps, with everything switched on?

Saves with states and their rotation, samples, validation, an average of the weights, two worker processes, epochs of
three batches. Every half second the resident memory of the process and of its workers and the number of its open files
are noted beside the step; the second quarter is compared with the last.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
import pytest

from library.config import load_config
from tests.runs import arguments, write_base, write_dataset
from train_lora import train

_SECONDS = 0.5


@dataclass(frozen=True)
class Reading:
    """What a process holds at one moment."""

    step: int
    memory: int  # bytes, resident
    workers: int  # bytes, resident, of its children together
    files: int  # open file descriptors


def read_process(output: Path) -> Reading:
    """Return what this process holds now; the step is that of the last line of the metrics."""
    try:
        step = (output / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        step = 0
    this, workers = psutil.Process(), 0
    for child in this.children():
        with suppress(psutil.Error):  # it has just ended
            workers += child.memory_info().rss
    return Reading(step, this.memory_info().rss, workers, this.num_fds())


def soak(folder: Path, steps: int) -> list[Reading]:
    """Train ``steps`` steps in this process; return the readings of it."""
    base = write_base(folder / "base")
    data = write_dataset(folder / "data", text="batch_size = 2\nvalidation_split = 0.25\nvalidation_seed = 1")
    (folder / "prompts.txt").write_text("a disc --w 64 --h 64 --s 2\n")
    settings: dict[str, object] = {
        "max_train_steps": steps,
        "max_data_loader_n_workers": 2,
        "save_every_n_steps": 50,
        "save_last_n_steps": 100,
        "save_state": True,
        "ema_decay": 0.99,
        "sample_prompts": folder / "prompts.txt",
        "sample_every_n_steps": max(steps // 20, 1),
        "validate_every_n_steps": max(steps // 20, 1),
        "learning_rate": 1e-4,
    }
    readings: list[Reading] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_SECONDS):
            readings.append(read_process(folder / "output"))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        train(load_config(arguments(base, data, folder / "output", **settings)))
    finally:
        over.set()
        thread.join()
    return [reading for reading in readings if reading.step > 0]


def quarters(readings: Sequence[Reading]) -> tuple[list[Reading], list[Reading]]:
    """Return the readings of the second quarter of the steps and of the last: what a run settles to comes before."""
    last = max(reading.step for reading in readings)
    second = [reading for reading in readings if last / 4 <= reading.step < last / 2]
    return second, [reading for reading in readings if reading.step >= last * 3 / 4]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_memory_and_open_files_stay_where_they_are(tmp_path: Path) -> None:
    before, after = quarters(soak(tmp_path, 3000))
    assert len(before) > 10
    assert len(after) > 10
    # A reading may fall into a moment in which data workers start, more often on a busy machine: a leak only grows.
    assert median(r.files for r in after) <= median(r.files for r in before)
    assert max(r.files for r in after) <= max(r.files for r in before) + 4  # files open for a moment
    for part in ("memory", "workers"):
        growth = median(getattr(r, part) for r in after) - median(getattr(r, part) for r in before)
        assert growth < 16 * 2**20, f"{part} grew by {growth / 2**20:.1f} MiB"  # 1500 steps of a leak of 11 KiB each
