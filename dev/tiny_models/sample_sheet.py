"""A sheet of samples for a fixed list of prompts: the way for a person to judge the model."""

import textwrap
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from PIL import Image, ImageDraw

from dev.tiny_models.latent_pool import Captions, tokenize
from dev.tiny_models.transformer import TextToImage, sample
from library.files import atomic_path

PROMPTS = (
    "a red circle on a white background",
    "a blue circle on a white background",
    "a big green star on a black background",
    "a small yellow heart on a blue background",
    "an orange triangle on a purple background",
    "a pink hexagon on a checkered gray background",
    "a white crescent on a striped blue background",
    "a cyan ring on a dotted brown background",
    "a red circle above a blue square on a striped green background",
    "a blue square above a red circle on a white background",
    "a yellow star left of a purple diamond on a black background",
    "a green heart right of an orange cross on a white background",
    "a red heart inside a white circle on a blue background",
    "three yellow stars on a blue background",
    "four pink hearts on a white background",
    "two green squares on an orange background",
    "a black cross in the top left corner on a yellow background",
    "a purple diamond at the bottom on a pink background",
    "a big smiling yellow circle on a blue background",
    "a big smiling red square on a white background",
    "a red house on green grass under a night sky with stars and a moon",
    "a yellow house and a tree on white snow under a sunset sky with a sun",
    "a blue car on yellow sand under a blue sky with clouds",
    "a red boat on the sea under a sunset sky with a sun and mountains",
)
COLUMNS, CELL, LABEL = 8, 128, 36


def write_sheet(
    model: TextToImage,
    vae: AutoencoderKL,
    path: Path,
    guidance: float = 3.5,
    cfg: float | None = None,
    steps: int = 20,
    seed: int = 7,
    prompts: tuple[str, ...] = PROMPTS,
) -> None:
    """Sample every prompt at 128 x 128 and write one PNG; `cfg` asks for two-pass guidance instead."""
    captions, empty = tokenize(list(prompts)), tokenize([""] * len(prompts))
    with_cfg: tuple[Captions, float] | None = None if cfg is None else (empty, cfg)
    side = CELL // 2 ** (len(vae.config.block_out_channels) - 1)
    latents = sample(model, captions, (side, side), guidance, steps, seed, with_cfg)
    images = decode(vae, latents)
    rows = -(-len(prompts) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (CELL + 4), rows * (CELL + LABEL)), "white")
    pen = ImageDraw.Draw(sheet)
    for index, (prompt, image) in enumerate(zip(prompts, images, strict=True)):
        left, top = index % COLUMNS * (CELL + 4), index // COLUMNS * (CELL + LABEL)
        sheet.paste(image, (left, top))
        pen.multiline_text(
            (left, top + CELL), "\n".join(textwrap.wrap(prompt, 24)), fill="black", font_size=9, spacing=0
        )
    with atomic_path(path) as temporary:
        sheet.save(temporary, "PNG")


@torch.no_grad()
def decode(vae: AutoencoderKL, latents: torch.Tensor) -> list[Image.Image]:
    """Normalised latents [B, 16, h, w] to pictures."""
    pixels = vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor).sample
    levels = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return [Image.fromarray(picture) for picture in levels.permute(0, 2, 3, 1).numpy()]
