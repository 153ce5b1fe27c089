"""Tiny random FLUX.3 models for tests: real classes and real file layouts, built in about a second.

``tiny_flux3_pipeline(folder)`` writes a folder as diffusers' modular pipeline keeps it; ``save_flux3_split_files``
writes the same weights as BFL and ComfyUI publish them. The weights are random; they are scaled so that outputs depend
on every input. The text encoder has the published number of layers, since its vectors are read after fixed ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux3DistilledModularPipeline,
    Flux3ModularPipeline,
    Flux3Transformer2DModel,
)
from diffusers.modular_pipelines.flux3.modular_blocks_flux3 import Flux3AutoBlocks
from diffusers.modular_pipelines.flux3.modular_blocks_flux3_distilled import Flux3DistilledAutoBlocks
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tests.tiny import SplitFiles, _enliven, _seeded, random_inputs, save_parts, tiny_text_model
from tests.tiny_flux2 import bfl_flux2_vae_state_dict, tiny_flux2_vae
from tests.tiny_qwen import tiny_qwen_tokenizer

WIDTH = 32  # of the text encoder
TEXT_WIDTH = 8 * WIDTH
# What Qwen3-VL's published template makes of one user's message that is a string.
_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_flux3_transformer(
    blocks: int = 2, seed: int = 0, flow_map: bool = False, channels: int = 32
) -> Flux3Transformer2DModel:
    """Return diffusers' own FLUX.3 transformer, random, fp32, 64 wide, two heads; so many blocks of each kind."""
    transformer = _seeded(
        lambda: Flux3Transformer2DModel(
            in_channels=4 * channels,
            cond_in_channels=4 * channels,
            num_layers=blocks,
            num_single_layers=blocks,
            attention_head_dim=32,
            num_attention_heads=2,
            joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=(8, 8, 8, 8),
            flow_map=flow_map,
        ),
        seed,
    )
    _enliven(transformer, seed)
    with torch.no_grad():  # as initialised, a mean over many tokens is all that attention gives
        for name, parameter in transformer.named_parameters():
            if name.endswith(("norm_q.weight", "to_out.0.weight")):
                parameter.mul_(3)
    return transformer.eval()


def tiny_flux3_inputs(batch: int = 2, height: int = 8, width: int = 6, tokens: int = 20) -> dict[str, Tensor]:
    """Return random ``latents`` [B, 32, height, width], ``sigmas`` [B], ``prompt_embeds`` [B, tokens, D], references.

    ``first`` [B, 32, 4, 8] and ``second`` [B, 32, 6, 2] are latents of reference images.
    """
    random = torch.Generator().manual_seed(0)
    return random_inputs(batch, (32, height, width), (tokens, TEXT_WIDTH), random) | {
        "first": torch.randn(batch, 32, 4, 8, generator=random),
        "second": torch.randn(batch, 32, 6, 2, generator=random),
    }


def patches(latents: Tensor) -> Tensor:
    """Return latents [B, C, h, w] as diffusers' pipeline has them, [B, 4C, h/2, w/2]."""
    batch, channels, height, width = latents.shape
    cells = latents.view(batch, channels, height // 2, 2, width // 2, 2).permute(0, 1, 3, 5, 2, 4)
    return cells.reshape(batch, 4 * channels, height // 2, width // 2)


def call_by_hand(
    transformer: nn.Module, latents: Tensor, sigmas: Tensor, embeds: Tensor, references: tuple[Tensor, ...] = ()
) -> Tensor:
    """Call a transformer, ours or diffusers', as the modular pipeline does; return the velocity [B, 32, h, w]."""

    def tokens(image: Tensor) -> Tensor:
        return patches(image).flatten(2).transpose(1, 2)

    def ids(image: Tensor, place: int) -> Tensor:
        rows, columns = image.shape[-2] // 2, image.shape[-1] // 2
        return torch.tensor([[0, row / 2, column / 2, place] for row in range(rows) for column in range(columns)])

    given = {}
    if references:
        given = {
            "image_cond_hidden_states": torch.cat([tokens(each) for each in references], dim=1),
            "image_cond_ids": torch.cat([ids(each, -1 - i) for i, each in enumerate(references)]).float(),
        }
    output = transformer(
        hidden_states=tokens(latents),
        encoder_hidden_states=embeds,
        timestep=sigmas,
        img_ids=ids(latents, 0).float(),
        txt_ids=torch.tensor([[0, 0, 0, i] for i in range(embeds.shape[1])]).float(),
        return_dict=False,
        **given,
    )[0]
    batch, channels, height, width = latents.shape
    grid = output.transpose(1, 2).reshape(batch, channels, 2, 2, height // 2, width // 2)
    return grid.permute(0, 1, 4, 2, 5, 3).reshape(latents.shape)


@torch.no_grad()
def run_flux3(model: nn.Module) -> Tensor:
    """Run a transformer, ours or diffusers', on :func:`tiny_flux3_inputs` without references."""
    inputs = tiny_flux3_inputs()
    return call_by_hand(model, inputs["latents"], inputs["sigmas"], inputs["prompt_embeds"])


@torch.no_grad()
def run_flux3_edit(model: nn.Module) -> Tensor:
    """Run a transformer, ours or diffusers', on :func:`tiny_flux3_inputs` with both references."""
    inputs = tiny_flux3_inputs()
    given = (inputs[name] for name in ("latents", "sigmas", "prompt_embeds"))
    return call_by_hand(model, *given, (inputs["first"], inputs["second"]))


def tiny_flux3_tokenizer() -> Qwen2Tokenizer:
    """Return the tiny Qwen tokenizer with Qwen3-VL's chat template."""
    tokenizer = tiny_qwen_tokenizer()
    tokenizer.chat_template = _CHAT
    return tokenizer


class TinyProcessor:
    """What Qwen3-VL's processor does for text alone; that class cannot be made without torchvision."""

    def __init__(self, tokenizer: Qwen2Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.apply_chat_template = tokenizer.apply_chat_template


def tiny_flux3_text_encoder(vocabulary: int, seed: int = 0) -> Qwen3VLForConditionalGeneration:
    """Return a random Qwen3-VL of the published 36 layers."""
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": 36,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": WIDTH,
            "deepstack_visual_indexes": [0],
        },
    )  # fmt: skip
    return tiny_text_model(lambda: Qwen3VLForConditionalGeneration(config), seed, 4)


def tiny_flux3_pipeline(
    folder: str | Path, seed: int = 0, blocks: int = 2, flow_map: bool = False, channels: int = 32
) -> Path:
    """Write a complete random model as the modular pipeline keeps it to ``folder``; return it.

    Of fewer ``channels`` than the autoencoder has, the transformer alone is of use.
    """
    folder, tokenizer = Path(folder), tiny_flux3_tokenizer()
    parts = {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=6.93),
        "vae": tiny_flux2_vae(seed),
        "text_encoder": tiny_flux3_text_encoder(len(tokenizer) + 3, seed),
        "tokenizer": tokenizer,
        "transformer": tiny_flux3_transformer(blocks, seed, flow_map, channels),
    }
    index: dict[str, object] = {"_class_name": "Flux3DistilledModularPipeline" if flow_map else "Flux3ModularPipeline"}
    for name, part in parts.items():
        part.save_pretrained(folder / name)
        index[name] = [None, None, {"subfolder": name, "type_hint": [None, None]}]
    (folder / "modular_model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def flux3_reference(folder: Path) -> Flux3ModularPipeline:
    """Return diffusers' modular pipeline with the parts in ``folder``, without its prompt upsampler."""
    distilled = "Distilled" in json.loads((folder / "modular_model_index.json").read_text())["_class_name"]
    blocks = Flux3DistilledAutoBlocks() if distilled else Flux3AutoBlocks()
    blocks.sub_blocks.pop("prompt_upsampler")
    pipeline = (Flux3DistilledModularPipeline if distilled else Flux3ModularPipeline)(blocks=blocks)
    pipeline.update_components(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
        vae=AutoencoderKLFlux2.from_pretrained(folder / "vae"),
        text_encoder=Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder"),
        tokenizer=TinyProcessor(Qwen2Tokenizer.from_pretrained(folder / "tokenizer")),
        transformer=Flux3Transformer2DModel.from_pretrained(folder / "transformer").eval(),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class CalledAsOthers:
    """diffusers' modular pipeline, called as other families' pipelines are."""

    def __init__(self, pipeline: Flux3ModularPipeline) -> None:
        self.pipeline = pipeline
        self.vae_scale_factor, self.scheduler = pipeline.vae_scale_factor, pipeline.scheduler

    def __call__(self, prompt: str, negative_prompt: str | None = None, **inputs: Any) -> Any:
        if negative_prompt is not None:
            inputs["negative_prompt"] = negative_prompt
        if "guidance_scale" in inputs:
            self.pipeline.guider.guidance_scale = inputs.pop("guidance_scale")
        self.images = self.pipeline(prompt=prompt, **inputs, output="images")
        return self


def save_flux3_split_files(pipeline_folder: Path, folder: Path, prefix: str = "") -> SplitFiles:
    """Write the weights of a tiny model's folder under BFL's names, and the other parts as ComfyUI has them."""
    return save_parts(
        "flux3_klein",
        pipeline_folder,
        folder,
        ("klein.safetensors", lambda state: {bfl_name(k): _half_swapped(k, v) for k, v in state.items()}),
        ("flux2-vae.safetensors", bfl_flux2_vae_state_dict),
        ("qwen3vl_4b_bf16.safetensors", dict),
        prefix,
    )


# BFL's names, written out from the model's source as vLLM-Omni and ComfyUI read it.
_WHOLE = {
    "context_embedder": "txt_in",
    "timestep_embedder.linear_1": "time_in.in_layer",
    "timestep_embedder.linear_2": "time_in.out_layer",
    "target_timestep_embedder.linear_1": "ref_time_in.in_layer",
    "target_timestep_embedder.linear_2": "ref_time_in.out_layer",
    "proj_out": "final_layer.image.linear",
    "norm_out.linear": "final_layer.image.adaLN_modulation.1",
}
_IN_BLOCKS = {
    "attn.to_q.weight": "q_proj.weight",
    "attn.to_k.weight": "k_proj.weight",
    "attn.to_v.weight": "v_proj.weight",
    "attn.to_out.0.weight": "attn_out.weight",
    "attn.norm_q.weight": "norm.query_norm.scale",
    "attn.norm_k.weight": "norm.key_norm.scale",
    "ff.linear_in.weight": "mlp_in.weight",
    "ff.linear_out.weight": "mlp_out.weight",
}


def bfl_name(name: str) -> str:
    """Return what BFL calls a tensor of diffusers' transformer."""
    module, _, leaf = name.rpartition(".")
    if module in _WHOLE:
        return f"{_WHOLE[module]}.{leaf}"
    if module.startswith("x_embedders."):
        return name.replace("x_embedders.", "emb_in.")
    if "_stream_modulations." in module:
        return name.replace(".linear.", ".lin.")
    for ours, theirs in _IN_BLOCKS.items():
        name = name.replace(f".{ours}", f".{theirs}")
    if name.startswith("mode_blocks."):
        return f"content_{name}"
    return name.replace("single_transformer_blocks.", "single_blocks.")


def _half_swapped(name: str, tensor: Tensor) -> Tensor:
    """Return the last modulation as BFL has it: shift, then scale."""
    return torch.cat(tensor.chunk(2)[::-1]) if name == "norm_out.linear.weight" else tensor.contiguous()
