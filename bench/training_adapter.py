"""A LoRA trained on the tiny FLUX's four-step student: directly, with a training adapter in it, or on the base.

    python bench/training_adapter.py --json adapter.json
    python bench/training_adapter.py --folder kept            # what is trained is kept there, and not trained again

The adapter is made once, of the student alone, by ``tools/make_training_adapter.py``: from images of the demo's 48
prompts of the base's own subjects. LoRAs of the demo's subject are trained with ``configs/demo.toml`` in fewer steps,
without preservation, and all are used on the plain student in four steps.

    loss       held-out loss at the end, of the model that the LoRA is trained in
    few_steps  relative distance of latents after four steps from those after 20, of the plain student with the LoRA
    sharpness  mean square of the Laplacian of the four-step images over that of the held-out ones, decoded as these are
    size, wrong, picture   of its effect on the student beside that of the base's LoRA on the base: bench/distilled.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import distilled
from bench.distilled import GUIDANCE, QUIET, SHORT, STEPS, Measured
from bench.tiny_runs import ROOT, lora_weights, run, train_lora
from library.fidelity.distilled import runs_at_strengths
from library.fidelity.runs import EvalSet, Outcome
from library.fidelity.serving import Models, Variant

ADAPTER = {"images": 480, "max_train_steps": 600, "learning_rate": 2e-4, "train_batch_size": 4}
FLOW = {"timestep_sampling": "shift", "discrete_flow_shift": 1.6, "guidance_scale": GUIDANCE}
KEYS = ("loss", "few_steps", "sharpness", "size", "wrong", "picture")


def make_adapter(turbo: Path, adapter: Path) -> None:
    """Make the training adapter of ``turbo``."""
    lines, prompts = (ROOT / "assets/demo_dataset/preserve.txt").read_text().splitlines(), turbo.parent / "prompts.txt"
    prompts.write_text("".join(line.partition(" --")[0] + " --w 128 --h 128\n" for line in lines))
    model = {"pretrained_model_name_or_path": turbo, "distilled_steps": STEPS, "prompts": prompts}
    run("tools/make_training_adapter.py", **model, output_dir=adapter.parent, **ADAPTER, **FLOW, **SHORT)


def finished(models: Models, lora: Path, eval_set: EvalSet, steps: int) -> Outcome:
    """Return the images of the plain student with ``lora`` in ``steps``."""
    served = replace(models, loras=lora_weights(lora, models))
    network = served.deployed.load(served.deployed_family, models.dtype, models.device).module
    variant, sampled = Variant(weights=True, shift="deployed"), replace(eval_set, sigmas=(), steps=steps)
    return runs_at_strengths(served, network, variant, sampled, QUIET, "")(1.0)


def sharpness(images: Sequence[Tensor]) -> float:
    """Return the mean square of the Laplacian of images [3, H, W]."""
    kernel = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]]).expand(3, 1, 3, 3)
    return float(F.conv2d(torch.stack([*images]), kernel, groups=3).square().mean())


def measure_seed(seed: int, place: Path, images: int) -> Measured:
    """Train the three LoRAs with ``seed``; measure each."""
    turbo, folder = place / "turbo", place / f"seed{seed}"
    adapter = place / "adapter" / "training_adapter.safetensors"
    if not adapter.exists():
        make_adapter(turbo, adapter)
    settings = {"config_file": "configs/demo.toml", "max_train_steps": distilled.LORA_STEPS, "preserve": "none", **FLOW}
    cases = "the base", "the student", "the student with the adapter"
    loras = {case: folder / case.replace(" ", "_") / "lora.safetensors" for case in cases}
    for case, lora in loras.items():
        if not lora.exists():
            more = {} if case == "the base" else {"pretrained_model_name_or_path": turbo}
            more |= {"base_weights": adapter} if case.endswith("adapter") else {}
            train_lora(seed, lora.parent, **settings, **distilled.SILENT, **SHORT, **more)
    served, eval_set = distilled.served_on(place, folder, loras["the base"], images)
    encoder, found = served.family.load_image_encoder(served.dtype, served.device), Measured()
    painted = sharpness([encoder.decode(batch.latents)[0] for batch in eval_set.batches])
    for case, lora in loras.items():
        few, many = (finished(served, lora, eval_set, steps) for steps in (STEPS, distilled.BASE_STEPS))
        wanted, records = torch.stack(many.latents), (lora.parent / "metrics.jsonl").read_text().splitlines()
        found[case] = distilled.effect_on_student(served, eval_set, lora) | {
            "loss": [json.loads(record)["val_loss"] for record in records if '"val_loss"' in record][-1],
            "few_steps": float((torch.stack(few.latents) - wanted).norm() / wanted.norm()),
            "sharpness": sharpness(few.images) / painted,
        }
    return found


if __name__ == "__main__":
    distilled.measure_seeds(__doc__, measure_seed, KEYS)
