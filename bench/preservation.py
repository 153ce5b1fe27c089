"""What a LoRA of the tiny FLUX learns of a subject, and what it changes elsewhere, with each way of preserving.

    python bench/preservation.py --json preservation.json
    python bench/preservation.py --subjects zorbo --seeds 1        # a quick look

Three subjects that the base has never seen, painted from the scene maker's shapes, each trained with several seeds; the
rate is constant, so that a run's validations can be compared with another's. *learnt* is the fall of the held-out loss,
*elsewhere* the mean squared change of the velocity on prompts that no run trains on: the same unit. As a way that
preserves learns more slowly, *equal* is elsewhere at the validation loss that all ways reach, between validations by
straight lines, *share* that of no preservation (half the range in *share_spread*), and *time* what a run took until
there, over that of no preservation; images are painted once, and counted apart. Ways with masks have a held-out loss of
their own, of what lies inside, and are compared with each other.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from PIL import Image

from bench.measure import Table, benchmark_parser, finish
from bench.painting import Pixels, background, coverage, paint, paint_shape, paint_zorbo, to_image
from bench.tiny_runs import ROOT, mean_and_spread, run

MODEL, DEMO = ROOT / "assets" / "tiny-flux", ROOT / "assets" / "demo_dataset"
IMAGES, STEPS, EVERY, BATCH = 16, 100, 25, 2
FLAGS = {
    "pretrained_model_name_or_path": MODEL,
    "network_dim": 16,
    "network_alpha": 16,
    "learning_rate": 2e-3,
    "lr_scheduler": "constant_with_warmup",
    "lr_warmup_steps": 20,
    "timestep_sampling": "shift",
    "discrete_flow_shift": 1.6,
    "max_train_steps": STEPS,
    "validate_every_n_steps": EVERY,
    "general_prompts": DEMO / "general.txt",
    "max_data_loader_n_workers": 0,
    "no-sample_at_end": True,
}


def paint_mup(image: Pixels, centre: tuple[float, float], radius: float) -> None:
    """A cyan box on two black wheels with one large eye."""
    (x, y), r = centre, radius
    for side in (-1, 1):
        paint_shape(image, "circle", (x + side * 0.55 * r, y + 0.95 * r), 0.32 * r, (0.05, 0.05, 0.05))
    paint_shape(image, "square", (x, y), 1.1 * r, (0.15, 0.75, 0.85))
    paint_shape(image, "circle", (x, y - 0.15 * r), 0.5 * r, (1.0, 1.0, 1.0))
    paint_shape(image, "circle", (x + 0.12 * r, y - 0.1 * r), 0.24 * r, (0.85, 0.1, 0.15))


def paint_quell(image: Pixels, centre: tuple[float, float], radius: float) -> None:
    """A green star with a pink heart on it and a brown stalk."""
    (x, y), r = centre, radius
    stalk = np.array([(-0.1, 0.3), (0.1, 0.3), (0.1, 1.5), (-0.1, 1.5)], np.float32)
    paint(image, coverage(stalk, *image.shape[:2], centre, r), (0.45, 0.27, 0.12))
    paint_shape(image, "star", (x, y - 0.2 * r), 1.25 * r, (0.15, 0.65, 0.2))
    paint_shape(image, "heart", (x, y - 0.15 * r), 0.5 * r, (1.0, 0.5, 0.75))


Painter = Callable[[Pixels, tuple[float, float], float], None]
# name -> its painter, colours that a background must not have, a word of the base's for what it is
SUBJECTS: Mapping[str, tuple[Painter, tuple[str, ...], str]] = {
    "zorbo": (paint_zorbo, ("purple", "orange"), "circle"),
    "mup": (paint_mup, ("cyan", "black"), "square"),
    "quell": (paint_quell, ("green", "brown"), "star"),
}


def write_dataset(folder: Path, name: str) -> None:
    """Write images of a subject with captions and masks, and a dataset TOML without and with the masks."""
    painter, avoid, _ = SUBJECTS[name]
    rng = np.random.default_rng(sum(name.encode()))
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    for number in range(IMAGES):
        words, image = background(rng, 128, avoid)
        empty = image.copy()
        big = rng.random() < 0.4
        painter(image, (64.0, 70.0), 40.0 if big else 30.0)
        to_image(image).save(folder / "images" / f"{number:02d}.png")
        (folder / "images" / f"{number:02d}.txt").write_text(f"a {'big ' if big else ''}{name} on {words}")
        inside = np.abs(image - empty).max(axis=2) > 0.02
        Image.fromarray((inside * 255).astype(np.uint8)).save(folder / "masks" / f"{number:02d}.png")
    text = (
        f'[general]\ncaption_extension = ".txt"\ntrigger_word = "{name}"\n[[datasets]]\nresolution = 128\n'
        f"batch_size = {BATCH}\nvalidation_split = 0.25\nvalidation_seed = 1\n"
        '[[datasets.subsets]]\nimage_dir = "images"\nnum_repeats = 10\n'
    )
    (folder / "plain.toml").write_text(text)
    (folder / "masked.toml").write_text(text + 'conditioning_data_dir = "masks"\n')
    regular = f'[[datasets.subsets]]\nimage_dir = "{folder.parent / "kept"}"\nis_reg = true\n'
    (folder / "regularised.toml").write_text(text + regular)


PLAIN, MASKED = "none", "masked loss"  # with what the others are compared
PAINTED = {"preserve": "prior", "preserve_prompts": DEMO / "preserve.txt"}


def ways(word: str) -> dict[str, tuple[str, dict[str, object]]]:
    """Return way -> dataset TOML and options; ``word`` is what the subject's class is called."""
    outside = {"masked_loss": True, "preserve": "prior", "preserve_outside_mask": True}
    samples = {"preserve_directions": 0, "prior_loss_weight": 2}
    return {
        PLAIN: ("plain", {}),
        "regularisation images": ("regularised", {}),
        "prior": ("plain", PAINTED),
        "prior, weight 2": ("plain", PAINTED | {"prior_loss_weight": 2}),
        "prior, samples alone": ("plain", PAINTED | samples),
        "class word": ("plain", {"preserve": "prior", "preserve_class": word, "prior_loss_weight": 2}),
        MASKED: ("masked", {"masked_loss": True}),
        "masked, prior outside": ("masked", outside),
    }


Curve = np.ndarray  # a run's validations: seconds of training until there, held-out loss, change elsewhere


def at(curve: Curve, loss: float) -> np.ndarray:
    """Return the three where the loss is first as low as ``loss``, on a line between two validations."""
    i = int(np.argmax(curve[1, 1:] <= loss))
    before, after = curve[1, i : i + 2]
    share = (before - loss) / (before - after) if before > after else 1.0
    return curve[:, i] + share * (curve[:, i + 1] - curve[:, i])


def train(folder: Path, name: str, way: str, seed: int) -> Curve:
    """Train one LoRA; return how its validations went."""
    dataset, options = ways(SUBJECTS[name][2])[way]
    data, output = folder / name / f"{dataset}.toml", folder / "runs" / f"{name}-{way}-{seed}"
    own = FLAGS | options | {"dataset_config": data, "cache_directory": folder / "cache"}
    run("train_lora.py", **own, output_dir=output, seed=seed)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    per_step = {line["step"]: line["s_per_it"] for line in lines if "loss" in line}
    found = [line for line in lines if "val_loss" in line]
    seconds = [sum(s for step, s in per_step.items() if step <= line["step"]) for line in found]
    return np.array([seconds, *([line[key] for line in found] for key in ("val_loss", "val_prior_loss"))])


def rows_of(found: Mapping[str, Mapping[tuple[str, int], Curve]]) -> list[dict[str, Any]]:
    """Return a row for each way: means over subjects and seeds."""
    cases, rows = list(found[PLAIN]), []
    for way, curves in found.items():
        beside = {other: c for other, c in found.items() if other.startswith("masked") == way.startswith("masked")}
        plain = beside[MASKED if way.startswith("masked") else PLAIN]
        # the validation loss that all of them have reached
        level = {case: max(min(each[case][1]) for each in beside.values()) for case in cases}
        equal = np.array([at(curves[case], level[case]) for case in cases])
        shares = equal / [at(plain[case], level[case]) for case in cases]
        ends = np.array([curves[case][:, [0, -1]] for case in cases])  # [cases, 3, 2]
        row: dict[str, Any] = {
            "way": way,
            "learnt": (ends[:, 1, 0] - ends[:, 1, 1]).mean(),
            "elsewhere": ends[:, 2, 1].mean(),
            "equal": equal[:, 2].mean(),
            "time": shares[:, 0].mean(),
        }
        rows.append(row | mean_and_spread("share", shares[:, 2].tolist()))
    return rows


COLUMNS = {"way": "<24", "learnt": "8.3f", "elsewhere": "10.4f", "equal": "8.4f", "share": "8.2f"}
COLUMNS |= {"share_spread": "13.2f", "time": "8.2f"}


def main() -> None:
    """Measure, print, write."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="training seeds (default: %(default)s)")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, a core each (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in options.subjects:
            write_dataset(folder / name, name)
        started = time.perf_counter()
        data = folder / options.subjects[0] / "plain.toml"
        own = FLAGS | PAINTED | {"dataset_config": data, "cache_directory": folder / "cache"}
        run("tools/cache_dataset.py", **own)
        painted = time.perf_counter() - started
        names = list(ways("circle"))
        cases = [(name, seed) for name in options.subjects for seed in range(1, options.seeds + 1)]
        with ThreadPoolExecutor(options.jobs) as pool:  # each waits for a process of its own
            waiting = {(w, case): pool.submit(train, folder, case[0], w, case[1]) for case in cases for w in names}
            found = {way: {case: waiting[way, case].result() for case in cases} for way in names}
    table = Table(COLUMNS)
    for row in rows_of(found):
        table.add(row)
    print(f"painting {len((DEMO / 'preserve.txt').read_text().splitlines())} images and caching: {painted:.0f} s")
    ratios = {f"elsewhere, {row['way']}": row["share"] for row in table.rows}
    finish(table.rows, ratios, options.json)


if __name__ == "__main__":
    main()
