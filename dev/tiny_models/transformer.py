"""The tiny FLUX's parts: real diffusers and transformers classes, FLUX.1-dev's shape, a few million parameters.

The VAE, which is that of the assets, has FLUX's geometry (8 x smaller, 16 channels, no quant convolutions), so 2 x 2
packing gives the transformer 64 channels per token and a 128 x 128 image is 8 x 8 tokens. The transformer keeps
guidance embedding, head width 32 and rotary axes (8, 12, 12). Sizes are chosen so that all weights in bf16 stay below
10 MiB.

`TextToImage` is the three trained modules as one: the transformer with the T5 and CLIP encoders that it learns
together with. `forward` does what FluxPipeline does around its transformer.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from dev.tiny_models.latent_pool import Captions, tokenizers
from library.files import atomic_folder
from library.models.flux.model import text_positions
from library.models.vae import image_positions, pack_latents, unpack_latents

LATENT_CHANNELS, LATENT_FACTOR = 16, 8
TEXT_WIDTH = 64
TIME_SHIFT = math.exp(0.4675)  # FLUX's dynamic shift at 64 tokens


@dataclass(frozen=True)
class TinySizes:
    """What the smoke setting makes smaller."""

    double_blocks: int = 2
    single_blocks: int = 4
    heads: int = 5


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
    """Return a pipeline with FLUX.1-dev's own scheduler: 64 tokens get a shift of exp(0.47) = 1.6."""
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
    return FluxPipeline(scheduler, vae, model.clip, clip_tokenizer, model.t5, t5_tokenizer, model.transformer)


def save_pipeline(pipeline: DiffusionPipeline, folder: Path) -> None:
    """Save in bf16, replacing ``folder`` in one step."""
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.bfloat16()
    with atomic_folder(folder) as temporary:
        pipeline.save_pretrained(temporary)
        for file in temporary.glob("*/config.json"):
            config = json.loads(file.read_text(encoding="utf-8"))
            if config.pop("_name_or_path", None):  # a folder of whoever made it
                file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_pipeline(folder: Path) -> Any:
    pipeline = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def text_to_image_of(pipeline: FluxPipeline) -> TextToImage:
    """The pipeline's three trained modules."""
    return TextToImage(pipeline.transformer, pipeline.text_encoder_2, pipeline.text_encoder)
