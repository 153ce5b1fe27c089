"""What a LoRA of the tiny FLUX does on its four-step student, as it is and with each remedy, on held-out images.

    python bench/distilled.py --json distilled.json
    python bench/distilled.py --seeds 1 --images 8            # a quick look

For each training seed a LoRA is trained on the base with ``configs/demo.toml`` in fewer steps. Its effect on the base
is what the student is to show: velocities at the student's four noise levels, and finished images, of scenes
painted from seeds that no training has seen. Remedies are trained on others. *wrong* is what is missing or wrong of the
effect on the velocity, over the effect. Captions have 32 tokens, as where the student was made.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.measure import Table, benchmark_parser, finish
from bench.tiny_runs import ROOT, lora_weights, mean_and_spread, models_with, paint, run, train_lora
from library.config.schema import ModelConfig
from library.console import Console
from library.fidelity.calibration import CalibrationOptions
from library.fidelity.deployed import DeployedWeights
from library.fidelity.distilled import StrengthRow, compare_distilled
from library.fidelity.runs import prepare_eval_set
from library.fidelity.serving import REFERENCE

MODEL, DIFFERENCE = ROOT / "assets" / "tiny-flux", ROOT / "assets" / "tiny-flux-turbo.safetensors"
TRAINING_IMAGES, STEPS, BASE_STEPS, GUIDANCE = 32, 4, 20, 3.5
TOKENS, LORA_STEPS, TEACHER_STEPS, TEACHER_RATE = 32, 250, 100, 3e-4


def measure_seed(
    seed: int, held_out: Path, images: int, training: Path, turbo: Path, folder: Path
) -> dict[str, StrengthRow]:
    """Train a LoRA with ``seed``; return case -> its row."""
    short = {"max_data_loader_n_workers": 0, "t5xxl_max_token_length": TOKENS}
    silent = {"no-sample_at_first": True, "no-sample_at_end": True, "general_prompts": "none"}
    lora = train_lora(seed, folder, config_file="configs/demo.toml", max_train_steps=LORA_STEPS, **silent, **short)
    config = ModelConfig(pretrained_model_name_or_path=str(MODEL), t5xxl_max_token_length=TOKENS)
    models = models_with(lora, DeployedWeights("the student", turbo, None), config)
    options = CalibrationOptions(str(held_out), images, guidance_scale=GUIDANCE, cache_directory=str(folder / "held"))
    console = Console(quiet=True)
    eval_set = prepare_eval_set(models, models.plan(options).prepare(console), REFERENCE, BASE_STEPS)
    rows = {"as it is": compare_distilled(models, eval_set, STEPS, console).at(1.0)}
    for name, effect in {"teacher: the base's answers": {}, "teacher: the effect": {"distill_effect": True}}.items():
        output = folder / name.rpartition(" ")[2]
        run(
            "train_lora.py",
            pretrained_model_name_or_path=turbo,
            distill_from=MODEL,
            distill_lora=lora,
            network_weights=lora,
            dim_from_weights=True,
            dataset_config=training,
            guidance_scale=GUIDANCE,
            max_train_steps=TEACHER_STEPS,
            learning_rate=TEACHER_RATE,
            lr_scheduler="cosine",
            seed=seed,
            output_dir=output,
            output_name="taught",
            cache_directory=folder / "cache_training",
            **effect,
            **short,
        )
        taught = lora_weights(output / "taught.safetensors", models)
        rows[name] = compare_distilled(models, eval_set, STEPS, console, taught).at(1.0)
    return rows


KEYS = ("size", "direction", "picture", "picture_direction")


def main() -> None:
    """Measure, print, write."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="training seeds (default: %(default)s)")
    parser.add_argument("--images", type=int, default=16, help="held-out images (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        held_out = paint(place / "held_out", options.images, seed=2026, subset="")
        training = paint(place / "training", TRAINING_IMAGES, seed=2027, subset="")
        turbo = place / "turbo"
        run("tools/merge_lora.py", "--model", MODEL, "--lora", DIFFERENCE, "--save_to", turbo)
        found = [
            measure_seed(seed, held_out, options.images, training, turbo, place / f"seed{seed}")
            for seed in range(1, options.seeds + 1)
        ]
    table = Table({"case": "<34", **dict.fromkeys(KEYS, "18.2f"), "wrong": "8.2f", "wrong_spread": "13.2f"})
    for case in found[0]:
        rows = [seed[case] for seed in found]
        means = {key: mean(getattr(row, key) for row in rows) for key in KEYS}
        table.add({"case": case} | means | mean_and_spread("wrong", [row.error for row in rows]))
    finish(table.rows, {}, options.json)


if __name__ == "__main__":
    main()
