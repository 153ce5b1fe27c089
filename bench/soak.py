"""A long run of the tiniest model with everything switched on: do memory and open files stay where they are?

    python bench/soak.py --steps 4000

Saves with states and their rotation, samples, validation, an average of the weights, two worker processes, epochs of
three batches. Every half second the resident memory of the process and of its workers and the number of its open files
are noted beside the step; the report compares the second quarter with the last.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from library.config import load_config
from tests.runs import arguments, write_base, write_dataset
from train_lora import train

_SECONDS = 0.5
_PAGE = 4096


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
    children = Path("/proc/self/task").glob("*/children")
    workers = sum(_resident(child) for file in children for child in file.read_text().split())
    return Reading(step, _resident("self"), workers, len(list(Path("/proc/self/fd").iterdir())))


def _resident(process: str) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0


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

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        train(load_config(arguments(base, data, folder / "output", **settings)))
    finally:
        over.set()
        watching.join()
    return [reading for reading in readings if reading.step > 0]


def quarters(readings: Sequence[Reading]) -> tuple[list[Reading], list[Reading]]:
    """Return the readings of the second quarter of the steps and of the last: what a run settles to comes before."""
    last = max(reading.step for reading in readings)
    second = [reading for reading in readings if last / 4 <= reading.step < last / 2]
    return second, [reading for reading in readings if reading.step >= last * 3 / 4]


def main() -> None:
    """Soak, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        before, after = quarters(soak(Path(folder), steps))
    print(f"{steps} steps, {len(before)} readings in the second quarter of them, {len(after)} in the last")
    for name, unit in (("memory", 2**20), ("workers", 2**20), ("files", 1)):
        one, other = (np.array([getattr(reading, name) for reading in part]) / unit for part in (before, after))
        medians = f"median {np.median(one):.1f} -> {np.median(other):.1f}"
        print(f"{name:<8} {medians}, largest {one.max():.1f} -> {other.max():.1f}")


if __name__ == "__main__":
    main()
