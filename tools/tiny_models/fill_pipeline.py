"""The tiny fill model as a FluxFillPipeline folder, a sheet of its work, and how well it fills.

Held-out scenes are painted with a seed that training never uses. The yardstick is what the pixels around the region
already tell: grey, and the known colours spread inwards (`spread`), which is what a blur would give.
"""

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxFillPipeline, FluxPipeline, FluxTransformer2DModel
from PIL import Image, ImageDraw

from tools.tiny_models.fill_masks import random_mask
from tools.tiny_models.fill_pool import MID_GREY, blanked
from tools.tiny_models.pipeline_folder import move_into_place
from tools.tiny_models.scenes import random_scene
from tools.tiny_models.text_to_image import TextToImage

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
