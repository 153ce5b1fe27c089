"""Tiny random Z-Image models for tests: real classes and real file layouts, built in well under a second.

``tiny_z_pipeline(folder)`` writes a whole diffusers pipeline folder; ``save_z_split_files(pipeline_folder, folder)``
writes the same weights as ComfyUI publishes them. The weights are random; they are scaled so that outputs depend on
every input.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

from tests.tiny import (
    TEXT_WIDTH,
    SplitFiles,
    _enliven,
    _seeded,
    bfl_vae_state_dict,
    save_parts,
    tiny_text_model,
    tiny_vae,
)
from tests.tiny_qwen import tiny_qwen_inputs, tiny_qwen_tokenizer

# What Qwen3's published template makes of one user's message.
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def tiny_z_transformer(layers: int = 2, seed: int = 0) -> ZImageTransformer2DModel:
    """Return diffusers' own Z-Image transformer, random, fp32, 64 wide, two heads; a refiner block of each kind."""
    transformer = _seeded(
        lambda: ZImageTransformer2DModel(
            dim=64,
            n_layers=layers,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=TEXT_WIDTH,
            axes_dims=[8, 12, 12],
            axes_lens=[1536, 512, 512],
        ),
        seed,
    )
    _enliven(transformer, seed)
    random = torch.Generator().manual_seed(seed + 2)
    for token in (transformer.x_pad_token, transformer.cap_pad_token):  # zero as made
        token.data.normal_(std=0.5, generator=random)
    return transformer


def tiny_z_inputs(batch: int = 2, side: int = 8, tokens: int = 12) -> dict[str, Tensor]:
    """Return :func:`tests.tiny_qwen.tiny_qwen_inputs` with text as wide as here."""
    return tiny_qwen_inputs(batch, side, tokens, TEXT_WIDTH)


@torch.no_grad()
def run_z(model: nn.Module) -> Tensor:
    """Run a transformer, ours or diffusers', on :func:`tiny_z_inputs`."""
    inputs = tiny_z_inputs()
    given = list(inputs["latents"].unsqueeze(2)), inputs["sigmas"], list(inputs["prompt_embeds"])
    return torch.stack(model(*given, return_dict=False)[0])


def tiny_z_tokenizer() -> Qwen2Tokenizer:
    """Return the tiny Qwen tokenizer with Qwen3's chat template."""
    tokenizer = tiny_qwen_tokenizer()
    tokenizer.chat_template = _CHAT
    return tokenizer


def tiny_z_text_encoder(vocabulary: int, seed: int = 0) -> Qwen3Model:
    """Return a random Qwen3 of three layers."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=TEXT_WIDTH,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    return tiny_text_model(lambda: Qwen3Model(config), seed, 8)


def tiny_z_pipeline(folder: str | Path, seed: int = 0, layers: int = 2) -> Path:
    """Write a complete random pipeline in diffusers' layout to ``folder``; return it."""
    tokenizer = tiny_z_tokenizer()
    ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),  # as Tongyi-MAI/Z-Image-Turbo has it
        vae=tiny_vae(seed),
        text_encoder=tiny_z_text_encoder(len(tokenizer) + 3, seed),
        tokenizer=tokenizer,
        transformer=tiny_z_transformer(layers, seed),
    ).save_pretrained(folder)
    return Path(folder)


def save_z_split_files(pipeline_folder: Path, folder: Path, prefix: str = "") -> SplitFiles:
    """Write the weights of a tiny pipeline folder in ComfyUI's layout."""
    return save_parts(
        "z_image",
        pipeline_folder,
        folder,
        ("z_image_turbo.safetensors", comfy_state_dict),  # by which it is known that the scheduler is Turbo's
        ("ae.safetensors", bfl_vae_state_dict),
        ("qwen_3_4b.safetensors", lambda state: {f"model.{name}": tensor for name, tensor in state.items()}),
        prefix,
    )


# The rules of z_image_convert_original_to_comfy.py in Comfy-Org/z_image_turbo, written out from its description.
def comfy_state_dict(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a diffusers Z-Image state dict in ComfyUI's layout."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith("attention.to_q.weight"):
            block = name.removesuffix("to_q.weight")
            result[f"{block}qkv.weight"] = torch.cat([state[f"{block}to_{x}.weight"] for x in "qkv"])
        elif not name.endswith(("attention.to_k.weight", "attention.to_v.weight")):
            bare = name.replace("all_x_embedder.2-1.", "x_embedder.").replace("all_final_layer.2-1.", "final_layer.")
            bare = bare.replace("to_out.0.", "out.").replace("norm_q.", "q_norm.").replace("norm_k.", "k_norm.")
            result[bare] = tensor
    return result
