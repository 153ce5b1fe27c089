"""What the benchmarks of the built-in tiny models share: painted images, scripts of this repository, a fill LoRA."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from PIL import Image, ImageOps

from bench.painting import random_zorbo, to_image
from library.config.schema import ModelConfig
from library.errors import UserError
from library.fidelity.calibration import CalibrationOptions
from library.fidelity.deployed import DeployedWeights
from library.fidelity.serving import Models
from networks.files.adapters import load_lora
from networks.files.weights import LoraWeights

ROOT = Path(__file__).resolve().parent.parent
MODEL, BASE = ROOT / "assets" / "tiny-flux-fill", ROOT / "assets" / "tiny-flux"
TRAINING = {  # of the base
    "pretrained_model_name_or_path": BASE,
    "timestep_sampling": "shift",
    "discrete_flow_shift": 1.6,
    "max_data_loader_n_workers": 0,
}
SIGMAS, GUIDANCE = (0.8, 0.4), 1.0


def paint(folder: Path, count: int, seed: int, subset: str = "inpaint_mask_variants = 4\n") -> Path:
    """Paint ``count`` images that no LoRA is trained on, with captions; return their dataset TOML, with ``subset``."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True)
    for number in range(count):
        caption, image = random_zorbo(rng)
        to_image(image).save(folder / "images" / f"{number:03d}.png")
        (folder / "images" / f"{number:03d}.txt").write_text(caption)
    return _dataset(folder, subset)


PHOTOGRAPHS = {
    "astronaut.png": "a woman in an orange suit",
    "brick.png": "a brick wall",
    "camera.png": "a man with a camera",
    "chelsea.png": "a cat",
    "coffee.png": "a cup of coffee on a table",
    "coins.png": "old coins",
    "grass.png": "grass",
    "gravel.png": "gravel",
    "hubble_deep_field.jpg": "galaxies",
    "moon.png": "the moon",
    "motorcycle_left.png": "a motorcycle",
    "rocket.jpg": "a rocket",
}


def photographs(folder: Path, count: int) -> Path:
    """Cut squares of 128 out of ``count`` of the photographs that come with scikit-image; return their dataset TOML."""
    found = importlib.util.find_spec("skimage")
    if found is None or found.origin is None:
        raise UserError("photographs: they come with scikit-image; pip install -r requirements/bench.txt")
    (folder / "images").mkdir(parents=True)
    for name, caption in list(PHOTOGRAPHS.items())[:count]:
        image = Image.open(Path(found.origin).parent / "data" / name).convert("RGB")
        ImageOps.fit(image, (128, 128), Image.Resampling.LANCZOS).save(folder / "images" / f"{Path(name).stem}.png")
        (folder / "images" / f"{Path(name).stem}.txt").write_text(f"a photograph of {caption}")
    return _dataset(folder, "inpaint_mask_variants = 4\n")


def _dataset(folder: Path, subset: str) -> Path:
    path = folder / "dataset.toml"
    path.write_text(
        '[general]\ncaption_extension = ".txt"\n[[datasets]]\nresolution = 128\nbatch_size = 4\n'
        f'[[datasets.subsets]]\nimage_dir = "images"\n{subset}'
    )
    return path


def flags(options: Mapping[str, object]) -> list[str]:
    """Return each option as a flag and its value, or values of a list; True is a flag alone."""
    words = list[str]()
    for name, value in options.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        words += [f"--{name}", *map(str, values)]
    return words


def run(script: str, *words: object, **options: object) -> None:
    """Run a script of this repository with ``words``, then each of ``options`` as a flag."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, script, *map(str, words), *flags(options)]
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)


def train_lora(seed: int, folder: Path, **options: object) -> Path:
    """Train the demo's LoRA for a fp8 model, or as ``options`` say, with ``seed`` in ``folder``; return its file."""
    training = {"config_file": "configs/demo_fp8.toml", "seed": seed, "cache_directory": folder / "cache"} | options
    run("train_lora.py", **training, output_dir=folder, output_name="lora")
    return folder / "lora.safetensors"


def calibration_options(dataset: Path, images: int, cache: Path) -> CalibrationOptions:
    """Return how ``images`` of a painted dataset are noised, their latents and text kept in ``cache``."""
    return CalibrationOptions(str(dataset), images, SIGMAS, 0, GUIDANCE, cache_directory=str(cache))


def merge_compensated(lora: Path, precision: str, fitted: CalibrationOptions, target: Path) -> DeployedWeights:
    """Merge ``lora`` from the 16-bit model into ``precision``, rounded by what the images of ``fitted`` show."""
    run(
        "tools/merge_lora.py",
        "--transformer_only",
        model=MODEL,
        model_type="flux_fill",
        lora=lora,
        save_to=target,
        save_precision=precision,
        rounding="compensated",
        guidance_scale=GUIDANCE,
        calibration_images=fitted.images,
        dataset_config=fitted.dataset_config,
        cache_directory=fitted.cache_directory,
    )
    return DeployedWeights(str(target), target, None, merged=True)


def mean_and_spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the mean of what each seed gave, and half its range as ``name``_spread; nothing of no values."""
    return {name: mean(values), f"{name}_spread": (max(values) - min(values)) / 2} if values else {}


_FILL = ModelConfig(model_type="flux_fill", pretrained_model_name_or_path=str(MODEL))


def models_with(lora: Path | None, deployed: DeployedWeights, config: ModelConfig = _FILL) -> Models:
    """Return the reference of ``config`` and ``deployed``, with the LoRA if there is one."""
    models = Models(config, deployed, {}, torch.float32, torch.device("cpu"))
    if lora is not None:
        models.loras = lora_weights(lora, models)
    return models


def lora_weights(path: Path, models: Models) -> dict[str, dict[str, LoraWeights]]:
    """Return component -> layer -> weights of a LoRA file."""
    return models.targets.by_component(load_lora(path, models.targets).weights)
