"""Cost as work grows: a LoRA step against resolution, batch and rank, and a start against the number of images.

Steps are those of ``bench/train_step.py``, Tandem beside diffusers + peft: FLUX blocks, 1 double and 2 single ones of
a reduced width, bf16 base under autocast, 128 text tokens; from one base point, 512 image tokens, batch 1, rank 16,
one number grows at a time. How time and memory are taken: ``bench/measure.py``.

Starts are those of ``bench/startup.py`` with everything cached; how fast Tandem caches beside what encoders take is
measured on small datasets of real images.

    python bench/scaling.py [--json PATH] [--draw_to docs/images] [--only steps|starts] [--rounds 4]
    python bench/scaling.py --from PATH --draw_to docs/images      # draw again what was measured
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bench.startup as startup
from bench.families import FEW_BLOCKS, RANK, Sizes
from bench.measure import Case, Table, benchmark_parser, finish, measure
from bench.train_step import TRAINERS, build_step
from library.errors import exit_on_user_error

_AT_ONCE = 2  # processes that measure memory; time is measured by one at a time


@dataclass(frozen=True)
class Point:
    """One size of step; ``axis`` is the number that grew, ``base`` the point all axes have in common."""

    axis: str
    rows: int
    columns: int
    batch: int = 1
    rank: int = RANK


SIZES = Sizes(width=1536, blocks=FEW_BLOCKS["flux"], text_tokens=128)  # a point says the rest
BASE = Point("base", 16, 32)
POINTS = (
    BASE,
    *(
        replace(BASE, axis="tokens", rows=rows, columns=columns)
        for rows, columns in ((16, 16), (32, 32), (32, 64), (64, 64))
    ),
    *(replace(BASE, axis="batch", batch=batch) for batch in (2, 4)),
    *(replace(BASE, axis="rank", rank=rank) for rank in (4, 64, 256)),
)
STARTS = {"cached": (1_000, 10_000, 100_000), "cold": (1_000, 4_000)}  # images that are cached already, or anew


def measure_steps(points: Sequence[Point], sizes: Sizes, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each point and trainer; print each as it comes."""
    keys = {"axis": "<7", "rows": "5", "columns": "7", "batch": "5", "rank": "4", "trainer": "<7"}
    table = Table(keys | {"step_s": "8.2f", "added_mib": "9.0f"})
    for point in points:
        own = replace(sizes, image_sides=(point.rows, point.columns), batch=point.batch)
        cases: dict[str, Case] = {t: (build_step, (t, "flux", own, "bf16", False, point.rank)) for t in TRAINERS}
        for trainer, found in measure(cases, rounds, _AT_ONCE).items():
            table.add({**asdict(point), "trainer": trainer, **found})
    return table.rows


def measure_starts(starts: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """Return a row for each number of cached images, and for each number that is cached anew."""
    table = Table({"start": "<7", "images": "7", **startup.COLUMNS, "images_per_s": "12.1f"})
    for kind, counts in starts.items():
        for images in counts:
            with tempfile.TemporaryDirectory() as temporary:
                write = startup.write_cached_dataset if kind == "cached" else startup.write_dataset
                row = {"start": kind, "images": images, **startup.start_alone(write(Path(temporary) / "data", images))}
            table.add(row | ({"images_per_s": images / row["cache_s"]} if kind == "cold" else {}))
    return table.rows


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the worst of Tandem's time and memory over peft's, and what the largest cached start takes."""
    found: dict[str, float] = {}
    steps = {t: [row for row in rows if row.get("trainer") == t] for t in TRAINERS}
    pairs = list(zip(steps["tandem"], steps["peft"], strict=True))
    if pairs:
        found["time_over_peft"] = max(ours["step_s"] / theirs["step_s"] for ours, theirs in pairs)
        found["memory_over_peft"] = max(ours["added_mib"] / theirs["added_mib"] for ours, theirs in pairs)
    starts = [row for row in rows if row.get("start") == "cached"]
    if starts:
        largest = max(starts, key=lambda row: row["images"])
        found |= {"largest_start_s": largest["start_s"], "largest_start_cpu_s": largest["cpu_s"]}
        found |= {"largest_start_gib": largest["peak_mib"] / 1024}
    return found


@exit_on_user_error
def main() -> None:
    """Measure, print, write JSON and plots as asked."""
    parser = benchmark_parser(__doc__, rounds=4)
    parser.add_argument("--draw_to", type=Path, metavar="FOLDER", help="draw the results into this folder")
    parser.add_argument("--only", choices=("steps", "starts"))
    parser.add_argument("--from", type=Path, nargs="+", dest="measured", metavar="JSON", help="do not measure, draw")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.measured:
        rows = [row for path in options.measured for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    else:
        rows += measure_steps(POINTS, SIZES, options.rounds) if options.only != "starts" else []
        rows += measure_starts(STARTS) if options.only != "steps" else []
    finish(rows, ratios(rows), options.json)
    if options.draw_to:
        from bench.scaling_figures import draw  # matplotlib, which a start has no use for

        print("\n".join(map(str, draw(rows, options.draw_to))))


if __name__ == "__main__":
    main()
