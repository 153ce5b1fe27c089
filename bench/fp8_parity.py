"""How far fp8 is from bf16 on the built-in tiny FLUX Fill, as users run it and with each fix, on held-out images.

    python bench/fp8_parity.py --json parity.json
    python bench/fp8_parity.py --seeds 1 --images 16          # a quick look

For each training seed a LoRA is trained in high precision on the demo's images (``configs/demo_fp8.toml``). The
reference is that model with the LoRA beside it; every case is run on the same 64 held-out images, painted from seeds
that the training images do not have, with generated masks, the same noise and the same noise levels. Fixes are fitted
to and trained on 48 more of another seed. Reported are relative rms errors of the velocity, of finished latents (four
sampling steps) and of decoded images, means over seeds with half the range; along the seam, the decoded image's
error within 8 pixels inside the border over that of the interior, medians over the images. The last row is an error
without a seam, for comparison.
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console

from bench.measure import Table, benchmark_parser, finish
from bench.tiny_runs import (
    CALIBRATION,
    MODEL,
    calibration_options,
    merge_compensated,
    models_with,
    paint,
    run,
    train_lora,
)
from library.fidelity.deployed import parse_deployment
from library.fidelity.differences import Differences, compare
from library.fidelity.fixes import FixOptions, try_fixes
from library.fidelity.runs import prepare_eval_set, run_variant
from library.fidelity.serving import REFERENCE, Models, Variant
from train_lora import train

STEPS = 4


def measure_seed(seed: int, held_out: Path, images: int, calibrating: Path, folder: Path) -> dict[str, Differences]:
    """Train a LoRA with ``seed``; return case -> its errors on the held-out images."""
    torch.set_num_threads(1)
    console = Console(highlight=False)
    lora, served = train_lora(seed, folder), folder / "plain"
    run("tools/quantize_model.py", "--model", MODEL, "--layout", "plain", "--save_to", served)
    models, beside = models_with(lora, parse_deployment(str(served))), Variant(weights=True)
    fitted = calibration_options(calibrating, CALIBRATION, folder / "calibration_cache")
    merged = models_with(lora, merge_compensated(lora, "fp8", fitted, folder / "compensated"))
    shown = models.plan(calibration_options(held_out, images, folder / "held_out_cache")).prepare(console)
    eval_set = prepare_eval_set(models, shown, beside, STEPS)
    decode = models.image_encoder(REFERENCE).decode
    reference = run_variant(models, REFERENCE, eval_set, console, "reference")

    def errors(case: str, of: Models, variant: Variant) -> Differences:
        outcome = run_variant(of, variant, eval_set, console, f"seed {seed}: {case}")
        return compare(reference, outcome, eval_set, decode)

    found = {"plain cast, LoRA beside": errors("beside", models, beside)}
    for how in ("nearest", "stochastic"):
        found[f"merged, {how}"] = errors(how, models, replace(beside, merge=how))
    found["merged, compensated"] = errors("compensated", merged, beside)
    fix_options = FixOptions(folder / "fixes", lora, fitted, train, minutes=60.0)
    fixes = try_fixes(models, beside, eval_set, reference, (), fix_options, console)
    found |= {fix.name: fix.differences for fix in fixes}
    return found


def row_of(case: str, seeds: list[Differences]) -> dict[str, Any]:
    """Return a case's row: means over the seeds and half the range of the latents' error."""
    latents = [each.latents for each in seeds]
    borders = [each.border.figures for each in seeds if each.border is not None]  # all have one: the images have masks
    times = {name: mean(f.times for figures in borders for f in figures if f.name == name) for name in _FIGURES}
    return {
        "case": case,
        "velocity": mean(each.velocity for each in seeds),
        "latents": mean(latents),
        "latents_spread": (max(latents) - min(latents)) / 2,
        "image": mean(each.image for each in seeds),
        **{f"{_FIGURES[name]}_over_noise": value for name, value in times.items()},
    }


_FIGURES = {"ring inside": "ring", "grain inside": "grain", "step": "step"}
COLUMNS = {"case": "<42", "velocity": "8.2%", "latents": "8.2%", "latents_spread": "14.2%", "image": "8.2%"}
COLUMNS |= {"ring_over_noise": "15.2f", "grain_over_noise": "16.2f", "step_over_noise": "15.2f"}


def main() -> None:
    """Measure, print, write."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="training seeds (default: %(default)s)")
    parser.add_argument("--images", type=int, default=64, help="held-out images (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="seeds at a time, a core each (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        held_out = paint(place / "held_out", options.images, seed=2026)
        calibrating = paint(place / "calibrating", CALIBRATION, seed=2027)
        seeds = range(1, options.seeds + 1)
        jobs = [(seed, held_out, options.images, calibrating, place / f"seed{seed}") for seed in seeds]
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            found = list(pool.map(measure_seed, *zip(*jobs, strict=True)))
    table = Table(COLUMNS)
    for case in found[0]:
        if all(case in seed for seed in found):
            table.add(row_of(case, [seed[case] for seed in found]))
    errors = {row["case"]: row["latents"] for row in table.rows}
    ratios = {f"{case}_over_beside": error / errors["plain cast, LoRA beside"] for case, error in errors.items()}
    ratios["compensated_over_stochastic"] = errors["merged, compensated"] / errors["merged, stochastic"]
    finish(table.rows, ratios, options.json)


if __name__ == "__main__":
    main()
