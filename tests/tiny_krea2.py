"""Tiny random Krea 2 models for tests: real classes and real file layouts, built in well under a second.

``tiny_krea2_pipeline(folder)`` writes a whole diffusers pipeline folder; ``save_krea2_split_files(pipeline_folder,
folder)`` writes the same weights as they are published as single files. The weights are random; they are scaled so that
outputs depend on every input.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel
from torch import Tensor, nn
from transformers import Qwen3VLConfig, Qwen3VLModel

from library.models.vae import pack_latents
from tests.tiny import SplitFiles, _enliven, _seeded, save_parts, tiny_text_model
from tests.tiny_qwen import tiny_qwen_inputs, tiny_qwen_tokenizer, tiny_qwen_vae, wan_name

TEXT_WIDTH, TEXT_LAYERS = 32, 12


def tiny_krea2_transformer(layers: int = 2, seed: int = 0, text_layers: int = TEXT_LAYERS) -> Krea2Transformer2DModel:
    """Return diffusers' own Krea 2 transformer, random, fp32, 64 wide, four query heads and two of keys."""
    transformer = _seeded(
        lambda: Krea2Transformer2DModel(
            num_layers=layers,
            attention_head_dim=16,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=96,
            timestep_embed_dim=32,
            text_hidden_dim=TEXT_WIDTH,
            num_text_layers=text_layers,
            text_num_attention_heads=2,
            text_num_key_value_heads=1,
            text_intermediate_size=48,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=2,
            axes_dims_rope=(4, 6, 6),
        ),
        seed,
    )
    _enliven(transformer, seed)
    random = torch.Generator().manual_seed(seed + 2)
    for name, parameter in transformer.named_parameters():
        if name.endswith("scale_shift_table"):  # zero as made
            parameter.data.normal_(std=0.3, generator=random)
    return transformer


def tiny_krea2_inputs(batch: int = 2, side: int = 8, tokens: int = 12) -> dict[str, Tensor]:
    """Return :func:`tests.tiny_qwen.tiny_qwen_inputs` with text of several layers, side by side."""
    return tiny_qwen_inputs(batch, side, tokens, TEXT_WIDTH * TEXT_LAYERS)


def positions(tokens: int, rows: int, columns: int) -> Tensor:
    """Return what Krea2Pipeline gives as positions."""
    return Krea2Pipeline.prepare_position_ids(tokens, rows, columns, torch.device("cpu"))


@torch.no_grad()
def run_krea2(model: nn.Module) -> Tensor:
    """Run a transformer, ours or diffusers', on :func:`tiny_krea2_inputs`."""
    inputs = tiny_krea2_inputs()
    return model(
        hidden_states=pack_latents(inputs["latents"]),
        encoder_hidden_states=inputs["prompt_embeds"].unflatten(-1, (TEXT_LAYERS, TEXT_WIDTH)),
        timestep=inputs["sigmas"],
        position_ids=positions(12, 4, 4),
        return_dict=False,
    )[0]


def tiny_krea2_text_encoder(vocabulary: int, seed: int = 0) -> Qwen3VLModel:
    """Return a random Qwen3-VL: 36 text layers, as published, and two vision blocks."""
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": 36,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": TEXT_WIDTH,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "patch_size": 4,
        },
    )  # fmt: skip
    return tiny_text_model(lambda: Qwen3VLModel(config), seed, 8)


def tiny_krea2_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Return Raw's scheduler, as the docstring of Krea2Pipeline has it."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=6400
    )


def tiny_krea2_pipeline(folder: str | Path, seed: int = 0, layers: int = 2, turbo: bool = False) -> Path:
    """Write a complete random pipeline in diffusers' layout to ``folder``; return it."""
    tokenizer = tiny_qwen_tokenizer()
    Krea2Pipeline(
        scheduler=tiny_krea2_scheduler(),
        vae=tiny_qwen_vae(seed),
        text_encoder=tiny_krea2_text_encoder(len(tokenizer) + 3, seed),
        tokenizer=tokenizer,
        transformer=tiny_krea2_transformer(layers, seed),
        is_distilled=turbo,
    ).save_pretrained(folder)
    return Path(folder)


def save_krea2_split_files(pipeline_folder: Path, folder: Path, prefix: str = "") -> SplitFiles:
    """Write the weights of a tiny pipeline folder as single files: Krea's names, ComfyUI's text encoder and VAE."""
    return save_parts(
        "krea2",
        pipeline_folder,
        folder,
        ("raw.safetensors", published_state_dict),
        ("qwen_image_vae.safetensors", lambda state: {wan_name(name): tensor for name, tensor in state.items()}),
        # ComfyUI's files: the language model below model., the vision tower below visual.
        (
            "qwen3vl_4b_bf16.safetensors",
            lambda state: {name.replace("language_model.", "model.", 1): tensor for name, tensor in state.items()},
        ),
        prefix,
    )


# The names of krea-ai/krea-2's mmdit.py, written out from its modules, independently of the table that the loader uses.
_PLACES = {
    "img_in": "first",
    "time_embed.linear_1": "tmlp.0",
    "time_embed.linear_2": "tmlp.2",
    "time_mod_proj": "tproj.1",
    "txt_in.norm": "txtmlp.0",
    "txt_in.linear_1": "txtmlp.1",
    "txt_in.linear_2": "txtmlp.3",
    "final_layer.linear": "last.linear",
    "final_layer.norm": "last.norm",
    "final_layer": "last.modulation",
    "text_fusion": "txtfusion",
    "transformer_blocks": "blocks",
}
_PARTS = {
    ".attn.to_q.": ".attn.wq.", ".attn.to_k.": ".attn.wk.", ".attn.to_v.": ".attn.wv.", ".attn.to_gate.": ".attn.gate.",
    ".attn.to_out.0.": ".attn.wo.", ".attn.norm_q.": ".attn.qknorm.qnorm.", ".attn.norm_k.": ".attn.qknorm.knorm.",
    ".ff.": ".mlp.", ".norm1.": ".prenorm.", ".norm2.": ".postnorm.",
}  # fmt: skip


def published_name(name: str) -> str:
    """Return the published name of a module or tensor of diffusers' transformer."""
    place = max((key for key in _PLACES if f"{name}.".startswith(f"{key}.")), key=len)
    name = f"{_PLACES[place]}{name.removeprefix(place)}."
    for ours, theirs in _PARTS.items():
        name = name.replace(ours, theirs)
    return name.removesuffix(".")


def published_state_dict(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a diffusers Krea 2 state dict as Krea published it: a block's table is one vector."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        theirs = published_name(name)
        if name.endswith("scale_shift_table"):
            theirs = theirs.replace("scale_shift_table", "lin" if theirs.startswith("last") else "mod.lin")
            tensor = tensor if theirs.startswith("last") else tensor.flatten()
        elif "norm." in theirs or theirs == "txtmlp.0.weight":
            theirs = theirs.replace(".weight", ".scale")
        result[theirs] = tensor
    return result
