"""What each deployed format makes of a LoRA on the built-in tiny FLUX Fill, and what each fix leaves of the error.

    python bench/served_formats.py --json served.json
    python bench/served_formats.py --seeds 1 --formats fp8_scaled int8_convrot --fixes refit correction
    python bench/served_formats.py --keep output/served --jobs 16   # run again, it goes on where it stopped

For each training seed a LoRA is trained in high precision on the demo's images. The reference is that model with the
LoRA beside it; everything runs on the same held-out images, painted from seeds that neither training nor calibration
have, with the same masks, noise and noise levels. Errors are relative rms errors of the finished latents after four
sampling steps. Formats are written by ``tools/quantize_model.py``, mxfp8 by comfy-kitchen, GGUF by the ``gguf`` package
and nf4 by bitsandbytes, each with the layers that are usual in high precision there; ``..._high`` is the file that asks
ComfyUI for products in high precision.

    base           the quantised weights, the LoRA beside them, activations as they are
    merge          what the server's merge adds to that (ComfyUI's resident layers: rounded stochastically)
    nearest        what a merge rounded to nearest would add instead (sd-scripts)
    activations    what products in the format add (the root of the squared errors' difference, as for ``merge``)
    served         as the format's usual server serves it: all of these
    retained       what the merge leaves of the LoRA's update, mean of layers: projected on it
    bypass         the LoRA beside the weights, products as served (ComfyUI's Load LoRA (Bypass)), over ``served``
    compensated    the LoRA merged from the 16-bit model into the format (``merge_lora.py --rounding compensated``),
                   products as that file asks for, over ``served``
    refit ...      the fixes of ``tools/precision_report.py --fix``, merged and multiplied as served, over ``served``
    refit*, ...    the same loaded with the bypass, where the server merges

Errors are of painted images like those that fixes are fitted to, squared errors of seeds and images added up.
``--photographs N`` adds a row of each format for N of the photographs that come with scikit-image. *from* and *to* are
the 95 % interval over images (bootstrap).

The tiny model is 160 wide. ConvRot rotates runs of 32 or less of it and not 256. Q4_K's blocks hold 256 numbers: a
matrix is cut into runs of 256 across its rows, as ComfyUI-GGUF's converter does where rows are no whole blocks. Each
run of 32 of such a block, which has its own scale and minimum and lies in one row, is written as the block of Q4_1
that stands for the same numbers (``as_q4_1``). Its scales follow from the extremes of 32 numbers; llama.cpp searches
for better ones.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from bench.measure import Table, benchmark_parser, finish
from bench.tiny_runs import (
    MODEL,
    calibration_options,
    merge_compensated,
    models_with,
    paint,
    photographs,
    run,
    train_lora,
)
from library.console import Console
from library.fidelity.deployed import DeployedWeights
from library.fidelity.fixes import FixOptions, try_fixes
from library.fidelity.runs import Outcome, prepare_eval_set, run_variant
from library.fidelity.serving import REFERENCE, Models, Variant, base_layer, numbers
from library.files import write_text
from library.precision.parity.layer_errors import update_retention
from library.precision.recipe import Recipe

WRITTEN = {
    "fp8": ("--scheme", "cast"),
    "fp8_scaled": ("--scheme", "tensor", "--products", "low"),
    "int8_convrot": ("--scheme", "int8_convrot"),
    "int8_row": ("--scheme", "int8_row"),
    "nvfp4": ("--scheme", "nvfp4", "--products", "low"),
    "fp8_scaled_high": ("--scheme", "tensor", "--products", "high"),
    "nvfp4_high": ("--scheme", "nvfp4", "--products", "high"),
}
STEPS = 4
FORMATS = (*WRITTEN, "mxfp8", "Q8_0", "Q4_0", "Q4_K", "nf4")
PRECISIONS = {kind: kind.removesuffix("_high") for kind in WRITTEN}  # --save_precision of a compensated merge


def write_format(kind: str, folder: Path, changed: Mapping[str, torch.Tensor] | None = None) -> Path:
    """Write the tiny model in ``kind`` below ``folder``, perhaps with ``changed`` weights; return what is deployed.

    Those of ``WRITTEN`` are of the model as it is.
    """
    if kind in WRITTEN:
        target = folder / kind
        run("tools/quantize_model.py", "--model", MODEL, "--save_to", target / "transformer", *WRITTEN[kind])
        return target / "transformer"
    target = folder / kind
    target.mkdir(parents=True)
    state = load_file(MODEL / "transformer" / "diffusion_pytorch_model.safetensors") | dict(changed or {})
    recipe = Recipe()
    linears = [n for n, t in state.items() if t.ndim == 2 and recipe.excluded_as(n.removesuffix(".weight")) is None]
    if kind.startswith("Q"):
        return _write_gguf(target / f"{kind}.gguf", state, kind, linears)
    tensors = dict(state)
    for name in linears:
        if kind == "nf4":
            from tests.precision.files.nf4_files import nf4_tensors

            tensors |= nf4_tensors(state[name].float(), name, nested=True)[0]
        else:
            from tests.precision.files.comfy import by_kitchen, comfy_tensors

            layer = name.removesuffix(".weight")
            tensors |= comfy_tensors(layer, by_kitchen(state[name].bfloat16(), kind), {"format": kind})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / f"{kind}.safetensors")
    return target / f"{kind}.safetensors"


def _write_gguf(path: Path, state: dict[str, torch.Tensor], kind: str, linears: list[str]) -> Path:
    from tests.precision.files.gguf_files import blocks_of, write_gguf

    if kind == "Q4_K":
        kind = "Q4_1"
        for name in linears:
            blocks = as_q4_1(blocks_of(state[name].reshape(-1, 256), "Q4_K"))
            state[name] = torch.from_numpy(blocks.reshape(len(state[name]), -1))
    return write_gguf(path, state, lambda name, _: kind if name in linears else "F16")


def as_q4_1(blocks: np.ndarray) -> np.ndarray:
    """Return blocks of Q4_K [..., bytes] as Q4_1's: eight of 32 numbers for each, bytes [n, 8 * 20].

    A number of Q4_K is ``d * scale * q - dmin * minimum`` with ``scale`` and ``minimum`` of 6 bits for each 32
    (``ggml-common.h``, ``block_q4_K``), of Q4_1 ``d * q + m``.
    """
    blocks = blocks.reshape(-1, 144)
    d, dmin = (blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32) for at in (0, 2))
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([first & 63, (last & 15) | (first >> 6 << 4)], axis=1)
    minimum = np.concatenate([second & 63, (last >> 4) | (second >> 6 << 4)], axis=1)
    nibbles = blocks[:, 16:].reshape(-1, 4, 1, 32)
    q = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(-1, 8, 32)
    packed = q[..., :16] | (q[..., 16:] << 4)
    pairs = [(each.astype(np.float16)[..., None]).view(np.uint8) for each in (d * scale, -dmin * minimum)]
    return np.concatenate([*pairs, packed], axis=2).reshape(len(blocks), -1)


class Plan(NamedTuple):
    """What every format is measured on: datasets with how many images of each, what fixes are fitted to, results."""

    shown: dict[str, tuple[Path, int]]
    calibrating: Path
    calibration: int
    fixes: tuple[str, ...]
    folder: Path


def lora_of(seed: int, plan: Plan) -> Path:
    """Return the LoRA of ``seed``, trained where there is none yet."""
    path = plan.folder / f"seed{seed}" / "lora.safetensors"
    return path if path.exists() else train_lora(seed, path.parent)


Figures = dict[str, list[float]]  # squared errors of finished latents, image by image; their size; what is retained


def measure(kind: str, seed: int, plan: Plan) -> Figures:
    """Return the figures of ``kind`` with the LoRA of ``seed``, those that were measured before from their file."""
    counts = "_".join(str(count) for _, count in plan.shown.values())
    row = plan.folder / f"{kind}_seed{seed}_{counts}_{plan.calibration}_{'_'.join(plan.fixes)}.json"
    if row.exists():
        return dict(json.loads(row.read_text()))
    with tempfile.TemporaryDirectory() as folder:
        found = _measure(kind, lora_of(seed, plan), plan, Path(folder))
    write_text(row, json.dumps(found))
    print(f"seed {seed}: {kind}: {found}", file=sys.stderr, flush=True)
    return found


def _measure(kind: str, lora: Path, plan: Plan, folder: Path) -> Figures:
    torch.set_num_threads(1)
    console = Console(quiet=True)
    fitted = calibration_options(plan.calibrating, plan.calibration, folder / "calibration_cache")
    models = models_with(lora, DeployedWeights(kind, write_format(kind, folder), None))
    sets = []
    for name, (dataset, count) in plan.shown.items():
        shown = calibration_options(dataset, count, folder / f"cache of {name}")
        sets.append(prepare_eval_set(models, models.plan(shown).prepare(console), REFERENCE, STEPS))
    parts = {key: [one for each in sets for one in getattr(each, key)] for key in ("batches", "pixels", "jobs")}
    eval_set = replace(sets[0], **parts)
    reference = run_variant(models, REFERENCE, eval_set, console, "reference")

    def squares(outcome: Outcome) -> list[float]:
        pairs = zip(reference.latents, outcome.latents, strict=True)
        return [float((b.double() - a.double()).square().sum()) for a, b in pairs]

    def error(variant: Variant, of: Models = models) -> list[float]:
        return squares(run_variant(of, variant, eval_set, console, kind))

    how = next((each.how for each in models.server.merges if not each.one_step), None)
    beside = Variant(weights=True)
    rounded = models.roundings(replace(beside, activations="auto"))
    served = replace(beside, merge=how, activations="auto" if rounded else None)
    sizes = [float(each.double().square().sum()) for each in reference.latents]
    found = {"size": sizes, "base": error(beside), "served": error(served), "retained": [1.0]}
    found["merged"] = found["base"]
    if how:
        found["merged"] = error(replace(beside, merge=how))
        high, merged = models.base(deployed=True), models.merged_weights(served)
        found["retained"] = [
            update_retention(numbers(base_layer(merged, n)), numbers(base_layer(high, n)), update.delta()).gain
            for n, update in models.transformer_lora.items()
        ]
    if kind in WRITTEN:
        found["to nearest"] = error(replace(beside, merge="nearest"))
    if how is None or not models.rounded_in(served):
        found["bypass"] = found["served"]
    if kind in PRECISIONS and "compensated" in plan.fixes:
        compensated = models_with(lora, merge_compensated(lora, PRECISIONS[kind], fitted, folder / "compensated"))
        found["compensated"] = error(replace(served, merge=None), compensated)
    tried = tuple(name for name in plan.fixes if name != "compensated")
    options = FixOptions(folder / "fixes", lora, fitted, names=tried)
    for fix in try_fixes(models, served, eval_set, reference, options, console):
        found[fix.name] = squares(fix.outcome)
        if fix.outcome_beside:
            found[f"{fix.name}*"] = squares(fix.outcome_beside)
    return found


def row_of(seeds: Sequence[Figures], where: slice, shares: Sequence[str]) -> dict[str, float]:
    """Return errors, and the ``shares`` of the served one that fixes leave, with intervals, on the images ``where``."""
    sums = {
        name: np.array([each[name][where] for each in seeds]).sum(axis=0) for name in seeds[0] if name != "retained"
    }
    whole = {name: float(np.sqrt(one.sum() / sums["size"].sum())) for name, one in sums.items()}
    row = {"base": whole["base"], "served": whole["served"], "merge": _beyond(whole["merged"], whole["base"])}
    if "to nearest" in whole:
        row["nearest"] = _beyond(whole["to nearest"], whole["base"])
    row["activations"] = _beyond(whole["served"], whole["merged"])
    row["retained"] = mean(value for each in seeds for value in each["retained"])
    drawn = np.random.default_rng(0).integers(0, len(sums["size"]), (RESAMPLED, len(sums["size"])))
    for name in shares:
        if name in whole:
            left = np.sqrt(sums[name][drawn].sum(axis=1) / sums["served"][drawn].sum(axis=1))
            row[name] = whole[name] / whole["served"]
            row[f"{name} from"], row[f"{name} to"] = (float(each) for each in np.quantile(left, (0.025, 0.975)))
    return row


def _beyond(whole: float, part: float) -> float:
    """Return what errors in no relation to each other make of ``part`` to ``whole``; 0 where it is not larger."""
    return max(0.0, whole**2 - part**2) ** 0.5


RESAMPLED, INTERVAL = 2000, {" from": "17.2f", " to": "15.2f"}
ERRORS = ("base", "merge", "nearest", "activations", "served")
COLUMNS = {"format": "<16", "images": "<12", **dict.fromkeys(ERRORS, "12.2%"), "retained": "9.2f"}


def main() -> None:
    """Measure, print, write."""
    parser = benchmark_parser(__doc__)
    fixes = ("bypass", "compensated", "refit", "correction")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--fixes", nargs="*", choices=fixes, default=fixes)
    parser.add_argument("--seeds", type=int, default=3, help="training seeds (default: %(default)s)")
    parser.add_argument("--images", type=int, default=24, help="held-out images (default: %(default)s)")
    parser.add_argument("--photographs", type=int, default=0, help="photographs, at most 12 (default: %(default)s)")
    parser.add_argument("--calibration", type=int, default=48, help="images of the fixes (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="formats at a time, a core each (default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="folder of LoRAs and figures that a later run goes on from")
    options = parser.parse_args()
    seeds = range(1, options.seeds + 1)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        folder = (options.keep or place / "work").resolve()
        shown = {"painted": (paint(place / "held_out", options.images, seed=2026), options.images)}
        if options.photographs:
            shown["photographs"] = photographs(place / "photographs", options.photographs), options.photographs
        calibrating = paint(place / "calibrating", options.calibration, seed=2027)
        plan = Plan(shown, calibrating, options.calibration, tuple(options.fixes), folder)
        cases = [(kind, seed) for seed in seeds for kind in options.formats]
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            list(pool.map(lora_of, seeds, repeat(plan)))
            found = dict(zip(cases, pool.map(measure, *zip(*cases, strict=True), repeat(plan)), strict=True))
    shares = [name for fix in options.fixes for name in (fix, f"{fix}*")]
    shares = [name for name in shares if any(name in one for one in found.values())]
    columns = {f"{name}{end}": width for name in shares for end, width in (("", "12.2f"), *INTERVAL.items())}
    table = Table(COLUMNS | columns)
    for kind in options.formats:
        at = 0
        for name, (_, count) in shown.items():
            figures = row_of([found[kind, seed] for seed in seeds], slice(at, at + count), shares)
            table.add({"format": kind, "images": name} | figures)
            at += count
    finish(table.rows, {}, options.json)


if __name__ == "__main__":
    main()
