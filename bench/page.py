"""The page over many runs: how soon something is seen, and how much memory its process takes.

    python bench/page.py --json output/bench_page.json

Writes 200 runs of 10,000 steps each (their metrics.jsonl as the trainer writes them, 4 MB a run, with samples), serves
them, and opens the screens in the system's Chromium: a tab each time, nothing cached by the browser. "first paint" is
the browser's own first contentful paint, from the beginning of the navigation; "first visit" is the server's first
after its start, when it has read nothing yet. The list is then left open while one run goes on, as a person does who
waits; the memory is the process's peak after all of it. Goals: 300 ms, 200 MiB.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from PIL import Image

from bench.measure import Table, benchmark_parser, finish, resident
from library.errors import exit_on_user_error

PAINT_MS, MEMORY_MIB = 300.0, 200.0
RUNS, STEPS, ROUNDS = 200, 10_000, 5
_NUMBERS = "loss_ema grad_norm sigma_mean samples_per_s s_per_it data_wait_s lr/lora d/lora d*lr/lora peak_mem_bytes"
SCREENS = {
    "runs": "/",
    "one run": "/run?path=output/run_007",
    "four runs": "/compare?" + "&".join(f"path=output/run_{number:03}" for number in range(4)),
    **{name: f"/{name.removesuffix(' run')}" for name in ("new run", "data", "precision", "generate", "chat")},
}


def write_run(folder: Path, seed: int) -> None:
    """Write what a run leaves: metrics, settings, samples."""
    drawn = random.Random(seed)
    folder.mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, STEPS + 1):
            loss = 0.3 + 0.4 * math.exp(-step / 800) + drawn.gauss(0, 0.1)
            line = {"step": step, "epoch": step // 500, "loss": loss, f"loss/sigma_{drawn.choice('0246')}": loss}
            line |= {name: drawn.random() for name in _NUMBERS.split()}
            file.write(json.dumps(line) + "\n")
            if step % 500 == 0:
                file.write(json.dumps({"step": step, "val_loss": loss, "val_loss/sigma_0.5": loss}) + "\n")
    (folder / "config.toml").write_text(
        f"[network]\nnetwork_dim = {2 ** drawn.randrange(2, 7)}\n[training]\nmax_train_steps = {STEPS}\n"
        f'[saving]\noutput_dir = "{folder}"\noutput_name = "{folder.name}"\n',
        encoding="utf-8",
    )
    (folder / "samples").mkdir()
    for step in range(0, STEPS + 1, STEPS // 4):
        for prompt in range(4):
            Image.new("RGB", (128, 128), (seed % 255, prompt * 60, step % 255)).save(
                folder / f"samples/step{step:06}_{prompt:02}.png"
            )


def paint(browser: Any, server: Any, path: str) -> float:
    """Return the milliseconds from the beginning of a navigation to the first contentful paint, in a tab of its own."""
    from tests.web.page import Tab

    tab = Tab(browser, server)
    tab.open(path)
    read = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    while (found := tab.page.evaluate(read)) is None:
        time.sleep(0.01)
    tab.context.close()
    return float(found)


@exit_on_user_error
def main() -> None:
    """Write the runs, open the screens, print the table."""
    options = benchmark_parser(__doc__).parse_args()
    from tests.web.page import Tab, open_browser, serve

    table = Table({"screen": "<12", "first_visit_ms": "15.0f", "paint_ms": "10.0f", "worst_ms": "10.0f"})
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top)
        for number in range(RUNS):
            write_run(folder / f"output/run_{number:03}", number)
        os.sync()  # else the disk is still busy with the runs while the first screens are painted
        with serve(folder) as server, open_browser() as browser:
            for name, path in SCREENS.items():
                first, *times = (paint(browser, server, path) for _ in range(1 + ROUNDS))
                table.add({"screen": name, "first_visit_ms": first, "paint_ms": median(times), "worst_ms": max(times)})
            watching = Tab(browser, server)
            watching.open("/")
            with open(folder / "output/run_000/metrics.jsonl", "a", encoding="utf-8") as file:
                for step in range(STEPS + 1, STEPS + 21):
                    file.write(json.dumps({"step": step, "loss": 0.3, "s_per_it": 0.5}) + "\n")
                    file.flush()
                    time.sleep(0.5)
            for number in range(20):  # one run after the other, as somebody does who looks for one
                watching.open(f"/run?path=output/run_{number:03}")
            watching.context.close()
            peak = resident("VmHWM", server.process.pid) / 2**20
    print(f"the page's process: {peak:.0f} MiB at its peak, of {MEMORY_MIB:.0f}")
    slowest = max(max(row["first_visit_ms"], row["paint_ms"]) for row in table.rows)
    ratios = {"paint_over_limit": slowest / PAINT_MS, "memory_over_limit": peak / MEMORY_MIB}
    finish(table.rows, ratios, options.json)


if __name__ == "__main__":
    main()
