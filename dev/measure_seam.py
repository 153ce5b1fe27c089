"""Measure what makes a seam along the mask of a fill model: the tables of ``docs/precision.md``.

    python dev/measure_seam.py    # trains and measures what output/seam does not hold yet, prints the tables

Two experiments, both with the built-in tiny FLUX Fill and the demo's images, each with a generated mask:

- *training*: the LoRA of ``configs/demo_fp8.toml`` with the region blanked grey, black, or with noise, on the base in
  high precision and on the base cast to fp8, with two seeds each: 12 LoRAs, about two minutes of a core each. Every one
  is run as it may be served, and compared with its own run in high precision and with the true image;
- *conditioning*: what servers do to mask, blank and latents, one at a time, beside what fp8 does to weights, inputs
  of layers and the LoRA, with the four LoRAs trained over grey and black in high precision.

Runs and metrics are those of ``tools/precision_report.py`` (``library/fidelity``): each metric of the border is the
error's, divided by that of white noise of the same size on the same image. An image's value is the geometric mean over
the LoRAs, the intervals are over images (bootstrap). All is a function of the seeds; on another CPU the last digits
differ.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.tiny_runs import MODEL, lora_weights, models_with, run, train_lora
from library.config.model_types import Blank
from library.console import Console
from library.errors import exit_on_user_error
from library.fidelity.border import LIMITS, STEP_8BIT, judge_border
from library.fidelity.calibration import CalibrationOptions
from library.fidelity.deployed import parse_deployment
from library.fidelity.differences import border_errors_of, relative_error
from library.fidelity.intervals import interval
from library.fidelity.runs import EvalSet, Outcome, prepare_eval_set, run_variant
from library.fidelity.serving import REFERENCE, Variant
from library.files import read_text, write_text
from library.precision.parity.seam import border_errors

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "assets" / "demo_dataset" / "images"
BLANKS: tuple[Blank, ...] = ("grey", "black", "noise")
SEEDS = (1, 2)


def dataset(folder: Path, blank: Blank, training: bool) -> Path:
    """Write the TOML of the demo's images with the region blanked with ``blank``; return its path.

    For training it is ``assets/demo_dataset/dataset.toml``, with its held-out images; for measuring all are used.
    """
    shutil.copytree(IMAGES, folder / "images", dirs_exist_ok=True)  # masks follow from the path as the TOML has it
    text = read_text(IMAGES.parent / "dataset.toml")
    lines = [line for line in text.splitlines() if training or not line.startswith("validation_")]
    where = next(number for number, line in enumerate(lines) if "image_dir" in line)
    lines.insert(where, f"  inpaint_blank = {json.dumps(blank)}")
    path = folder / f"{blank}-{'train' if training else 'measure'}.toml"
    write_text(path, "\n".join(lines) + "\n")
    return path


def lora_file(folder: Path, blank: Blank, base: str, seed: int) -> Path:
    """Return where the LoRA lies that was trained so."""
    return folder / f"{blank}-{base}-{seed}" / "lora.safetensors"


def train(
    folder: Path,
    seeds: Sequence[int] = SEEDS,
    blanks: Sequence[Blank] = BLANKS,
    bases: Sequence[str] = ("high", "fp8"),
    **options: object,
) -> None:
    """Train every LoRA that is not there yet, one after the other; ``options``: further ones of the script."""
    for seed, blank, base in product(seeds, blanks, bases):
        path = lora_file(folder, blank, base, seed)
        if not path.exists():
            data, cache = dataset(folder, blank, training=True), folder / "cache"
            fp8 = {"fp8_base": True, "fp8_exclude": True} if base == "fp8" else {}
            train_lora(seed, path.parent, dataset_config=data, cache_directory=cache, **fp8, **options)


@dataclass(eq=False)
class Bench:
    """The tiny fill model and the demo's images, ready to be run with any LoRA; fp32 on the CPU."""

    folder: Path
    steps: int
    console: Console

    def __post_init__(self) -> None:
        served = self.folder / "fp8"  # a plain cast of every layer, as published ones are
        if not served.exists():
            run("tools/quantize_model.py", model=MODEL, layout="plain", exclude="", save_to=served)
        self.models = models_with(None, parse_deployment(str(served)))
        self.encoder = self.models.image_encoder(REFERENCE)
        self._sets: dict[Blank, EvalSet] = {}
        self._references: dict[tuple[Path, Blank], Outcome] = {}

    def inputs(self, blank: Blank) -> EvalSet:
        """Return the images with their regions blanked with ``blank``: the same images, masks and noise for all."""
        if blank not in self._sets:
            toml = dataset(self.folder, blank, training=False)
            options = CalibrationOptions(
                str(toml), images=16, guidance_scale=1.0, cache_directory=str(self.folder / "cache")
            )
            found = self.models.plan(options).prepare(self.console)
            self._sets[blank] = replace(prepare_eval_set(self.models, found, REFERENCE, self.steps), sigmas=())
        return self._sets[blank]

    def run(self, lora: Path, variant: Variant, blank: Blank) -> Outcome:
        """Return what the model generates with ``lora`` as ``variant`` serves it."""
        self.models.loras = lora_weights(lora, self.models)
        name = f"{lora.parent.name}, {blank}: {variant.changes()}"
        return run_variant(self.models, variant, self.inputs(blank), self.console, name)

    def reference(self, lora: Path, blank: Blank) -> Outcome:
        """Return what it generates in high precision."""
        if (lora, blank) not in self._references:
            self._references[lora, blank] = self.run(lora, REFERENCE, blank)
        return self._references[lora, blank]

    def truth(self, blank: Blank) -> Outcome:
        """Return the pictures as they are, through the encoder and back."""
        latents = [batch.latents for batch in self.inputs(blank).batches]
        images = [self.encoder.decode(each)[0].float().cpu() for each in latents]
        return Outcome({}, [[each[0].cpu() for each in latents]], images)

    def measure(self, wanted: Outcome, found: Outcome) -> dict[str, Any]:
        """Return how far ``found`` is from ``wanted``, and where; every list has an entry an image.

        - ``image``: relative rms error of the decoded images.
        - ``times``: a figure of the border -> the error's over white noise's.
        - ``known``: rms error of the known side within 8 pixels of the border, and of the rest of it, in 8-bit steps.
        """
        eval_set = self.inputs("grey")
        masks = [eval_set.border_mask(number) for number in range(len(found.images))]
        errors, control, borders = border_errors_of(wanted, found, masks, self.encoder.decode)
        border = judge_border(errors, control, borders)
        assert border is not None
        sides = [border_errors(error, mask, 8) for error, mask in zip(errors, borders, strict=True)]
        name = "ring outside"
        return {
            "image": relative_error(wanted.images, found.images),
            "times": {figure.name: figure.by_image for figure in border.figures},
            "known": [(each.near[name] / STEP_8BIT, each.far[name] / STEP_8BIT) for each in sides],
        }


_FP8 = replace(REFERENCE, weights=True)
_MERGED = replace(_FP8, merge="stochastic")
TRAINING: dict[str, tuple[str, Variant]] = {
    "trained high, run high": ("high", REFERENCE),
    "trained high, served fp8": ("high", _FP8),
    "trained high, merged into fp8": ("high", _MERGED),
    "trained fp8, run high": ("fp8", REFERENCE),
    "trained fp8, served fp8": ("fp8", _FP8),
    "trained fp8, merged into fp8": ("fp8", _MERGED),
}


CONDITIONING: dict[str, Variant] = {
    "weights cast to fp8": _FP8,
    "LoRA merged, stochastic": _MERGED,
    "LoRA merged, to nearest": replace(_FP8, merge="nearest"),
    "activations, no scale": replace(_FP8, activations="unit"),
    "activations, a scale a tensor": replace(_FP8, activations="tensor"),
    "masked latents in bf16": replace(REFERENCE, latents_dtype="bf16"),
    "masked latents in fp8": replace(REFERENCE, latents_dtype="fp8"),
    "mask grown by 4 px": replace(REFERENCE, mask_grow=4),
    "mask grown by 16 px": replace(REFERENCE, mask_grow=16),
    "mask blurred, sigma 4 px": replace(REFERENCE, mask_blur=4.0),
    "mask snapped to 8 px": replace(REFERENCE, mask_snap=8),
    "mask snapped to 16 px": replace(REFERENCE, mask_snap=16),
    "trained on grey, given black": replace(REFERENCE, blank="black"),
    "trained on black, given grey": replace(REFERENCE, blank="grey"),
    "given noise": replace(REFERENCE, blank="noise"),
    "known latents composited": replace(REFERENCE, paste="latents"),
    "known pixels pasted": replace(REFERENCE, paste="pixels"),
}
Results = dict[str, Any]  # experiment, case, beside what, seed -> what Bench.measure returns


def key(*parts: object) -> str:
    """Return the name of a result."""
    return " | ".join(map(str, parts))


def cases() -> Iterator[tuple[str, Blank, str, str, Variant]]:
    """Yield experiment, blank, case, the base that its LoRA was trained on, and how it is run."""
    for blank, (case, (base, variant)) in product(BLANKS, TRAINING.items()):
        yield "training", blank, case, base, variant
    for blank, (case, variant) in product(BLANKS[:2], CONDITIONING.items()):
        if variant.blank != blank:
            yield "conditioning", blank, case, "high", variant


def experiments(bench: Bench, results: Results) -> Iterator[None]:
    """Fill in what is missing; yields whenever something was added."""
    for seed, (experiment, blank, case, base, variant) in product(SEEDS, cases()):
        lora = lora_file(bench.folder, blank, base, seed)
        if key(experiment, blank, case, "itself", seed) in results:
            continue
        reference = bench.reference(lora, blank)
        outcome = reference if variant == REFERENCE else bench.run(lora, variant, blank)
        if experiment == "training":
            results[key(experiment, blank, case, "truth", seed)] = bench.measure(bench.truth(blank), outcome)
        results[key(experiment, blank, case, "itself", seed)] = bench.measure(reference, outcome)
        yield


def over_loras(results: Results, names: Sequence[str]) -> tuple[float, dict[str, tuple[float, float, float]]]:
    """Return the mean image error of the results ``names``, one a LoRA, and figure -> times, low, high over images."""
    found = [results[name] for name in names]
    figures = {}
    for figure in LIMITS:
        logs = torch.tensor([each["times"][figure] for each in found], dtype=torch.float64).log().mean(0)
        figures[figure] = tuple(map(math.exp, (float(logs.mean()), *interval(logs))))
    return sum(each["image"] for each in found) / len(found), figures


def known_side(results: Results, names: Sequence[str]) -> tuple[float, float, float]:
    """Return the rms error of the known side within 8 pixels of the border, in 8-bit steps, and its interval."""
    near = torch.tensor([[pair[0] for pair in results[name]["known"]] for name in names], dtype=torch.float64).mean(0)
    return (float(near.mean()), *interval(near))


def rows_of(results: Results, experiment: str, beside: str = "itself") -> dict[str, list[str]]:
    """Return what was measured -> its results' names, one a LoRA, in the order of measuring."""
    rows: dict[str, list[str]] = {}
    for name in results:
        kind, blank, case, compared_with, _ = name.split(" | ")
        if (kind, compared_with) == (experiment, beside):
            rows.setdefault(key(blank, case) if experiment == "training" else case, []).append(name)
    return rows


def table(results: Results, rows: Mapping[str, Sequence[str]]) -> str:
    """Return a Markdown table: a row a case, its image error, its figures with their intervals."""
    lines = [f"| | LoRAs | image | {' | '.join(LIMITS)} |", "|---" * (3 + len(LIMITS)) + "|"]
    for title, names in rows.items():
        image, figures = over_loras(results, names)
        cells = [f"{middle:.2f} [{low:.2f}, {high:.2f}]" for middle, low, high in figures.values()]
        lines.append(f"| {title.replace(' | ', ', ')} | {len(names)} | {image:.1%} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report(results: Results, console: Console) -> None:
    """Print the tables of both experiments."""
    itself = {name: found for name, found in rows_of(results, "training").items() if "run high" not in name}
    console.print("conditioning", table(results, rows_of(results, "conditioning")), sep="\n")
    console.print("training, beside the same LoRA in high precision", table(results, itself), sep="\n")
    console.print("training, beside the true images: rms error of the known side, 8-bit steps, within 8 pixels")
    for title, names in rows_of(results, "training", "truth").items():
        middle, low, high = known_side(results, names)
        console.print(f"| {title.replace(' | ', ', ')} | {middle:.1f} [{low:.1f}, {high:.1f}] |")


@exit_on_user_error
def main() -> None:
    """Train, measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("output/seam"), help="of LoRAs and results")
    folder = parser.parse_args().folder.resolve()
    console = Console(highlight=False, soft_wrap=True, markup=False)
    train(folder)
    path = folder / "seam.json"
    results: Results = json.loads(read_text(path)) if path.exists() else {}
    for _ in experiments(Bench(folder, 8, console), results):
        write_text(path, json.dumps(results))
    report(results, console)


if __name__ == "__main__":
    main()
