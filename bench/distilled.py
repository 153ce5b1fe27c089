"""What a LoRA of the tiny FLUX does on its four-step student, as it is and with each remedy, on held-out images.

    python bench/distilled.py --json distilled.json
    python bench/distilled.py --seeds 1                       # a quick look
    python bench/distilled.py --folder kept                   # what is trained is kept there, and not trained again

For each training seed a LoRA is trained on the base with ``configs/demo.toml`` in fewer steps. Its effect on the base
is what the student is to show: velocities at the student's four noise levels, and finished images, of scenes
painted from seeds that no training has seen. For the student it is trained on others. *wrong* is what is missing or
wrong of the effect on the velocity, over the effect. Captions have 32 tokens, as where the student was made.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.measure import Table, benchmark_parser, finish
from bench.tiny_runs import ROOT, lora_weights, mean_and_spread, models_with, paint, run, train_lora
from library.config.schema import ModelConfig
from library.console import Console
from library.fidelity.calibration import CalibrationOptions
from library.fidelity.deployed import DeployedWeights
from library.fidelity.distilled import compare_distilled
from library.fidelity.runs import EvalSet, prepare_eval_set
from library.fidelity.serving import REFERENCE, Models

Measured = dict[str, dict[str, float]]  # case -> what is measured, by name
QUIET = Console(quiet=True)
MODEL, DIFFERENCE = ROOT / "assets" / "tiny-flux", ROOT / "assets" / "tiny-flux-turbo.safetensors"
TRAINING_IMAGES, STEPS, BASE_STEPS, GUIDANCE = 128, 4, 20, 3.5
TOKENS, LORA_STEPS, STRENGTH, TEACHER_STEPS, TEACHER_RATE = 32, 250, 1.2, 300, 1e-3
SHORT = {"max_data_loader_n_workers": 0, "t5xxl_max_token_length": TOKENS}
SILENT = {"no-sample_at_first": True, "no-sample_at_end": True, "general_prompts": "none"}
KEYS = ("size", "direction", "wrong", "picture", "picture_direction")


def served_on(place: Path, folder: Path, lora: Path, images: int) -> tuple[Models, EvalSet]:
    """Return the base with ``lora``, served as the student in ``place``, and the images to measure on."""
    config = ModelConfig(pretrained_model_name_or_path=str(MODEL), t5xxl_max_token_length=TOKENS)
    models = models_with(lora, DeployedWeights("the student", place / "turbo", None), config)
    dataset, cache = place / "held_out" / "dataset.toml", folder / "held"
    options = CalibrationOptions(str(dataset), images, guidance_scale=GUIDANCE, cache_directory=str(cache))
    return models, prepare_eval_set(models, models.plan(options).prepare(QUIET), REFERENCE, BASE_STEPS)


def effect_on_student(models: Models, eval_set: EvalSet, lora: Path) -> dict[str, float]:
    """Return what ``lora`` does on the student, beside what the LoRA of ``models`` does on the base."""
    row = compare_distilled(models, eval_set, STEPS, QUIET, lora_weights(lora, models)).at(1.0)
    return {key: row.error if key == "wrong" else getattr(row, key) for key in KEYS}


def measure_seed(seed: int, place: Path, images: int) -> Measured:
    """Train a LoRA with ``seed`` on the base, mend it for the student in both ways; measure each."""
    folder = place / f"seed{seed}"
    lora, stronger, taught = (folder / f"{name}.safetensors" for name in ("lora", "stronger", "taught/taught"))
    if not lora.exists():
        train_lora(seed, folder, config_file="configs/demo.toml", max_train_steps=LORA_STEPS, **SILENT, **SHORT)
    if not taught.exists():
        run(
            "train_lora.py",
            pretrained_model_name_or_path=place / "turbo",
            distill_from=MODEL,
            distill_effect=True,
            distill_lora=lora,
            network_weights=lora,
            dim_from_weights=True,
            max_train_steps=TEACHER_STEPS,
            learning_rate=TEACHER_RATE,
            lr_scheduler="cosine",
            seed=seed,
            output_dir=taught.parent,
            output_name="taught",
            dataset_config=place / "training" / "dataset.toml",
            cache_directory=folder / "cache_training",
            guidance_scale=GUIDANCE,
            **SHORT,
        )
    if not stronger.exists():
        run("tools/merge_lora.py", lora=f"{lora}:{STRENGTH}", save_to=stronger)
    models, eval_set = served_on(place, folder, lora, images)
    files = {"as it is": lora, f"at strength {STRENGTH}": stronger, "trained on the effect": taught}
    return {case: effect_on_student(models, eval_set, file) for case, file in files.items()}


def measure_seeds(doc: str | None, measure: Callable[[int, Path, int], Measured], keys: Sequence[str]) -> None:
    """Make the student, call ``measure`` with each seed, the folder and the number of images; print, write."""
    parser = benchmark_parser(doc)
    parser.add_argument("--seeds", type=int, default=3, help="training seeds (default: %(default)s)")
    parser.add_argument("--images", type=int, default=8, help="held-out images (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="for what is trained, to keep (default: none is kept)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        place = (options.folder or Path(temporary)).resolve()
        if not (place / "turbo").exists():
            run("tools/merge_lora.py", "--model", MODEL, "--lora", DIFFERENCE, "--save_to", place / "turbo")
            paint(place / "held_out", options.images, seed=2026, subset="")
            paint(place / "training", TRAINING_IMAGES, seed=2027, subset="")
        found = [measure(seed, place, options.images) for seed in range(1, options.seeds + 1)]
    table = Table({"case": "<30"} | {name: "18.3f" for key in keys for name in (key, f"{key}_spread")})
    for case in found[0]:
        row = {"case": case}
        for key in keys:
            row |= mean_and_spread(key, [seed[case][key] for seed in found])
        table.add(row)
    finish(table.rows, {}, options.json)


if __name__ == "__main__":
    measure_seeds(__doc__, measure_seed, KEYS)
