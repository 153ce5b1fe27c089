"""Tiny random ERNIE-Image models for tests: real classes and real file layouts, built in well under a second.

``tiny_ernie_pipeline(folder)`` writes a whole diffusers pipeline folder; ``save_ernie_split_files(pipeline_folder,
folder)`` writes the same weights as ComfyUI publishes them. The weights are random; they are scaled so that outputs
depend on every input.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import ErnieImagePipeline, ErnieImageTransformer2DModel, FlowMatchEulerDiscreteScheduler
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import Mistral3Config, Mistral3Model, PreTrainedTokenizerFast

from tests.tiny import TEXT_WIDTH, SplitFiles, _enliven, _seeded, random_inputs, save_parts, tiny_text_model
from tests.tiny_flux2 import bfl_flux2_vae_state_dict, tiny_flux2_vae, tiny_mistral_tokenizer

MOST_TOKENS = 512


def tiny_ernie_transformer(layers: int = 2, heads: int = 2, seed: int = 0) -> ErnieImageTransformer2DModel:
    """Return diffusers' own ERNIE-Image transformer, random, fp32, heads of 32."""
    transformer = _seeded(
        lambda: ErnieImageTransformer2DModel(
            hidden_size=32 * heads,
            num_attention_heads=heads,
            num_layers=layers,
            ffn_hidden_size=96,
            text_in_dim=TEXT_WIDTH + 8,  # as wide as the transformer there would be no projection
            rope_axes_dim=(8, 12, 12),
        ),
        seed,
    )
    _enliven(transformer, seed)
    random = torch.Generator().manual_seed(seed + 2)
    for layer, std in ((transformer.adaLN_modulation[1], 0.3), (transformer.final_linear, 0.1)):  # zero as made
        layer.weight.data.normal_(std=std, generator=random)
    return transformer


def tiny_ernie_inputs(batch: int = 2, side: int = 8, tokens: int = 12) -> dict[str, Tensor]:
    """Return random ``latents`` [B, 32, side, side], ``sigmas`` [B], text embeddings and their mask."""
    made = random_inputs(batch, (32, side, side), (tokens, TEXT_WIDTH + 8))
    return made | {"prompt_embeds_mask": torch.ones(batch, tokens, dtype=torch.bool)}


@torch.no_grad()
def run_ernie(model: nn.Module) -> Tensor:
    """Run a transformer, ours or diffusers', on :func:`tiny_ernie_inputs`."""
    inputs = tiny_ernie_inputs()
    return model(
        hidden_states=ErnieImagePipeline._patchify_latents(inputs["latents"]),
        timestep=1000 * inputs["sigmas"],
        text_bth=inputs["prompt_embeds"],
        text_lens=torch.tensor([12, 12]),
        return_dict=False,
    )[0]


def tiny_ernie_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tiny Mistral tokenizer, which puts its first token before a text."""
    tokenizer = tiny_mistral_tokenizer()
    begin = ("<s>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[begin])
    tokenizer.model_max_length = MOST_TOKENS
    return tokenizer


def tiny_ministral(vocabulary: int, seed: int = 0) -> Mistral3Model:
    """Return a random Ministral 3 of three layers, one more than is read, with eyes."""
    text = {
        "model_type": "ministral3",
        "vocab_size": vocabulary,
        "hidden_size": TEXT_WIDTH + 8,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "yarn", "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    }  # fmt: skip
    eyes = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    eyes |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 16, "head_dim": 16}
    config = Mistral3Config(text_config=text, vision_config=eyes, image_token_index=8)
    return tiny_text_model(lambda: Mistral3Model(config), seed, 8)


def tiny_ernie_pipeline(folder: str | Path, seed: int = 0, **transformer: int) -> Path:
    """Write a complete random pipeline in diffusers' layout to ``folder``; return it."""
    tokenizer = tiny_ernie_tokenizer()
    ErnieImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=4.0),  # as baidu/ERNIE-Image and its Turbo have it
        vae=tiny_flux2_vae(seed),
        text_encoder=tiny_ministral(len(tokenizer) + 3, seed),
        tokenizer=tokenizer,
        transformer=tiny_ernie_transformer(seed=seed, **transformer),
    ).save_pretrained(folder)
    return Path(folder)


def comfy_text_state_dict(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the language model as ComfyUI has it, with the tokenizer's file in a tensor of bytes."""
    mine = {name.partition("language_model.")[2]: tensor for name, tensor in state.items() if "language_model" in name}
    return {f"model.{name}": t for name, t in mine.items()} | {"tekken_model": torch.zeros(4, dtype=torch.uint8)}


def save_ernie_split_files(pipeline_folder: Path, folder: Path, prefix: str = "") -> SplitFiles:
    """Write the weights of a tiny pipeline folder as ComfyUI publishes them."""
    return save_parts(
        "ernie_image",
        pipeline_folder,
        folder,
        ("ernie-image.safetensors", dict),
        ("flux2-vae.safetensors", bfl_flux2_vae_state_dict),
        ("ministral-3-3b.safetensors", comfy_text_state_dict),
        prefix,
    )
