"""The tiny FLUX's parts: real diffusers and transformers classes, FLUX.1-dev's shape, a few million
parameters.

The VAE keeps FLUX's geometry (8 x smaller, 16 channels, no quant convolutions), so 2 x 2 packing gives the
transformer 64 channels per token and a 128 x 128 picture is 8 x 8 tokens. The transformer keeps guidance
embedding, head width 32 and rotary axes (8, 12, 12). Sizes are chosen so that all weights in bf16 stay
below 10 MiB.
"""

from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

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
