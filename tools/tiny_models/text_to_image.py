"""The three trained modules as one: FLUX's transformer with the T5 and CLIP encoders that it learns
together with.

`forward` does what FluxPipeline does around its transformer: packs latents 2 x 2, builds the position ids,
takes the last hidden state of T5 and the pooled output of CLIP. `sample` is a plain Euler loop for sample
sheets, so that a sheet costs one batch and no pipeline.
"""

import math
from itertools import pairwise

import torch
from diffusers import FluxTransformer2DModel
from torch import nn
from transformers import CLIPTextModel, T5EncoderModel

from tools.tiny_models.architecture import TinySizes, build_clip, build_t5, build_transformer
from tools.tiny_models.latent_pool import Captions

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
