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

import matplotlib.pyplot as plt
import numpy as np
import torch
from diffusers import FluxPipeline
from PIL import Image

from bench.measure import Table, benchmark_parser, finish
from bench.painting import COLOURS, SHAPES, Pixels, background, coverage, paint, paint_shape, paint_zorbo, to_image
from bench.tiny_runs import BASE, ROOT, TRAINING, mean_and_spread, run

DEMO = ROOT / "assets" / "demo_dataset"
IMAGES, STEPS, EVERY, BATCH = 16, 100, 25, 2
FLAGS = TRAINING | {
    "network_dim": 16,
    "network_alpha": 16,
    "learning_rate": 2e-3,
    "lr_scheduler": "constant_with_warmup",
    "lr_warmup_steps": 20,
    "max_train_steps": STEPS,
    "validate_every_n_steps": EVERY,
    "general_prompts": DEMO / "general.txt",
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
    outside = {"masked_loss": True, "preserve": "prior", "preserve_outside_mask": True, "prior_loss_weight": 1}
    return {
        PLAIN: ("plain", {}),
        "regularisation images": ("regularised", {}),
        "prior": ("plain", PAINTED),
        "prior, weight 1": ("plain", PAINTED | {"prior_loss_weight": 1}),
        "prior, samples alone": ("plain", PAINTED | {"preserve_directions": 0}),
        "class word": ("plain", {"preserve": "prior", "preserve_class": word}),
        MASKED: ("masked", {"masked_loss": True}),
        "masked, prior outside": ("masked", outside),
    }


Curve = np.ndarray  # a run's validations: seconds of training until there, held-out loss, change elsewhere
Curves = Mapping[tuple[str, int], Curve]  # (subject, seed) -> its run


def at(curve: Curve, loss: float) -> np.ndarray:
    """Return the three where the loss is first as low as ``loss``, on a line between two validations."""
    i = int(np.argmax(curve[1, 1:] <= loss))
    before, after = curve[1, i : i + 2]
    share = (before - loss) / (before - after) if before > after else 1.0
    return curve[:, i] + share * (curve[:, i + 1] - curve[:, i])


def at_equal_learning(found: Mapping[str, Curves]) -> dict[str, np.ndarray]:
    """Return way -> the three [cases, 3] where the loss is what all ways of a case have reached."""
    cases = list(next(iter(found.values())))
    level = {case: max(min(curves[case][1]) for curves in found.values()) for case in cases}
    return {way: np.array([at(curves[case], level[case]) for case in cases]) for way, curves in found.items()}


def curve_of(output: Path) -> Curve:
    """Return how the validations of the run in ``output`` went."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    per_step = {line["step"]: line["s_per_it"] for line in lines if "loss" in line}
    found = [line for line in lines if "val_loss" in line]
    seconds = [sum(s for step, s in per_step.items() if step <= line["step"]) for line in found]
    return np.array([seconds, *([line[key] for line in found] for key in ("val_loss", "val_prior_loss"))])


class ZeroShot:
    """How often the model still knows what is in an image, asked in diffusers alone.

    Open-world forgetting is measured so by Laria et al. (arXiv 2410.14159): of several captions the one with the lowest
    denoising error is the answer. Here four name another shape or another colour each; a guess is right in a quarter.
    """

    SIGMAS, CHOICES, COUNT = (0.5, 0.7, 0.85), 4, 32

    def __init__(self) -> None:
        rng, self.pipe = np.random.default_rng(5), FluxPipeline.from_pretrained(str(BASE), torch_dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)
        self.images, self.captions = [], []
        colours, shapes = [name for name in COLOURS if name not in ("black", "white", "gray")], list(SHAPES)
        for number in range(self.COUNT):
            shape, colour, behind = str(rng.choice(shapes)), *map(str, rng.choice(colours, 2, replace=False))
            image = np.broadcast_to(np.asarray(COLOURS[behind], np.float32), (128, 128, 3)).copy()
            paint_shape(image, shape, (64, 64), rng.uniform(26, 40), COLOURS[colour])
            self.images.append(torch.from_numpy(image).permute(2, 0, 1) * 2 - 1)
            others = [one for one in (shapes if number % 2 else colours) if one not in (shape, colour, behind)]
            wrong = list(map(str, rng.choice(others, self.CHOICES - 1, replace=False)))
            pairs = [(shape, colour), *((w, colour) if number % 2 else (shape, w) for w in wrong)]
            self.captions.append([f"a {c} {s} on a {behind} background" for s, c in pairs])

    @torch.no_grad()
    def accuracy(self, lora: Path | None) -> float:
        """Return the share of right answers, with a LoRA."""
        pipe, right, drawn = self.pipe, 0, torch.Generator().manual_seed(6)
        if lora is not None:
            pipe.load_lora_weights(str(lora))
        vae, config = pipe.vae, pipe.vae.config
        for image, captions in zip(self.images, self.captions, strict=True):
            clean = (vae.encode(image[None]).latent_dist.mode() - config.shift_factor) * config.scaling_factor
            text, pooled, text_ids = pipe.encode_prompt(captions, None, max_sequence_length=64)
            count, (_, channels, height, width) = len(captions), clean.shape
            ids = pipe._prepare_latent_image_ids(1, height // 2, width // 2, "cpu", torch.float32)
            errors = torch.zeros(count)
            for sigma in self.SIGMAS:
                noise = torch.randn(clean.shape, generator=drawn)
                packed = [pipe._pack_latents(x, 1, channels, height, width) for x in (noise, clean)]
                noisy = sigma * packed[0] + (1 - sigma) * packed[1]
                levels, guidance = torch.full((count,), sigma), torch.full((count,), 3.5)
                found = pipe.transformer(
                    noisy.expand(count, -1, -1), text, pooled, levels, ids, text_ids, guidance, return_dict=False
                )[0]
                errors += (found - (packed[0] - packed[1])).square().mean((1, 2))
            right += int(errors.argmin() == 0)
        if lora is not None:
            pipe.unload_lora_weights()
        return right / self.COUNT


def run_folder(folder: Path, case: tuple[str, int], way: str) -> Path:
    """Return where the run of a subject and seed is."""
    return folder / "runs" / f"{case[0]}-{way}-{case[1]}"


def train(folder: Path, name: str, way: str, seed: int) -> Curve:
    """Train one LoRA; return how its validations went."""
    dataset, options = ways(SUBJECTS[name][2])[way]
    data, output = folder / name / f"{dataset}.toml", run_folder(folder, (name, seed), way)
    own = FLAGS | options | {"dataset_config": data, "cache_directory": folder / "cache"}
    run("train_lora.py", **own, output_dir=output, seed=seed)
    return curve_of(output)


def rows_of(found: Mapping[str, Curves], known: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a row for each way: means over subjects and seeds, with the words that are ``known`` after each way."""
    cases, rows = list(found[PLAIN]), []
    for way, curves in found.items():
        beside = {other: c for other, c in found.items() if other.startswith("masked") == way.startswith("masked")}
        reached = at_equal_learning(beside)
        equal, shares = reached[way], reached[way] / reached[MASKED if way.startswith("masked") else PLAIN]
        ends = np.array([curves[case][:, [0, -1]] for case in cases])  # [cases, 3, 2]
        row: dict[str, Any] = {
            "way": way,
            "learnt": (ends[:, 1, 0] - ends[:, 1, 1]).mean(),
            "elsewhere": ends[:, 2, 1].mean(),
            "equal": equal[:, 2].mean(),
            "time": shares[:, 0].mean(),
            "words": known[way],
            "curve": np.mean([curves[case] for case in cases], axis=0).tolist(),
        }
        rows.append(row | mean_and_spread("share", shares[:, 2].tolist()))
    return rows


COLUMNS = {"way": "<24", "learnt": "8.3f", "elsewhere": "10.4f", "equal": "8.4f", "share": "8.2f"}
COLUMNS |= {"share_spread": "13.2f", "time": "8.2f", "words": "8.2f"}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw what was changed elsewhere against what was learnt, a point a validation, and both over time."""
    figure, (against, over) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for number, row in enumerate(rows):
        seconds, loss, elsewhere = map(np.array, row["curve"])
        against.plot(loss[0] - loss, elsewhere, "o-", color=f"C{number}", label=row["way"])
        over.plot(seconds, loss[0] - loss, "o-", color=f"C{number}")
        over.plot(seconds, elsewhere, "o:", color=f"C{number}")
    against.set(xlabel="learnt: decrease of the held-out loss", ylabel="changed elsewhere")
    over.set(xlabel="seconds of training", ylabel="learnt (solid), changed elsewhere (dotted)")
    against.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    """Measure, print, write."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="training seeds (default: %(default)s)")
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--ways", nargs="+", choices=ways("circle"), default=list(ways("circle")))
    parser.add_argument("--picture", type=Path, help="PNG of the curves to write")
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
        names = options.ways
        cases = [(name, seed) for name in options.subjects for seed in range(1, options.seeds + 1)]
        with ThreadPoolExecutor(options.jobs) as pool:  # each waits for a process of its own
            waiting = {(w, case): pool.submit(train, folder, case[0], w, case[1]) for case in cases for w in names}
            found = {way: {case: waiting[way, case].result() for case in cases} for way in names}
        zero_shot = ZeroShot()
        files = {way: [run_folder(folder, case, way) / "lora.safetensors" for case in cases] for way in names}
        known = {way: float(np.mean([zero_shot.accuracy(file) for file in files[way]])) for way in names}
    table, rows = Table(COLUMNS), rows_of(found, known)
    for row in rows:
        table.add(row)
    print(f"words known without a LoRA: {zero_shot.accuracy(None):.2f}")
    if options.picture:
        draw(rows, options.picture)
    print(f"painting {len((DEMO / 'preserve.txt').read_text().splitlines())} images and caching: {painted:.0f} s")
    ratios = {f"elsewhere, {row['way']}": row["share"] for row in table.rows}
    finish(table.rows, ratios, options.json)


if __name__ == "__main__":
    main()
