"""What sliders and preference pairs do on the tiny FLUX: how bright the ground is at each strength of the LoRA.

    python bench/directions.py --json directions.json
    python bench/directions.py --seeds 1        # a quick look

The direction is from a dark ground to a bright one. Training has circles and squares on grounds of it, captions say
gray; what is measured are a run's samples, of hearts and stars in other colours. *ground* is the mean brightness of a
corner, 0 to 1, at strengths -2 to 2, which begin with the same noise; *shape* the mean change of the middle at strength
1 against 0: what should stay; *accuracy* the share of held-out pairs that are ranked rightly.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from PIL import Image

from bench.measure import Table, benchmark_parser, finish
from bench.painting import COLOURS, paint_shape, to_image
from bench.tiny_runs import TRAINING, mean_and_spread, run

STRENGTHS, STEPS = (-2, -1, 0, 1, 2), 40
TRAINED = [f"{colour} {shape}" for shape in ("circle", "square") for colour in ("red", "blue", "yellow")]
MEASURED = ("purple heart", "pink heart", "purple star")
WAYS: dict[str, dict[str, object]] = {
    "slider of prompts": {"train_on": "slider", "slider_guidance": 1},
    "slider of images": {"train_on": "slider"},
    "preference pairs": {"train_on": "preferences", "dpo_beta": 100, "sample_at_first": True},
}
FLAGS = TRAINING | {
    "network_dim": 8,
    "learning_rate": 1e-3,
    "max_train_steps": STEPS,
    "validate_every_n_steps": STEPS,
}


def write_files(folder: Path) -> None:
    """Write pairs of images, a dataset TOML with and without them, directions, and the prompts to measure on."""
    rng = np.random.default_rng(0)
    for name, low, high in (("bright", 0.75, 0.95), ("dark", 0.1, 0.3)):
        (folder / name).mkdir()
        for number, words in enumerate(TRAINED * 2):
            image = np.full((128, 128, 3), rng.uniform(low, high), np.float32)
            colour, shape = words.split()
            paint_shape(image, shape, (64.0, 64.0), 30.0, COLOURS[colour])
            to_image(image).save(folder / name / f"{number:02d}.png")
            (folder / "bright" / f"{number:02d}.txt").write_text(f"a {words} on a gray background")
    text = (
        '[general]\ncaption_extension = ".txt"\n[[datasets]]\nresolution = 128\nbatch_size = 2\n'
        'validation_split = 0.25\nvalidation_seed = 1\n[[datasets.subsets]]\nimage_dir = "bright"\n'
    )
    (folder / "slider of prompts.toml").write_text(text)
    for way in ("slider of images", "preference pairs"):
        (folder / f"{way}.toml").write_text(text + 'paired_directory = "dark"\n')
    line = "a {0} on a gray background --p a {0} on a white background --n a {0} on a black background"
    (folder / "slider.txt").write_text("\n".join(map(line.format, TRAINED)))
    sampled = (f"a {words} on a gray background --w 128 --h 128 --s 10 --g 1" for words in MEASURED)
    (folder / "prompts.txt").write_text("\n".join(sampled))


def measure(folder: Path, way: str, seed: int) -> dict[str, float]:
    """Train one LoRA; return what its samples show, and what the run measured."""
    output, own = folder / f"{way} {seed}", {"seed": seed, "sample_prompts": folder / "prompts.txt"}
    own |= {"slider_prompts": folder / "slider.txt"} if way == "slider of prompts" else {}
    places = {"dataset_config": folder / f"{way}.toml", "cache_directory": folder / "cache", "output_dir": output}
    run("train_lora.py", **FLAGS | WAYS[way] | own | places)
    files, strengths = sorted((output / "samples").glob("step*_*.png")), list(STRENGTHS)
    if way == "preference pairs":  # before the first step, and after the last
        files, strengths = [path for pair in zip(files[:3], files[3:], strict=True) for path in pair], [0, 1]
    pixels = np.stack([np.asarray(Image.open(path), np.float32) / 255 for path in files])
    images = pixels.reshape(len(MEASURED), len(strengths), *pixels.shape[1:])
    ground, middle = images[:, :, :16, :16].mean(axis=(0, 2, 3, 4)), images[:, :, 52:76, 52:76]
    change = np.abs(middle[:, strengths.index(1)] - middle[:, strengths.index(0)]).mean()
    found = {f"ground {strength}": value for strength, value in zip(strengths, ground.tolist(), strict=True)}
    last = json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])
    return found | {"shape": float(change), "accuracy": last.get("val_rewards/accuracies", np.nan)}


def main() -> None:
    """Measure, print, write."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="training seeds (default: %(default)s)")
    options = parser.parse_args()
    keys = [*(f"ground {strength}" for strength in STRENGTHS), "shape", "accuracy"]
    table = Table({"way": "<18", **{name: "17.2f" for key in keys for name in (key, f"{key}_spread")}})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_files(folder)
        for way in WAYS:
            runs = [measure(folder, way, seed) for seed in range(1, options.seeds + 1)]
            row: dict[str, object] = {"way": way}
            for key in runs[0]:
                row |= mean_and_spread(key, [one[key] for one in runs])
            table.add(row)
    finish(table.rows, {}, options.json)


if __name__ == "__main__":
    main()
