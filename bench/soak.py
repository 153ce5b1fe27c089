"""A long run of the tiniest model with everything switched on: do memory and open files stay where they are?

    python bench/soak.py --steps 4000

Saves with states and their rotation, samples, validation, an average of the weights, two worker processes, epochs of
three batches. Every half second the resident memory of the process and of its workers and the number of its open files
are noted beside the step; the report compares the second quarter with the last.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from bench.measure import Table, benchmark_parser, finish, watched
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
    with watched(partial(read_process, folder / "output"), _SECONDS) as readings:
        train(load_config(arguments(base, data, folder / "output", **settings)))
    return [reading for reading in readings if reading.step > 0]


def quarters(readings: Sequence[Reading]) -> tuple[list[Reading], list[Reading]]:
    """Return the readings of the second quarter of the steps and of the last: what a run settles to comes before."""
    last = max(reading.step for reading in readings)
    second = [reading for reading in readings if last / 4 <= reading.step < last / 2]
    return second, [reading for reading in readings if reading.step >= last * 3 / 4]


def main() -> None:
    """Train, print what was held, write JSON if asked."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        quarter = quarters(soak(Path(folder), options.steps))
    table, ratios = Table({"held": "<8", "second_median": "13.1f", "last_median": "11.1f", "last_most": "9.1f"}), {}
    for name, unit in (("memory", 2**20), ("workers", 2**20), ("files", 1)):
        second, last = ([getattr(reading, name) / unit for reading in part] for part in quarter)
        table.add({"held": name, "second_median": median(second), "last_median": median(last), "last_most": max(last)})
        ratios[f"{name}_last_over_second"] = median(last) / max(median(second), 1)
    finish(table.rows, ratios, options.json)


if __name__ == "__main__":
    main()
