"""The tiny FLUX's parts: real diffusers and transformers classes, FLUX.1-dev's shape, a few million parameters.

The VAE keeps FLUX's geometry (8 x smaller, 16 channels, no quant convolutions), so 2 x 2 packing gives the
transformer 64 channels per token and a 128 x 128 image is 8 x 8 tokens. The transformer keeps guidance
embedding, head width 32 and rotary axes (8, 12, 12). Sizes are chosen so that all weights in bf16 stay
below 10 MiB.

`TextToImage` is the three trained modules as one: the transformer with the T5 and CLIP encoders that it learns
together with. `forward` does what FluxPipeline does around its transformer. Samples are drawn by the pipeline, as it
was saved.
"""

from __future__ import annotations

import copy
import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from PIL import Image, ImageDraw
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from dev.tiny_models.latent_pool import Captions, tokenizers
from dev.tiny_models.painting import to_image
from library.files import atomic_folder, atomic_path
from library.models.flux.model import text_positions
from library.models.latents import image_positions, pack_latents, unpack_latents

LATENT_CHANNELS, LATENT_FACTOR = 16, 8
TEXT_WIDTH = 64
TIME_SHIFT = math.exp(0.4675)  # FLUX's dynamic shift at 64 tokens


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


class TextToImage(nn.Module):
    def __init__(self, transformer: FluxTransformer2DModel, t5: T5EncoderModel, clip: CLIPTextModel) -> None:
        super().__init__()
        self.transformer, self.t5, self.clip = transformer, t5, clip

    def forward(
        self, latents: Tensor, sigmas: Tensor, captions: Captions, guidance: Tensor, beside: Tensor | None = None
    ) -> Tensor:
        """Return the velocity (noise - image), [B, 16, h, w].

        Args:
            latents: [B, 16, h, w].
            sigmas: [B] in 0..1.
            guidance: [B].
            beside: more channels of the tokens, [B, h/2 * w/2, C]: the fill model's.
        """
        height, width = latents.shape[2:]
        tokens, words = pack_latents(latents), self.t5(input_ids=captions.t5).last_hidden_state
        packed = self.transformer(
            hidden_states=tokens if beside is None else torch.cat([tokens, beside], dim=-1),
            timestep=sigmas,
            guidance=guidance,
            encoder_hidden_states=words,
            pooled_projections=self.clip(input_ids=captions.clip).pooler_output,
            txt_ids=text_positions(words.shape[1]),
            img_ids=image_positions(height // 2, width // 2),
        ).sample
        return unpack_latents(packed, height, width)


def build_text_to_image(sizes: TinySizes) -> TextToImage:
    t5_vocabulary, clip_vocabulary = map(len, tokenizers())
    t5 = T5Config(
        vocab_size=t5_vocabulary,
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
    clip = CLIPTextConfig(
        vocab_size=clip_vocabulary,
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        bos_token_id=clip_vocabulary - 2,
        eos_token_id=clip_vocabulary - 1,
        pad_token_id=clip_vocabulary - 1,
    )
    t5_encoder, clip_encoder = T5EncoderModel(t5), CLIPTextModel(clip)  # in this order: the seed decides their weights
    transformer = FluxTransformer2DModel(
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
    return TextToImage(transformer, t5_encoder, clip_encoder)


def build_pipeline(model: TextToImage, vae: AutoencoderKL) -> FluxPipeline:
    """Return a pipeline of copies, with FLUX.1-dev's own scheduler: 64 tokens get a shift of exp(0.47) = 1.6."""
    scheduler = FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=3.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    t5_tokenizer, clip_tokenizer = tokenizers()
    vae, clip, t5, transformer = map(copy.deepcopy, (vae, model.clip, model.t5, model.transformer))
    return FluxPipeline(scheduler, vae, clip, clip_tokenizer, t5, t5_tokenizer, transformer)


def save_pipeline(pipeline: DiffusionPipeline, folder: Path) -> int:
    """Save in bf16, replacing ``folder`` in one step; return its size in bytes."""
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.bfloat16()
    with atomic_folder(folder) as temporary:
        pipeline.save_pretrained(temporary)
        for file in temporary.glob("*/config.json"):
            config = json.loads(file.read_text(encoding="utf-8"))
            if config.pop("_name_or_path", None):  # a folder of whoever made it
                file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def load_pipeline(folder: Path) -> Any:
    pipeline = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


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


def write_samples(folder: Path, path: Path, cfg: float, steps: int) -> None:
    """Sample every prompt at 128 x 128 with the pipeline in ``folder``; ``cfg`` above 1 takes two passes a step."""
    images = load_pipeline(folder)(
        list(PROMPTS),
        negative_prompt=[""] * len(PROMPTS),
        true_cfg_scale=cfg,
        height=CELL,
        width=CELL,
        num_inference_steps=steps,
        max_sequence_length=32,
        generator=torch.Generator().manual_seed(7),
        output_type="np",
    ).images
    write_sheet(path, PROMPTS, images)


def write_sheet(path: Path, captions: Sequence[str], *images: np.ndarray) -> None:
    """Write one PNG: for each caption its image of each of ``images`` [N, 128, 128, 3], one under the other."""
    height = len(images) * (CELL + 2) + LABEL
    sheet = Image.new("RGB", (COLUMNS * (CELL + 4), -(-len(captions) // COLUMNS) * height), "white")
    pen = ImageDraw.Draw(sheet)
    for index, caption in enumerate(captions):
        left, top = index % COLUMNS * (CELL + 4), index // COLUMNS * height
        for place, each in enumerate(images):
            sheet.paste(to_image(each[index]), (left, top + place * (CELL + 2)))
        words = "\n".join(textwrap.wrap(caption, 24))
        pen.multiline_text((left, top + height - LABEL), words, fill="black", font_size=9, spacing=0)
    with atomic_path(path) as temporary:
        sheet.save(temporary, "PNG")
