"""The tiny fill model: the tiny FLUX goes on, with a blanked image and a mask beside the noise.

Regions to fill are what people erase, and what they paint beyond an image's edge:

rectangle  a box anywhere, also over the edge
border     all outside a box: outpainting
strokes    a brush that wanders
half       all on one side of a straight line
all        the full image, so that the model still paints from words alone

The training set is painted scenes with one region blanked. A row holds the latents of the scene, the latents of the
scene with its region at mid-grey (0 in [-1, 1], as FLUX.1 Fill sees it), the region's mask in pixels and the caption's
token ids.

As in FLUX.1 Fill, the transformer's first layer also takes the blanked image's latents and the mask, packed as
FluxFillPipeline packs them. Its new columns start at zero, so training starts from the text-to-image model. The text
encoders stay as they are. The target is the velocity noise - image, as in `training`; positions in the region
count more, or its loss would drown in that of the known part, which is soon copied. The guidance input is random over
a wide range and says nothing, so that any guidance scale, Fill's default of 30 among them, samples alike.

The result is a FluxFillPipeline folder, a sheet of its work, and how well it fills. Held-out scenes are painted with a
seed that training never uses. The yardstick is what the pixels around the region already tell: grey, and the known
colours spread inwards (`spread`), which is what a blur would give.
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxFillPipeline, FluxPipeline, FluxTransformer2DModel
from PIL import Image, ImageDraw
from torch.nn.attention import SDPBackend, sdpa_kernel

from dev.tiny_models.latent_pool import ENCODER_BATCH, SIZES, Captions, encode_images, tokenize
from dev.tiny_models.run_state import Progress, RunState, cosine_rate, load_state, save_state
from dev.tiny_models.scenes import random_scene
from dev.tiny_models.training import LENGTH_SHARES, LONGEST_SHARE, LONGEST_TEXT, TEXT_LENGTHS, build_optimizers
from dev.tiny_models.transformer import TIME_SHIFT, TextToImage, move_into_place
from library.models.flux.model import image_positions, pack_mask
from library.models.latents import pack_latents, unpack_latents

KINDS = {"rectangle": 0.34, "border": 0.2, "strokes": 0.22, "half": 0.2, "all": 0.04}  # kind: share
LEAST_FILLED = 0.08  # a share of the picture; a smaller region teaches little for the same cost


def random_mask(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Return [height, width] bool, true where the picture is to be filled."""
    while True:
        mask = _MAKERS[str(rng.choice(list(KINDS), p=list(KINDS.values())))](rng, height, width)
        if mask.mean() >= LEAST_FILLED:
            return mask


def _rectangle(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    rows, columns = _interval(rng, height, 0.3, 0.8), _interval(rng, width, 0.3, 0.8)
    mask = np.zeros((height, width), dtype=bool)
    mask[rows, columns] = True
    return mask


def _border(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    rows, columns = _interval(rng, height, 0.4, 0.85), _interval(rng, width, 0.4, 0.85)
    mask = np.ones((height, width), dtype=bool)
    mask[rows, columns] = False
    return mask


def _strokes(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    mask = np.zeros((height, width), dtype=bool)
    for _ in range(int(rng.integers(1, 4))):
        place = rng.uniform([0, 0], [height, width])
        heading, radius = rng.uniform(0, 2 * np.pi), rng.uniform(0.05, 0.12) * min(height, width)
        for _ in range(int(rng.integers(8, 24))):
            mask |= (y - place[0]) ** 2 + (x - place[1]) ** 2 < radius**2
            heading += rng.normal(0, 0.5)
            place = np.clip(place + radius * np.array([np.sin(heading), np.cos(heading)]), 0, [height, width])
    return mask


def _half(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    angle = rng.uniform(0, 2 * np.pi) if rng.random() < 0.4 else rng.integers(0, 4) * np.pi / 2
    across = (y / height - 0.5) * np.sin(angle) + (x / width - 0.5) * np.cos(angle)
    return across > rng.uniform(-0.25, 0.25)


def _all(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    return np.ones((height, width), dtype=bool)


def _interval(rng: np.random.Generator, length: int, least: float, most: float) -> slice:
    """Return part of a side, somewhere, whose length is a share between ``least`` and ``most`` of it."""
    size = int(rng.uniform(least, most) * length)
    start = int(rng.integers(0, length - size + 1))
    return slice(start, start + size)


_MAKERS = {"rectangle": _rectangle, "border": _border, "strokes": _strokes, "half": _half, "all": _all}


MID_GREY = 0.5  # of pixels in 0..1; 0 in [-1, 1]


@dataclass(frozen=True)
class FillRows:
    latents: torch.Tensor  # [N, 16, h, w] bf16
    masked: torch.Tensor  # the same shape
    masks: torch.Tensor  # [N, H, W] bool, true where the picture is to be filled
    captions: Captions


FillPool = dict[tuple[int, int], FillRows]  # by (height, width) of the pictures


def blanked(pictures: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """[N, H, W, 3] in 0..1 with mid-grey where ``masks`` [N, H, W] are true."""
    return np.where(masks[..., None], np.float32(MID_GREY), pictures)


def paint_fill_pool(vae: AutoencoderKL, count: int, seed: int, path: Path) -> None:
    """Write `count` rows, shared among the sizes as in the pool of `latent_pool`, to `path`."""
    rng = np.random.default_rng([seed, 78])
    batches = [(size, max(1, int(count * share) // ENCODER_BATCH)) for size, share in SIZES.items()]
    progress, done = Progress("fill_encode", 0, sum(number for _, number in batches), every=20), 0
    state = {}
    for (height, width), number in batches:
        latents, masked, masks, texts = [], [], [], []
        for _ in range(number):
            scenes = [random_scene(rng, height, width) for _ in range(ENCODER_BATCH)]
            pictures = np.stack([scene.picture for scene in scenes])
            regions = np.stack([random_mask(rng, height, width) for _ in scenes])
            latents.append(encode_images(vae, pictures))
            masked.append(encode_images(vae, blanked(pictures, regions)))
            masks.append(torch.from_numpy(regions))
            texts += [scene.caption for scene in scenes]
            progress.report(done, {})
            done += 1
        captions = tokenize(texts)
        tensors = {"latents": torch.cat(latents), "masked": torch.cat(masked), "masks": torch.cat(masks)}
        state[f"{height}x{width}"] = tensors | {"t5": captions.t5, "clip": captions.clip}
    save_state(path, state)


def load_fill_pool(path: Path) -> FillPool:
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return {
        tuple(int(side) for side in name.split("x")): FillRows(
            part["latents"], part["masked"], part["masks"], Captions(part["t5"], part["clip"])
        )
        for name, part in state.items()
    }


GUIDANCE_RANGE = (1.0, 50.0)  # drawn evenly on a logarithmic scale


@dataclass(frozen=True)
class FillTraining:
    steps: int = 2300
    batch: int = 28
    muon_rate: float = 2e-3
    adam_rate: float = 1e-3
    embedder_rate: float = 3e-2  # of the first layer, whose new columns start at zero
    empty_share: float = 0.15
    region_weight: float = 2.0
    average_decay: float = 0.998
    save_every: int = 250
    sheet_every: int = 500
    seed: int = 0


@dataclass(frozen=True)
class FillBatch:
    latents: torch.Tensor  # [B, 16, h, w] fp32
    masked: torch.Tensor  # the same
    mask: torch.Tensor  # [B, 1, H, W] fp32, 1 in the region to fill
    noise: torch.Tensor  # [B, 16, h, w]
    sigmas: torch.Tensor  # [B]
    guidance: torch.Tensor  # [B]
    captions: Captions


Snapshot = Callable[[FluxTransformer2DModel, int], None]


def widened(transformer: FluxTransformer2DModel, factor: int) -> FluxTransformer2DModel:
    """A copy that takes blanked picture and mask beside the noise and, so far, does not look at them.

    `factor` is the VAE's: a token covers 2 x 2 latents, 2 `factor` x 2 `factor` pixels.
    """
    channels = transformer.config.in_channels
    inputs = {"in_channels": 2 * channels + 4 * factor**2, "out_channels": channels}
    # Without diffusers' own entries: its list of what was left to a default would drop out_channels again.
    shape = {name: value for name, value in transformer.config.items() if not name.startswith("_")}
    fill = FluxTransformer2DModel.from_config(shape | inputs)
    state = transformer.state_dict()
    narrow = state["x_embedder.weight"]
    state["x_embedder.weight"] = narrow.new_zeros(narrow.shape[0], inputs["in_channels"])
    state["x_embedder.weight"][:, :channels] = narrow
    fill.load_state_dict(state)
    return fill


def train_fill(
    base: TextToImage, pool: FillPool, training: FillTraining, state_path: Path, resume: bool, snapshot: Snapshot
) -> None:
    """Train a widened copy of `base`, saving all that a resumed run needs as it goes."""
    base = base.requires_grad_(False).eval()
    transformer = widened(base.transformer, factor=_factor(pool)).train().requires_grad_(True)
    optimizers = _build_optimizers(transformer, training)
    run = RunState(transformer, training.average_decay, optimizers)
    first_step = run.restore(state_path) if resume else 0
    progress = Progress("fill", first_step, training.steps, every=50)
    for step in range(first_step, training.steps):
        losses = _train_step(base, transformer, optimizers, draw_fill_batch(pool, training, step), training, step)
        run.average.update(transformer)
        progress.report(step, losses)
        last = step + 1 == training.steps
        if (step + 1) % training.save_every == 0 or last:
            run.save(state_path, step + 1)
        if (step + 1) % training.sheet_every == 0 or last:
            snapshot(averaged(base, state_path, _factor(pool)), step + 1)


def averaged(base: TextToImage, state_path: Path, factor: int) -> FluxTransformer2DModel:
    """The averaged fill transformer of a saved state, without gradients."""
    transformer = widened(base.transformer, factor)
    transformer.load_state_dict(load_state(state_path)["average"]["shadow"])
    return transformer.eval().requires_grad_(False)


def draw_fill_batch(pool: FillPool, training: FillTraining, step: int) -> FillBatch:
    """The batch of a step, a function of (seed, step)."""
    rng = np.random.default_rng([training.seed, step])
    size = list(pool)[int(rng.choice(len(pool), p=[SIZES[size] for size in pool]))]
    length, count = int(rng.choice(TEXT_LENGTHS, p=LENGTH_SHARES)), training.batch
    if rng.random() < LONGEST_SHARE:
        length, count = LONGEST_TEXT, max(2, training.batch // 4)
    part = pool[size]
    rows = torch.from_numpy(rng.integers(0, len(part.latents), count))
    latents = part.latents[rows].float()
    generator = torch.Generator().manual_seed(training.seed * 1_000_003 + step)
    odds = TIME_SHIFT * torch.exp(torch.randn(count, generator=generator))
    dropped = torch.rand(count, generator=generator) < training.empty_share
    low, high = (math.log(end) for end in GUIDANCE_RANGE)
    return FillBatch(
        latents=latents,
        masked=part.masked[rows].float(),
        mask=part.masks[rows].float().unsqueeze(1),
        noise=torch.randn(latents.shape, generator=generator),
        sigmas=odds / (1 + odds),
        guidance=torch.empty(count).uniform_(low, high, generator=generator).exp(),
        captions=part.captions[rows].emptied(tokenize([""]), dropped).padded(length),
    )


def fill_velocity(base: TextToImage, transformer: FluxTransformer2DModel, batch: FillBatch) -> torch.Tensor:
    """The velocity [B, 16, h, w] at the noised latents, with the text encoders of `base`."""
    share = batch.sigmas[:, None, None, None]
    noised = (1 - share) * batch.latents + share * batch.noise
    height, width = noised.shape[2:]
    with torch.no_grad():
        words = base.t5(input_ids=batch.captions.t5).last_hidden_state
        pooled = base.clip(input_ids=batch.captions.clip).pooler_output
    mask = pack_mask(batch.mask, batch.mask.shape[2] // height)
    packed = transformer(
        hidden_states=torch.cat([pack_latents(noised), pack_latents(batch.masked), mask], dim=-1),
        timestep=batch.sigmas,
        guidance=batch.guidance,
        encoder_hidden_states=words,
        pooled_projections=pooled,
        txt_ids=torch.zeros(words.shape[1], 3),
        img_ids=image_positions(height // 2, width // 2),
    ).sample
    return unpack_latents(packed, height, width)


def _build_optimizers(transformer: FluxTransformer2DModel, training: FillTraining) -> list[torch.optim.Optimizer]:
    """[Muon, AdamW, Muon of the first layer], the first two as for the text-to-image model.

    Muon moves all directions of a matrix alike. Under AdamW the first layer soon passed on the large patterns of the
    blanked picture, while what makes its outlines, directions of little variance, stayed near zero for 1,500 steps.
    """
    first = transformer.x_embedder.weight.requires_grad_(False)
    optimizers = build_optimizers(transformer, training.muon_rate, training.adam_rate)
    own = torch.optim.Muon(
        [first.requires_grad_(True)], lr=training.embedder_rate, weight_decay=0, adjust_lr_fn="match_rms_adamw"
    )
    return [*optimizers, own]


def _train_step(
    base: TextToImage,
    transformer: FluxTransformer2DModel,
    optimizers: list[torch.optim.Optimizer],
    batch: FillBatch,
    training: FillTraining,
    step: int,
) -> dict[str, float]:
    with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):  # flash is slower at 100 tokens
        velocity = fill_velocity(base, transformer, batch)
    errors = (velocity.float() - (batch.noise - batch.latents)).pow(2).mean(dim=1, keepdim=True)
    # A latent partly in the region is as hard to paint as one wholly in it.
    region = torch.nn.functional.max_pool2d(batch.mask, batch.mask.shape[2] // errors.shape[2])
    weights = 1 + (training.region_weight - 1) * region
    loss = (errors * weights).sum() / weights.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
    rates = (training.muon_rate, training.adam_rate, training.embedder_rate)
    for optimizer, peak in zip(optimizers, rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = cosine_rate(step, training.steps, peak, warmup=min(100, training.steps // 10))
        optimizer.step()
        optimizer.zero_grad()
    inside = (errors * region).sum() / region.sum()
    outside = (errors * (1 - region)).sum() / (1 - region).sum().clamp_min(1)
    return {"loss": loss.item(), "inside": inside.item(), "outside": outside.item()}


def _factor(pool: FillPool) -> int:
    """Pixels a side under one latent."""
    part = next(iter(pool.values()))
    return part.masks.shape[1] // part.latents.shape[2]


GUIDANCE, STEPS = 30.0, 20
HELD_OUT_SEED = 4711
COLUMNS, CELL, LABEL = 8, 128, 36


@dataclass(frozen=True)
class HeldOut:
    captions: list[str]
    pictures: np.ndarray  # [N, H, W, 3] in 0..1
    masks: np.ndarray  # [N, H, W] bool


def held_out(count: int, height: int = 128, width: int = 128) -> HeldOut:
    """Scenes and regions that training has not seen."""
    rng = np.random.default_rng(HELD_OUT_SEED)
    scenes = [random_scene(rng, height, width) for _ in range(count)]
    masks = np.stack([random_mask(rng, height, width) for _ in scenes])
    return HeldOut([scene.caption for scene in scenes], np.stack([scene.picture for scene in scenes]), masks)


def text_to_image_of(base: Path) -> TextToImage:
    """The three trained modules of a FluxPipeline folder, in fp32."""
    pipeline = FluxPipeline.from_pretrained(base, torch_dtype=torch.float32)
    return TextToImage(pipeline.transformer, pipeline.text_encoder_2, pipeline.text_encoder)


def save_fill_pipeline(base: Path, transformer: FluxTransformer2DModel, folder: Path) -> int:
    """Save as FluxFillPipeline in bf16 with the other parts of `base`; returns the folder's size in bytes."""
    parts = FluxPipeline.from_pretrained(base, torch_dtype=torch.bfloat16).components
    shared = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    pipeline = FluxFillPipeline(
        **{name: parts[name] for name in shared}, transformer=copy.deepcopy(transformer).bfloat16()
    )
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    pipeline.save_pretrained(partial)
    move_into_place(partial, folder)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def load_fill_pipeline(folder: Path) -> FluxFillPipeline:
    pipeline = FluxFillPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def filled(pipeline: FluxFillPipeline, scenes: HeldOut, steps: int = STEPS, seed: int = 7) -> np.ndarray:
    """What the pipeline paints, [N, H, W, 3] in 0..1: whole pictures, nothing pasted back."""
    height, width = scenes.masks.shape[1:]
    return pipeline(
        prompt=scenes.captions,
        image=torch.from_numpy(scenes.pictures).permute(0, 3, 1, 2),
        mask_image=torch.from_numpy(scenes.masks).float().unsqueeze(1),
        height=height,
        width=width,
        guidance_scale=GUIDANCE,
        num_inference_steps=steps,
        max_sequence_length=32,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).images


def spread(scenes: HeldOut) -> np.ndarray:
    """The known colours spread into the regions: each unknown pixel becomes the mean of its known neighbours."""
    pictures, known = np.array(scenes.pictures), ~scenes.masks
    pictures[~known] = MID_GREY
    new = known
    while new.any():  # nothing is known of a picture that is to be filled wholly: it stays grey
        total, count = np.zeros_like(pictures), np.zeros(known.shape)
        for down, right in ((0, 1), (0, -1), (1, 0), (-1, 0)):
            near = np.roll(known, (down, right), axis=(1, 2))
            if down:
                near[:, 0 if down > 0 else -1] = False
            if right:
                near[:, :, 0 if right > 0 else -1] = False
            total += np.roll(pictures, (down, right), axis=(1, 2)) * near[..., None]
            count += near
        new = ~known & (count > 0)
        pictures[new] = total[new] / count[new][:, None]
        known = known | new
    return pictures


def region_error(pictures: np.ndarray, scenes: HeldOut) -> float:
    """Mean absolute difference from the scenes inside their regions, colours in 0..1."""
    return float(np.abs(pictures - scenes.pictures).mean(axis=-1)[scenes.masks].mean())


def write_fill_sheet(pipeline: FluxFillPipeline, path: Path, count: int, steps: int = STEPS) -> dict[str, float]:
    """Write one PNG, for each scene the blanked, the filled and the true picture; return the errors in the regions."""
    scenes = held_out(count)
    partly = np.array([not mask.all() for mask in scenes.masks])
    painted = filled(pipeline, scenes, steps)
    some = HeldOut(scenes.captions, scenes.pictures[partly], scenes.masks[partly])
    rows = -(-count // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (CELL + 4), rows * (3 * (CELL + 2) + LABEL)), "white")
    pen = ImageDraw.Draw(sheet)
    for index, caption in enumerate(scenes.captions):
        left, top = index % COLUMNS * (CELL + 4), index // COLUMNS * (3 * (CELL + 2) + LABEL)
        shown = (blanked(scenes.pictures, scenes.masks)[index], painted[index], scenes.pictures[index])
        for place, picture in enumerate(shown):
            levels = (np.clip(picture, 0, 1) * 255).round().astype(np.uint8)
            sheet.paste(Image.fromarray(levels), (left, top + place * (CELL + 2)))
        words = "\n".join(caption[start : start + 24] for start in range(0, len(caption), 24))
        pen.multiline_text((left, top + 3 * (CELL + 2)), words, fill="black", font_size=9, spacing=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
    return {
        "model": region_error(painted[partly], some),
        "spread": region_error(spread(some), some),
        "grey": region_error(np.full_like(some.pictures, MID_GREY), some),
    }
