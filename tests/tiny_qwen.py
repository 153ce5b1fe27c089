"""Tiny random Qwen-Image models for tests: real classes and real file layouts, built in well under a second.

``tiny_qwen_pipeline(folder, kind)`` writes a whole diffusers pipeline folder; ``save_split_files(pipeline_folder,
folder)`` writes the same weights as ComfyUI publishes them. Head widths are the published ones where no tensor of a
file shows them (text 128, vision 80). The weights are random; they are scaled so that outputs depend on every input.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Literal

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from library.models.vae import pack_latents
from tests.tiny import SplitFiles, _enliven, _seeded, random_inputs, save_parts, tiny_text_model

Kind = Literal["qwen_image", "qwen_image_edit", "qwen_image_edit_plus"]
PIPELINES = {
    "qwen_image": QwenImagePipeline,
    "qwen_image_edit": QwenImageEditPipeline,
    "qwen_image_edit_plus": QwenImageEditPlusPipeline,
}
TEXT_WIDTH = 256
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
_SPECIAL += ["<|video_pad|>"]
_CAPTIONS = "a disc, red green blue yellow white black purple orange plain small large picture of the make it"


def tiny_qwen_transformer(
    blocks: int = 2, heads: int = 2, head_dim: int = 32, zero_cond_t: bool = False, seed: int = 0
) -> QwenImageTransformer2DModel:
    """Return diffusers' own Qwen-Image transformer, random, fp32; width = heads * head_dim."""
    first = max(8, head_dim // 8)
    transformer = _seeded(
        lambda: QwenImageTransformer2DModel(
            num_layers=blocks,
            attention_head_dim=head_dim,
            num_attention_heads=heads,
            joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=(first, (head_dim - first) // 2, (head_dim - first) // 2),
            zero_cond_t=zero_cond_t,
        ),
        seed,
    )
    _enliven(transformer, seed)
    return transformer


def tiny_qwen_inputs(batch: int = 2, side: int = 8, tokens: int = 12, width: int = TEXT_WIDTH) -> dict[str, Tensor]:
    """Return random ``latents`` [B, 16, side, side], ``sigmas`` [B] and text embeddings with a full mask."""
    inputs = random_inputs(batch, (16, side, side), (tokens, width))
    return inputs | {"prompt_embeds_mask": torch.ones(batch, tokens, dtype=torch.bool)}


def run_qwen(model: nn.Module) -> Tensor:
    """Run a transformer, ours or diffusers', on :func:`tiny_qwen_inputs`."""
    inputs = tiny_qwen_inputs()
    return model(
        hidden_states=pack_latents(inputs["latents"]),
        timestep=inputs["sigmas"],
        encoder_hidden_states=inputs["prompt_embeds"],
        img_shapes=[[(1, 4, 4)]] * 2,
        return_dict=False,
    )[0]


def tiny_qwen_vae(seed: int = 0) -> AutoencoderKLQwenImage:
    """Return a VAE of Qwen-Image's geometry (8 x smaller, 16 channels), random."""
    vae = _seeded(lambda: AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1), seed)
    _enliven(vae, seed)
    return vae


def _templates() -> list[str]:
    return [
        QwenImagePipeline(None, None, None, None, None).prompt_template_encode,
        QwenImageEditPipeline(None, None, None, None, None, None).prompt_template_encode,
        "Picture 1: 2: 3:",
    ]


@functools.cache
def _byte_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return vocabulary and merges in which every word of the templates is one token, as in the published one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pre_tokenizers_regex(), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    plain = [text for template in _templates() for text in _without_special(template)]
    trainer = trainers.BpeTrainer(
        vocab_size=2000, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([*plain, _CAPTIONS, " " + _CAPTIONS], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def pre_tokenizers_regex() -> object:
    """Return Qwen2's pattern of words."""
    from tokenizers import Regex

    return Regex(PRETOKENIZE_REGEX)


def _without_special(text: str) -> list[str]:
    for special in _SPECIAL:
        text = text.replace(special, "\0")
    return text.replace("{}", "\0").split("\0")


def tiny_qwen_tokenizer() -> Qwen2Tokenizer:
    """Return a tokenizer trained on the prompt templates: they have as many tokens as with the published one."""
    vocabulary, merges = _byte_pairs()
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=merges, extra_special_tokens=_SPECIAL[1:])
    tokenizer.model_max_length = 32768
    return tokenizer


def tiny_qwen_text_encoder(tokenizer: Qwen2Tokenizer, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    """Return a random Qwen2.5-VL: two text layers, two vision blocks."""
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer) + 3,
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 160,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
            "fullatt_block_indexes": [0, 1],
            "tokens_per_second": 2,
        },
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    return tiny_text_model(lambda: Qwen2_5_VLForConditionalGeneration(config), seed, 4)


def tiny_qwen_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Return the published scheduler: scheduler/scheduler_config.json of Qwen/Qwen-Image."""
    return FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        max_image_seq_len=8192,
        base_shift=0.5,
        max_shift=0.9,
        shift=1.0,
        shift_terminal=0.02,
        use_dynamic_shifting=True,
        time_shift_type="exponential",
    )


class TinyProcessor:
    """What ``Qwen2VLProcessor`` does for pictures in prompts; that class cannot be made without torchvision."""

    def __init__(self, tokenizer: Qwen2Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.image_processor = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=12845056)

    def __call__(self, text: list[str], images: list | None, padding: bool, return_tensors: str):
        pictures = self.image_processor(images=images, return_tensors="pt") if images is not None else {}
        counts = iter((grid.prod() // 4).item() for grid in pictures.get("image_grid_thw", []))
        expanded = []
        for line in text:
            parts = line.split("<|image_pad|>")
            filled = parts[0]
            for part in parts[1:]:
                filled += "<|image_pad|>" * int(next(counts)) + part
            expanded.append(filled)
        inputs = self.tokenizer(expanded, padding=padding, return_tensors=return_tensors)
        inputs.update(pictures)
        return inputs


def tiny_qwen_pipeline(
    folder: str | Path,
    kind: Kind = "qwen_image",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    blocks: int = 2,
    zero_cond_t: bool = False,
) -> Path:
    """Write a complete random pipeline in diffusers' layout to ``folder``; return it."""
    tokenizer = tiny_qwen_tokenizer()
    parts: dict[str, object] = {
        "scheduler": tiny_qwen_scheduler(),
        "vae": tiny_qwen_vae(seed).to(dtype),
        "text_encoder": tiny_qwen_text_encoder(tokenizer, seed).to(dtype),
        "tokenizer": tokenizer,
        "transformer": tiny_qwen_transformer(blocks, zero_cond_t=zero_cond_t, seed=seed).to(dtype),
    }
    if kind != "qwen_image":
        parts["processor"] = None
    PIPELINES[kind](**parts).save_pretrained(folder)
    return Path(folder)


def save_split_files(pipeline_folder: Path, folder: Path, prefix: str = "") -> SplitFiles:
    """Write the weights of a tiny pipeline folder in ComfyUI's layout."""
    return save_parts(
        "qwen_image",
        pipeline_folder,
        folder,
        ("qwen_image.safetensors", dict),
        ("qwen_image_vae.safetensors", lambda state: {wan_name(name): t for name, t in state.items()}),
        ("qwen_2.5_vl_7b.safetensors", lambda state: {published_text_name(name): t for name, t in state.items()}),
        prefix,
    )


def published_text_name(name: str) -> str:
    """Return the name Qwen2.5-VL's weights were published under, before transformers 4.52 moved them."""
    return name.replace("model.language_model.", "model.", 1).replace("model.visual.", "visual.", 1)


# Wan's names, written out from https://github.com/Wan-Video/Wan2.1/blob/main/wan/modules/vae.py for one residual block
# a level in the encoder and two in the decoder, independently of the rules that the loader uses.
_WAN_PLACES = {
    "quant_conv": "conv1",
    "post_quant_conv": "conv2",
    "encoder.conv_in": "encoder.conv1",
    "encoder.norm_out": "encoder.head.0",
    "encoder.conv_out": "encoder.head.2",
    "decoder.conv_in": "decoder.conv1",
    "decoder.norm_out": "decoder.head.0",
    "decoder.conv_out": "decoder.head.2",
    **{f"encoder.down_blocks.{i}": f"encoder.downsamples.{i}" for i in range(7)},
    **{
        f"{side}.mid_block.{theirs}": f"{side}.middle.{place}"
        for side in ("encoder", "decoder")
        for place, theirs in enumerate(("resnets.0", "attentions.0", "resnets.1"))
    },
    **{
        f"decoder.up_blocks.{theirs}": f"decoder.upsamples.{place}"
        for place, theirs in enumerate(
            (
                "0.resnets.0", "0.resnets.1", "0.upsamplers.0",
                "1.resnets.0", "1.resnets.1", "1.upsamplers.0",
                "2.resnets.0", "2.resnets.1", "2.upsamplers.0",
                "3.resnets.0", "3.resnets.1",
            )
        )
    },
}  # fmt: skip
_WAN_PARTS = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}
_WAN_PARTS |= {"conv_shortcut": "shortcut"}


def wan_name(name: str) -> str:
    """Return the name in qwen_image_vae.safetensors of a tensor of diffusers' AutoencoderKLQwenImage."""
    place = max((key for key in _WAN_PLACES if name.startswith(f"{key}.")), key=len)
    rest = name.removeprefix(f"{place}.").split(".")
    return ".".join([_WAN_PLACES[place], _WAN_PARTS.get(rest[0], rest[0]), *rest[1:]])
