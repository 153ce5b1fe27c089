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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.measure import Table, benchmark_parser, finish
from bench.tiny_runs import paint, run
from library.config.schema import ModelConfig
from library.console import Console
from library.fidelity.calibration import CalibrationOptions
from library.fidelity.deployed import DeployedWeights
from library.fidelity.distilled import StrengthRow, compare_distilled
from library.fidelity.runs import prepare_eval_set
from library.fidelity.serving import REFERENCE, Models
from networks.files.adapters import load_lora

ROOT = Path(__file__).resolve().parent.parent
MODEL, DIFFERENCE = ROOT / "assets" / "tiny-flux", ROOT / "assets" / "tiny-flux-turbo.safetensors"
TRAINING_IMAGES, STEPS, BASE_STEPS, GUIDANCE = 32, 4, 20, 3.5
TOKENS, LORA_STEPS, TEACHER_STEPS, TEACHER_RATE = 32, 250, 100, 3e-4


def measure_seed(seed: int, held_out: Path, images: int, training: Path, turbo: Path, folder: Path) -> dict[str, Any]:
    """Train a LoRA with ``seed``; return case -> its row, and the equal strength under that name."""
    lora, workers = folder / "lora.safetensors", {"max_data_loader_n_workers": 0, "t5xxl_max_token_length": TOKENS}
    run(
        "train_lora.py",
        "--no-sample_at_first",
        "--no-sample_at_end",
        config_file="configs/demo.toml",
        seed=seed,
        general_prompts="none",
        max_train_steps=LORA_STEPS,
        output_dir=folder,
        output_name="lora",
        cache_directory=folder / "cache",
        **workers,
    )
    config = ModelConfig(pretrained_model_name_or_path=str(MODEL), t5xxl_max_token_length=TOKENS)
    models = Models(config, DeployedWeights("the student", turbo, None), {}, torch.float32, torch.device("cpu"))

    def weights(path: Path) -> dict[str, Any]:
        return models.targets.by_component(load_lora(path, models.targets).weights)

    models.loras = weights(lora)
    options = CalibrationOptions(str(held_out), images, guidance_scale=GUIDANCE, cache_directory=str(folder / "held"))
    console = Console(quiet=True)
    eval_set = prepare_eval_set(models, models.plan(options).prepare(console), REFERENCE, BASE_STEPS)
    found = compare_distilled(models, eval_set, STEPS, console)
    rows: dict[str, Any] = {"as it is": found.at(1.0), "equal": found.equal}
    if found.equal is not None:
        rows["at the equal strength"] = found.at(found.equal)

    def with_lora(path: Path) -> StrengthRow:
        return compare_distilled(models, eval_set, STEPS, console, weights(path)).at(1.0)

    for name, flags in {"teacher: the base's answers": (), "teacher: the effect": ("--distill_effect",)}.items():
        output = folder / name.rpartition(" ")[2]
        run(
            "train_lora.py",
            "--dim_from_weights",
            *flags,
            pretrained_model_name_or_path=turbo,
            distill_from=MODEL,
            distill_lora=lora,
            network_weights=lora,
            dataset_config=training,
            guidance_scale=GUIDANCE,
            max_train_steps=TEACHER_STEPS,
            learning_rate=TEACHER_RATE,
            lr_scheduler="cosine",
            seed=seed,
            output_dir=output,
            output_name="taught",
            cache_directory=folder / "cache_training",
            **workers,
        )
        rows[name] = with_lora(output / "taught.safetensors")
    return rows


COLUMNS = {"case": "<34", "size": "8.2f", "direction": "10.3f", "wrong": "8.2f", "wrong_spread": "13.2f"}
COLUMNS |= {"picture": "8.2f", "picture_direction": "18.2f"}


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
    table = Table(COLUMNS)
    for case in dict.fromkeys(case for seed in found for case in seed):
        rows = [seed[case] for seed in found if isinstance(seed.get(case), StrengthRow)]
        if rows:
            errors = [row.error for row in rows]
            keys = ("size", "direction", "picture", "picture_direction")
            means = {key: mean(getattr(row, key) for row in rows) for key in keys}
            spread = (max(errors) - min(errors)) / 2
            table.add({"case": case, **means, "wrong": mean(errors), "wrong_spread": spread})
    equal = {f"equal_strength_{n + 1}": seed["equal"] for n, seed in enumerate(found) if seed["equal"]}
    finish(table.rows, equal, options.json)


if __name__ == "__main__":
    main()
