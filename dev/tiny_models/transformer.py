"""The tiny FLUX's parts: real diffusers and transformers classes, FLUX.1-dev's shape, a few million parameters.

The VAE keeps FLUX's geometry (8 x smaller, 16 channels, no quant convolutions), so 2 x 2 packing gives the
transformer 64 channels per token and a 128 x 128 image is 8 x 8 tokens. The transformer keeps guidance
embedding, head width 32 and rotary axes (8, 12, 12). Sizes are chosen so that all weights in bf16 stay
below 10 MiB.

`TextToImage` is the three trained modules as one: the transformer with the T5 and CLIP encoders that it learns
together with. `forward` does what FluxPipeline does around its transformer: packs latents 2 x 2, builds the position
ids, takes the last hidden state of T5 and the pooled output of CLIP. `sample` is a plain Euler loop for sample
sheets, so that a sheet costs one batch and no pipeline.
"""

from __future__ import annotations

import copy
import math
import os
import shutil
import textwrap
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from PIL import Image, ImageDraw
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from dev.tiny_models.latent_pool import Captions, build_clip_tokenizer, build_t5_tokenizer, tokenize
from dev.tiny_models.scenes import scene_words
from library.files import atomic_path

LATENT_CHANNELS = 16
TEXT_WIDTH = 64


@dataclass(frozen=True)
class TinySizes:
    """What the smoke setting makes smaller."""

    vae_channels: tuple[int, ...] = (24, 48, 64, 64)
    double_blocks: int = 2
    single_blocks: int = 4
    heads: int = 5


def build_vae(sizes: TinySizes) -> AutoencoderKL:
    levels = len(sizes.vae_channels)
    return AutoencoderKL(
        block_out_channels=sizes.vae_channels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        layers_per_block=1,
        sample_size=128,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        force_upcast=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def build_transformer(sizes: TinySizes) -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=4 * LATENT_CHANNELS,
        num_layers=sizes.double_blocks,
        num_single_layers=sizes.single_blocks,
        attention_head_dim=32,
        num_attention_heads=sizes.heads,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )


def build_clip(vocab_size: int, eos_token_id: int) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=vocab_size,
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=77,
            bos_token_id=eos_token_id - 1,
            eos_token_id=eos_token_id,
            pad_token_id=eos_token_id,
        )
    )


def build_t5(vocab_size: int) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=vocab_size,
            d_model=TEXT_WIDTH,
            d_kv=32,
            d_ff=2 * TEXT_WIDTH,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            is_encoder_decoder=False,
            use_cache=False,
        )
    )


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """FLUX.1-dev's own settings: 64 tokens get a shift of exp(0.47) = 1.6."""
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )


def parameter_count(*models: torch.nn.Module) -> int:
    return sum(parameter.numel() for model in models for parameter in model.parameters())


TIME_SHIFT = math.exp(0.4675)  # FLUX's dynamic shift at 64 tokens


class TextToImage(nn.Module):
    def __init__(self, transformer: FluxTransformer2DModel, t5: T5EncoderModel, clip: CLIPTextModel) -> None:
        super().__init__()
        self.transformer, self.t5, self.clip = transformer, t5, clip

    def forward(
        self, latents: torch.Tensor, sigmas: torch.Tensor, captions: Captions, guidance: torch.Tensor
    ) -> torch.Tensor:
        """Latents [B, 16, h, w], sigmas [B] in 0..1, guidance [B]; returns the velocity (noise - image)."""
        height, width = latents.shape[2] // 2, latents.shape[3] // 2
        words = self.t5(input_ids=captions.t5).last_hidden_state
        packed = self.transformer(
            hidden_states=pack(latents),
            timestep=sigmas,
            guidance=guidance,
            encoder_hidden_states=words,
            pooled_projections=self.clip(input_ids=captions.clip).pooler_output,
            txt_ids=torch.zeros(words.shape[1], 3),
            img_ids=image_ids(height, width),
        ).sample
        return unpack(packed, height, width)


def build_text_to_image(sizes: TinySizes, t5_vocabulary: int, clip_vocabulary: int) -> TextToImage:
    t5 = build_t5(t5_vocabulary)
    clip = build_clip(clip_vocabulary, eos_token_id=clip_vocabulary - 1)
    return TextToImage(build_transformer(sizes), t5, clip)


def pack(latents: torch.Tensor) -> torch.Tensor:
    """[B, C, h, w] to [B, h/2 * w/2, C * 4], as FluxPipeline packs."""
    batch, channels, height, width = latents.shape
    blocks = latents.view(batch, channels, height // 2, 2, width // 2, 2)
    return blocks.permute(0, 2, 4, 1, 3, 5).reshape(batch, height * width // 4, channels * 4)


def unpack(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The inverse of `pack`; height and width count tokens."""
    batch, _, channels = tokens.shape
    blocks = tokens.view(batch, height, width, channels // 4, 2, 2)
    return blocks.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels // 4, height * 2, width * 2)


def image_ids(height: int, width: int) -> torch.Tensor:
    """[height * width, 3]: (0, row, column) of each token."""
    ids = torch.zeros(height, width, 3)
    ids[..., 1] += torch.arange(height)[:, None]
    ids[..., 2] += torch.arange(width)[None]
    return ids.view(-1, 3)


def sigma_schedule(steps: int) -> list[float]:
    """Falling sigmas from 1 to 0 with FLUX's shift."""
    even = [1 - index / steps for index in range(steps + 1)]
    return [TIME_SHIFT * s / (1 + (TIME_SHIFT - 1) * s) for s in even]


@torch.no_grad()
def sample(
    model: TextToImage,
    captions: Captions,
    size: tuple[int, int],
    guidance: float,
    steps: int,
    seed: int,
    cfg: tuple[Captions, float] | None = None,
) -> torch.Tensor:
    """Normalised latents [B, 16, h, w]; `cfg` = (empty captions, weight) asks for two passes a step."""
    batch = captions.t5.shape[0]
    latents = torch.randn(batch, 16, *size, generator=torch.Generator().manual_seed(seed))
    levels, scale = sigma_schedule(steps), torch.full((batch,), guidance)
    for sigma, following in pairwise(levels):
        here = torch.full((batch,), sigma)
        with torch.autocast("cpu", torch.bfloat16):
            velocity = model(latents, here, captions, scale).float()
            if cfg is not None:
                without = model(latents, here, cfg[0], scale).float()
                velocity = without + cfg[1] * (velocity - without)
        latents = latents + (following - sigma) * velocity
    return latents


def save_pipeline(model: TextToImage, vae: AutoencoderKL, folder: Path) -> int:
    """Save as FluxPipeline, all weights in bf16; returns the folder's size in bytes.

    Everything is written beside `folder` first and each file then renamed into place, so that a program that
    loads the folder meanwhile finds whole files.
    """
    words = scene_words()
    pipeline = FluxPipeline(
        scheduler=build_scheduler(),
        vae=copy.deepcopy(vae).bfloat16(),
        text_encoder=copy.deepcopy(model.clip).bfloat16(),
        tokenizer=build_clip_tokenizer(words),
        text_encoder_2=copy.deepcopy(model.t5).bfloat16(),
        tokenizer_2=build_t5_tokenizer(words),
        transformer=copy.deepcopy(model.transformer).bfloat16(),
    )
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    pipeline.save_pretrained(partial)
    move_into_place(partial, folder)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def move_into_place(partial: Path, folder: Path) -> None:
    """Rename every file of `partial` to the same place in `folder`, then remove what is left of `partial`."""
    for path in sorted(partial.rglob("*")):
        if path.is_file():
            target = folder / path.relative_to(partial)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    shutil.rmtree(partial)


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
