"""Cost as work grows: a LoRA step against resolution, batch and rank, and a start against the number of images.

Steps are those of ``bench/train_step.py``, Tandem beside diffusers + peft: FLUX blocks, 1 double and 2 single ones of
a reduced width, bf16 base under autocast, 128 text tokens; from one base point, 512 image tokens, batch 1, rank 16,
one number grows at a time. How time and memory are taken: ``bench/measure.py``.

Starts are those of ``bench/startup.py`` with everything cached; how fast Tandem caches beside what encoders take is
measured on small datasets of real images.

    python bench/scaling.py [--json PATH] [--draw_to docs/images] [--only steps|starts] [--rounds 4] [--quick]
    python bench/scaling.py --from PATH --draw_to docs/images      # draw again what was measured

``--quick`` takes tiny models and datasets: does everything run?
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

import bench.startup as startup
from bench.families import FAMILIES, Sizes
from bench.measure import Case, benchmark_parser, finish, measure_memories, measure_time
from bench.train_step import build_step
from library.errors import exit_on_user_error

TRAINERS = ("tandem", "peft")
_AT_ONCE = 2  # processes that measure memory; time is measured by one at a time


@dataclass(frozen=True)
class Point:
    """One size of step; ``axis`` is the number that grew, ``base`` the point all axes have in common."""

    axis: str
    rows: int
    columns: int
    batch: int = 1
    rank: int = 16

    @property
    def value(self) -> int:
        """The number that grew."""
        return {"tokens": self.rows * self.columns, "batch": self.batch, "rank": self.rank}.get(self.axis, 0)


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        sizes: of the transformer; a point says the rest.
        sides: image tokens down and across, growing.
        batches, ranks: those besides the base point's.
        images: cached images at a start.
        cached: images that are cached anew.
    """

    sizes: Sizes
    base: Point
    sides: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    ranks: tuple[int, ...]
    images: tuple[int, ...]
    cached: tuple[int, ...]

    def points(self) -> list[Point]:
        """Return the base point, then those of each axis."""
        return [
            self.base,
            *(replace(self.base, axis="tokens", rows=rows, columns=columns) for rows, columns in self.sides),
            *(replace(self.base, axis="batch", batch=batch) for batch in self.batches),
            *(replace(self.base, axis="rank", rank=rank) for rank in self.ranks),
        ]


_FLUX = FAMILIES["flux"]
FULL = Plan(
    sizes=replace(_FLUX.full, width=1536, blocks=_FLUX.few_blocks, text_tokens=128),
    base=Point("base", 16, 32),
    sides=((16, 16), (32, 32), (32, 64), (64, 64)),  # 256 to 1024 pixels a side
    batches=(2, 4),
    ranks=(4, 64, 256),
    images=(1_000, 10_000, 100_000),
    cached=(1_000, 4_000),
)
QUICK = Plan(
    sizes=Sizes(width=128, head_dim=64, blocks=(1, 1), text_tokens=8),
    base=Point("base", 4, 4),
    sides=((4, 8),),
    batches=(2,),
    ranks=(32,),
    images=(8, 24),
    cached=(6,),
)


def measure_steps(plan: Plan, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each point and trainer; print each point as it comes."""
    points = plan.points()
    cases = {(point, trainer): _case(plan, point, trainer) for point in points for trainer in TRAINERS}
    memory = measure_memories(cases, _AT_ONCE)
    print(f"{'axis':<7} {'tokens':>6} {'batch':>5} {'rank':>4}  {'tandem s, MiB':>16} {'peft s, MiB':>16}  of peft's")
    rows = []
    for point in points:
        seconds = measure_time({trainer: cases[point, trainer] for trainer in TRAINERS}, rounds)
        found = [
            {**asdict(point), "trainer": t, "step_s": statistics.median(seconds[t]), **memory[point, t]}
            for t in TRAINERS
        ]
        rows += found
        _print_point(point, *found)
    return rows


def _case(plan: Plan, point: Point, trainer: str) -> Case:
    sizes = replace(plan.sizes, image_sides=(point.rows, point.columns), batch=point.batch)
    return build_step, (trainer, "flux", sizes, "bf16", False, point.rank)


def _print_point(point: Point, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    figures = "".join(f" {row['step_s']:8.2f} {row['added_mib']:7.0f}" for row in (ours, theirs))
    ratios = f"{ours['step_s'] / theirs['step_s']:.2f} {ours['added_mib'] / theirs['added_mib']:.2f}"
    tokens = point.rows * point.columns
    print(f"{point.axis:<7} {tokens:>6} {point.batch:>5} {point.rank:>4} {figures}  {ratios}", flush=True)


def measure_starts(plan: Plan) -> list[dict[str, Any]]:
    """Return a row for each number of cached images, and for each number that is cached anew."""
    titles = f"{'read s':>7} {'cache s':>8} {'batch s':>8} {'all s':>6} {'CPU s':>6} {'peak MiB':>9}"
    print(f"{'start':<7} {'images':>7} {titles}")
    rows = []
    for kind, counts in (("cached", plan.images), ("cold", plan.cached)):
        for images in counts:
            with tempfile.TemporaryDirectory() as temporary:
                write = _write_cached if kind == "cached" else startup.write_dataset
                found = startup.start_alone(write(Path(temporary) / "data", images))
            row = {"start": kind, "images": images, **found}
            if kind == "cold":
                row["images_per_s"] = images / row["cache_s"]
            rows.append(row)
            times = f"{row['read_s']:>7.2f} {row['cache_s']:>8.2f} {row['first_batch_s']:>8.2f} {row['start_s']:>6.2f}"
            times += f" {row['cpu_s']:>6.2f}"
            print(f"{kind:<7} {images:>7} {times} {row['peak_mib']:>9.0f}", flush=True)
    return rows


def _write_cached(folder: Path, images: int) -> Path:
    return startup.write_cached_dataset(folder, images, startup.InstantImages.fingerprint)


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


def draw(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw what ``rows`` hold into ``folder``; return what was written."""
    from dev.draw_precision_figures import save

    steps, starts = [r for r in rows if "trainer" in r], [r for r in rows if "start" in r]
    figures = {
        "scaling_steps.png": draw_steps(steps) if steps else None,
        "scaling_starts.png": draw_starts(starts) if starts else None,
    }
    return [save(figure, folder / name) for name, figure in figures.items() if figure is not None]


Row = dict[str, Any]

_AXES = {"tokens": "image tokens", "batch": "images a step", "rank": "rank"}
_TRAINERS = {"tandem": ("Tandem", "#0072b2", "o-"), "peft": ("diffusers + peft", "#d55e00", "s--")}
_GOAL_SECONDS, _GOAL_GIB = 10, 2  # of a start with 100,000 images
_GREY = "#999999"


def draw_steps(rows: Sequence[Row]) -> Figure:
    """Seconds of a step, and memory it adds, against each axis; the base point belongs to all of them."""
    figure = Figure(figsize=(9.2, 5.2), layout="constrained")
    panels = figure.subplots(2, len(_AXES), sharex="col", sharey="row")
    values: dict[str, Callable[[Row], int]] = {
        "tokens": lambda row: row["rows"] * row["columns"],
        "batch": lambda row: row["batch"],
        "rank": lambda row: row["rank"],
    }
    for column, (axis, title) in zip(panels.T, _AXES.items(), strict=True):
        ours = [row for row in rows if row["axis"] in (axis, "base")]
        for trainer, (label, colour, style) in _TRAINERS.items():
            points = sorted((values[axis](row), row) for row in _of(ours, trainer))
            xs = [x for x, _ in points]
            column[0].plot(xs, [row["step_s"] for _, row in points], style, color=colour, label=label, markersize=4)
            column[1].plot(xs, [row["added_mib"] for _, row in points], style, color=colour, markersize=4)
        column[1].set_xlabel(title)
        for panel in column:
            _powers(panel, xs)
    for panel, title in zip(panels[:, 0], ("CPU seconds of a step", "MiB that steps add"), strict=True):
        panel.set_ylabel(title)
        panel.set_yscale("log")
        _plain(panel)
    panels[0, 0].legend(frameon=False)
    return figure


def draw_starts(rows: Sequence[Row]) -> Figure:
    """Seconds and memory of a start with everything cached, and images cached in a second, against their number."""
    figure = Figure(figsize=(9.2, 2.9), layout="constrained")
    seconds, memory, rate = figure.subplots(1, 3)
    cached = sorted((row["images"], row) for row in rows if row["start"] == "cached")
    xs = [images for images, _ in cached]
    parts = {"read_s": ("dataset read", "#0072b2"), "cache_s": ("cache looked over", "#56b4e9")}
    parts |= {"first_batch_s": ("first batch", "#009e73")}
    bottom = [0.0] * len(xs)
    for key, (label, colour) in parts.items():
        top = [low + row[key] for low, (_, row) in zip(bottom, cached, strict=True)]
        seconds.fill_between(xs, bottom, top, color=colour, linewidth=0, label=label)
        bottom = top
    seconds.legend(frameon=False, loc="upper left", fontsize="small")
    seconds.set(ylabel="seconds until the first batch")
    _goal(seconds, _GOAL_SECONDS, f"goal: {_GOAL_SECONDS} s")
    memory.plot(xs, [row["peak_mib"] / 1024 for _, row in cached], "o-", color="#0072b2", markersize=4)
    memory.set(ylabel="GiB at most")
    _goal(memory, _GOAL_GIB, f"goal: {_GOAL_GIB} GiB")
    cold = sorted((row["images"], row["images_per_s"]) for row in rows if row["start"] == "cold")
    rate.plot([images for images, _ in cold], [each for _, each in cold], "o-", color="#0072b2", markersize=4)
    rate.set(ylabel="images cached a second", ylim=(0, 1.2 * max(each for _, each in cold)))
    for panel in (seconds, memory, rate):
        panel.set(xlabel="images")
        panel.spines[["top", "right"]].set_visible(False)
        panel.xaxis.set_major_locator(MaxNLocator(2, steps=[1, 5, 10]))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    for panel in (seconds, memory):
        panel.set_xlim(0, 1.05 * max(xs))
    return figure


def _of(rows: Sequence[Row], trainer: str) -> list[Row]:
    return [row for row in rows if row["trainer"] == trainer]


def _goal(panel: Axes, value: float, words: str) -> None:
    panel.axhline(value, color=_GREY, linewidth=0.8, linestyle="--")
    panel.annotate(words, (0, value), (4, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                   color=_GREY)  # fmt: skip
    panel.set_ylim(0, 1.3 * max(value, panel.get_ylim()[1]))


def _powers(panel: Axes, xs: Sequence[int]) -> None:
    """A logarithmic axis with a tick at each of ``xs``."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(xs, [str(x) for x in xs])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.spines[["top", "right"]].set_visible(False)


def _plain(panel: Axes) -> None:
    """Ticks at 1, 2 and 5 times powers of ten, written out."""
    panel.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


@exit_on_user_error
def main() -> None:
    """Measure, print, write JSON and plots as asked."""
    parser = benchmark_parser(__doc__, rounds=4)
    parser.add_argument("--draw_to", type=Path, metavar="FOLDER", help="draw the results into this folder")
    parser.add_argument("--only", choices=("steps", "starts"))
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--from", type=Path, nargs="+", dest="measured", metavar="JSON", help="do not measure, draw")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.measured:
        rows = [row for path in options.measured for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    else:
        plan = QUICK if options.quick else FULL
        rows += measure_steps(plan, options.rounds) if options.only != "starts" else []
        rows += measure_starts(plan) if options.only != "steps" else []
    finish(rows, ratios(rows), options.json)
    if options.draw_to:
        print("\n".join(map(str, draw(rows, options.draw_to))))


if __name__ == "__main__":
    main()
