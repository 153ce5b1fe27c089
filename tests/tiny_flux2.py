"""Tiny random FLUX.2 models for tests: real classes and real file layouts, built in well under a second.

``tiny_flux2_pipeline(folder)`` writes a whole diffusers pipeline folder of klein, ``tiny_dev_pipeline(folder)`` of dev;
``save_flux2_files(pipeline_folder, folder)`` writes the same weights as BFL and ComfyUI publish them. The weights are
random; they are scaled so that outputs depend on every input.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.tiny import (
    TEXT_WIDTH,
    SplitFiles,
    _enliven,
    _seeded,
    bfl_vae_state_dict,
    random_inputs,
    save_parts,
    tiny_text_model,
)
from tests.tiny_z_image import tiny_z_tokenizer


def tiny_flux2_transformer(
    double_blocks: int = 1, single_blocks: int = 2, guidance: bool = False, heads: int = 2, seed: int = 0
) -> Flux2Transformer2DModel:
    """Return diffusers' own FLUX.2 transformer, random, fp32, heads of 32."""
    transformer = _seeded(
        lambda: Flux2Transformer2DModel(
            num_layers=double_blocks,
            num_single_layers=single_blocks,
            attention_head_dim=32,
            num_attention_heads=heads,
            joint_attention_dim=3 * TEXT_WIDTH,
            guidance_embeds=guidance,
            axes_dims_rope=(8, 8, 8, 8),
        ),
        seed,
    )
    _enliven(transformer, seed)
    return transformer


def tiny_flux2_inputs(batch: int = 2, side: int = 8, tokens: int = 12) -> dict[str, Tensor]:
    """Return random ``latents`` [B, 32, side, side], ``sigmas`` [B] and text embeddings."""
    return random_inputs(batch, (32, side, side), (tokens, 3 * TEXT_WIDTH))


def patched(latents: Tensor) -> Tensor:
    """Return latents [B, C, h, w] as the pipelines have them, [B, 4C, h/2, w/2]."""
    return Flux2KleinPipeline._patchify_latents(latents)


def run_flux2(model: nn.Module) -> Tensor:
    """Run a transformer, ours or diffusers', on :func:`tiny_flux2_inputs`."""
    inputs = tiny_flux2_inputs()
    patches = patched(inputs["latents"])
    guided = model.config.guidance_embeds
    return model(
        hidden_states=Flux2KleinPipeline._pack_latents(patches),
        timestep=inputs["sigmas"],
        guidance=torch.full((2,), 4.0) if guided else None,
        encoder_hidden_states=inputs["prompt_embeds"],
        img_ids=Flux2KleinPipeline._prepare_latent_ids(patches),
        txt_ids=Flux2KleinPipeline._prepare_text_ids(inputs["prompt_embeds"]),
        return_dict=False,
    )[0]


def tiny_flux2_vae(seed: int = 0) -> AutoencoderKLFlux2:
    """Return a VAE of FLUX.2's geometry (8 x smaller, 32 channels), random, with statistics that change something."""
    vae = _seeded(
        lambda: AutoencoderKLFlux2(
            block_out_channels=(8, 8, 16, 32),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=32,
            norm_num_groups=8,
            layers_per_block=1,
        ),
        seed,
    )
    _enliven(vae, seed)
    random = torch.Generator().manual_seed(seed + 3)
    vae.bn.running_mean.copy_(torch.randn(128, generator=random) * 0.1)
    vae.bn.running_var.copy_(torch.rand(128, generator=random) + 0.5)
    return vae.eval()


def tiny_flux2_text_encoder(vocabulary: int, seed: int = 0) -> Qwen3ForCausalLM:
    """Return a random Qwen3 of 28 layers: one more than is read."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=TEXT_WIDTH,
        intermediate_size=48,
        num_hidden_layers=28,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    )
    return tiny_text_model(lambda: Qwen3ForCausalLM(config), seed, 8)


def tiny_flux2_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Return the published scheduler: scheduler/scheduler_config.json of black-forest-labs/FLUX.2-klein-base-4B."""
    return FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)


def tiny_flux2_pipeline(folder: str | Path, seed: int = 0, **transformer: int) -> Path:
    """Write a complete random klein pipeline in diffusers' layout to ``folder``; return it."""
    tokenizer = tiny_z_tokenizer()
    Flux2KleinPipeline(
        scheduler=tiny_flux2_scheduler(),
        vae=tiny_flux2_vae(seed),
        text_encoder=tiny_flux2_text_encoder(len(tokenizer) + 3, seed),
        tokenizer=tokenizer,
        transformer=tiny_flux2_transformer(seed=seed, **transformer),
    ).save_pretrained(folder)
    return Path(folder)


# What Mistral Small 3's published template makes of a system message and a user's message, texts both.
_MISTRAL_CHAT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content[0].text }}[/SYSTEM_PROMPT]"
    "{% else %}[INST]{{ m.content[0].text }}[/INST]{% endif %}{% endfor %}"
)


def tiny_mistral_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single bytes that fills up at the beginning, as the published one does."""
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<pad>", "[IMG]"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate([*specials, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=[s for s in specials if s.startswith("[")],
        padding_side="left",
    )
    fast.chat_template = _MISTRAL_CHAT
    return fast


def tiny_mistral(vocabulary: int, seed: int = 0) -> Mistral3ForConditionalGeneration:
    """Return a random Mistral 3 of 31 layers, one more than is read, with eyes."""
    text = {
        "model_type": "mistral",
        "vocab_size": vocabulary,
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 31,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e9},
    }
    eyes = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    eyes |= {"num_attention_heads": 2, "image_size": 32, "patch_size": 16, "head_dim": 16}
    config = Mistral3Config(text_config=text, vision_config=eyes, image_token_index=8)
    return tiny_text_model(lambda: Mistral3ForConditionalGeneration(config), seed, 8)


def tiny_dev_pipeline(folder: str | Path, seed: int = 0, **transformer: int) -> Path:
    """Write a complete random dev pipeline in diffusers' layout to ``folder``; return it."""
    tokenizer = tiny_mistral_tokenizer()
    Flux2Pipeline(
        scheduler=tiny_flux2_scheduler(),
        vae=tiny_flux2_vae(seed),
        text_encoder=tiny_mistral(len(tokenizer) + 3, seed),
        tokenizer=tokenizer,
        transformer=tiny_flux2_transformer(guidance=True, seed=seed, **transformer),
    ).save_pretrained(folder)
    return Path(folder)


def save_flux2_files(pipeline_folder: Path, folder: Path, prefix: str = "") -> SplitFiles:
    """Write the weights of a tiny klein pipeline folder as BFL and ComfyUI publish them."""
    return save_parts(
        "flux2_klein",
        pipeline_folder,
        folder,
        ("flux-2-klein-base-4b.safetensors", bfl_flux2_state_dict),
        ("flux2-vae.safetensors", bfl_flux2_vae_state_dict),
        ("qwen_3_4b.safetensors", dict),
        prefix,
    )


def bfl_flux2_vae_state_dict(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a diffusers ``AutoencoderKLFlux2`` state dict with BFL's names: FLUX.1's, and three modules moved."""
    outside = ("bn.", "quant_conv.", "post_quant_conv.")
    named = bfl_vae_state_dict({name: tensor for name, tensor in state.items() if not name.startswith(outside)})
    named |= {name: tensor for name, tensor in state.items() if name.startswith("bn.")}
    named |= {f"encoder.{name}": tensor for name, tensor in state.items() if name.startswith("quant_conv.")}
    return named | {f"decoder.{name}": tensor for name, tensor in state.items() if name.startswith("post_quant_conv.")}


# BFL's names, written out from https://github.com/black-forest-labs/flux2/blob/main/src/flux2/model.py, independently
# of the rules that the loader uses.
_NAMES = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_guidance_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_guidance_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "proj_out": "final_layer.linear",
}
_DOUBLE_NAMES = {
    "attn.to_out.0.weight": "img_attn.proj.weight",
    "attn.to_add_out.weight": "txt_attn.proj.weight",
    "attn.norm_q.weight": "img_attn.norm.query_norm.scale",
    "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
    "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
    "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
    "ff.linear_in.weight": "img_mlp.0.weight",
    "ff.linear_out.weight": "img_mlp.2.weight",
    "ff_context.linear_in.weight": "txt_mlp.0.weight",
    "ff_context.linear_out.weight": "txt_mlp.2.weight",
}
_SINGLE_NAMES = {
    "attn.to_qkv_mlp_proj.weight": "linear1.weight",
    "attn.to_out.weight": "linear2.weight",
    "attn.norm_q.weight": "norm.query_norm.scale",
    "attn.norm_k.weight": "norm.key_norm.scale",
}
_QKV = {"img": ("to_q", "to_k", "to_v"), "txt": ("add_q_proj", "add_k_proj", "add_v_proj")}


def bfl_flux2_state_dict(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a diffusers FLUX.2 state dict in BFL's layout."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        module = name.removesuffix(".weight")
        if name.startswith("single_transformer_blocks."):
            _, block, rest = name.split(".", 2)
            result[f"single_blocks.{block}.{_SINGLE_NAMES[rest]}"] = tensor
        elif name.startswith("transformer_blocks."):
            _, block, rest = name.split(".", 2)
            if rest in _DOUBLE_NAMES:
                result[f"double_blocks.{block}.{_DOUBLE_NAMES[rest]}"] = tensor
        elif module == "norm_out.linear":  # (scale, shift) -> (shift, scale)
            result["final_layer.adaLN_modulation.1.weight"] = torch.cat(tensor.chunk(2)[::-1])
        else:
            result[f"{_NAMES[module]}.weight"] = tensor
    blocks = {name.split(".")[1] for name in state if name.startswith("transformer_blocks.")}
    for block in blocks:
        for stream, names in _QKV.items():
            parts = [state[f"transformer_blocks.{block}.attn.{part}.weight"] for part in names]
            result[f"double_blocks.{block}.{stream}_attn.qkv.weight"] = torch.cat(parts)
    return result
