"""Tiny random Qwen-Image-2.1 models for tests: real classes and real file layouts, built in well under a second.

``tiny_21_pipeline(folder)`` writes a whole diffusers pipeline folder; ``save_21_split_files(pipeline_folder, folder)``
writes the same weights as ComfyUI publishes them. The weights are random; they are scaled so that outputs depend on
every input. The processor is :class:`TinyProcessor`: transformers' cannot be made without torchvision.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage21, QwenImage21Pipeline, QwenImage21Transformer2DModel
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.tiny import SplitFiles, _enliven, _seeded, random_inputs, save_parts, tiny_text_model
from tests.tiny_qwen import published_text_name, tiny_qwen_scheduler, tiny_qwen_tokenizer

TEXT_WIDTH = 128
CHANNELS = 64  # a file does not say by what latents are normalised


def tiny_21_transformer(
    blocks: int = 2, heads: int = 2, head_dim: int = 32, channels: int = CHANNELS, seed: int = 0
) -> QwenImage21Transformer2DModel:
    """Return diffusers' own Qwen-Image-2.1 transformer, random, fp32; width = heads * head_dim."""
    first = max(8, head_dim // 8)
    transformer = _seeded(
        lambda: QwenImage21Transformer2DModel(
            in_channels=channels,
            out_channels=channels,
            num_layers=blocks,
            attention_head_dim=head_dim,
            num_attention_heads=heads,
            context_in_dim=TEXT_WIDTH,
            axes_dims_rope=(first, (head_dim - first) // 2, (head_dim - first) // 2),
        ),
        seed,
    )
    _enliven(transformer, seed)
    transformer.modulation[1].weight.data.mul_(20)  # gates of a tenth to a half
    return transformer


def tiny_21_inputs(batch: int = 2, side: int = 8, tokens: int = 12) -> dict[str, Tensor]:
    """Return random ``latents`` [B, C, side, side], ``sigmas`` [B] and text embeddings with a full mask."""
    inputs = random_inputs(batch, (CHANNELS, side, side), (tokens, TEXT_WIDTH))
    return inputs | {"prompt_embeds_mask": torch.ones(batch, tokens, dtype=torch.bool)}


def packed(latents: Tensor) -> Tensor:
    """Return tokens [B, h * w, C] of latents [B, C, h, w], as the pipeline has them."""
    batch, channels, height, width = latents.shape
    return QwenImage21Pipeline._pack_latents(latents.contiguous(), batch, channels, height, width)


def theirs_called(
    model: nn.Module, images: list[Tensor], sigmas: Tensor, text: list[Tensor], mask: Tensor | None = None
) -> Tensor:
    """Call a transformer as the pipeline does; return the tokens of the last of ``images``.

    Args:
        model: ours or diffusers'.
        images: latents [B, C, h, w] of references, then of the painted image.
        sigmas: [B].
        text: what stands before each image, [B, L, D].
        mask: [B, L] of the last text, false where it is padded.
    """
    batch, shapes = len(sigmas), [(1, *image.shape[2:]) for image in images]
    rows, slots, valid = list[Tensor](), list[Tensor](), list[Tensor]()
    for part, image in zip(text, images, strict=True):
        places = image.shape[2] * image.shape[3] // 4
        own = part is text[-1]
        rows += [part] if own else [part, part.new_full((batch, places, part.shape[2]), 7.0)]  # nothing reads these
        slots += [torch.zeros(batch, part.shape[1]), torch.ones(batch, places)]
        valid += [torch.ones(batch, part.shape[1]), *([] if own else [torch.ones(batch, places)])]
    if mask is not None:
        valid[-1] = mask.float()
    output = model(
        hidden_states=torch.cat([packed(image) for image in images], dim=1),
        encoder_hidden_states=torch.cat(rows, dim=1),
        timestep=sigmas,
        img_shapes=[shapes] * batch,
        img_mask=torch.cat(slots, dim=1).bool(),
        encoder_hidden_states_mask=None if mask is None else torch.cat(valid, dim=1).bool(),
        return_dict=False,
    )[0]
    return output[:, -images[-1].shape[2] * images[-1].shape[3] :]


def run_21(model: nn.Module) -> Tensor:
    """Run a transformer, ours or diffusers', on :func:`tiny_21_inputs`."""
    inputs = tiny_21_inputs()
    return theirs_called(model, [inputs["latents"]], inputs["sigmas"], [inputs["prompt_embeds"]])


def tiny_21_vae(seed: int = 0) -> AutoencoderKLQwenImage21:
    """Return a VAE of Qwen-Image-2.1's geometry (16 x smaller, RGBA), random, of few channels."""
    vae = _seeded(
        lambda: AutoencoderKLQwenImage21(
            base_dim=8, decoder_base_dim=12, z_dim=CHANNELS, dim_mult=[1, 2, 2, 4, 4], num_res_blocks=1
        ),
        seed,
    )
    _enliven(vae, seed)
    return vae


def tiny_21_text_encoder(tokenizer: Qwen2Tokenizer, seed: int = 0) -> Qwen3VLForConditionalGeneration:
    """Return a random Qwen3-VL: three text layers, six vision blocks, of which two are read besides."""
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer) + 3,
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        },
        vision_config={
            "depth": 6,
            "hidden_size": 128,
            "intermediate_size": 48,
            "num_heads": 16,
            "out_hidden_size": TEXT_WIDTH,
            "deepstack_visual_indexes": [1, 2],
        },
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    )
    return tiny_text_model(lambda: Qwen3VLForConditionalGeneration(config), seed, 4)


class TinyProcessor:
    """What ``Qwen3VLProcessor`` does for captions and images; that class cannot be made without torchvision."""

    def __init__(self, tokenizer: Qwen2Tokenizer) -> None:
        self.tokenizer = tokenizer
        # preprocessor_config.json of Qwen/Qwen3-VL-8B-Instruct, but for a smallest size that suits tiny images
        self.image_processor = Qwen2VLImageProcessorPil(
            patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3, min_pixels=32 * 32, max_pixels=16777216
        )

    def apply_chat_template(self, messages: list[dict[str, Any]], tokenize: bool, return_dict: bool) -> list[list[int]]:
        assert tokenize
        text = "".join(f"<|im_start|>{m['role']}\n{m['content'][0]['text']}<|im_end|>\n" for m in messages)
        return [self.tokenizer(text).input_ids]

    def __call__(
        self, text: list[str], padding: bool, padding_side: str, return_tensors: str, images: list | None = None
    ):
        pictures = self.image_processor(images=images, return_tensors="pt") if images is not None else {}
        counts = iter((grid.prod() // 4).item() for grid in pictures.get("image_grid_thw", []))
        expanded = []
        for line in text:
            first, *parts = line.split("<|image_pad|>")
            expanded.append(first + "".join("<|image_pad|>" * int(next(counts)) + part for part in parts))
        inputs = self.tokenizer(expanded, padding=padding, padding_side=padding_side, return_tensors=return_tensors)
        inputs.update(pictures)
        token = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == token).int()  # return_mm_token_type_ids of the class
        return inputs


def tiny_21_pipeline(
    folder: str | Path, seed: int = 0, dtype: torch.dtype = torch.float32, blocks: int = 2, **index: object
) -> Path:
    """Write a complete random pipeline in diffusers' layout to ``folder``, ``index`` in its model_index; return it."""
    folder, tokenizer = Path(folder), tiny_qwen_tokenizer()
    parts: dict[str, Any] = {
        "scheduler": tiny_qwen_scheduler(),  # Qwen/Qwen-Image-2.1 has the same scheduler_config.json
        "vae": tiny_21_vae(seed).to(dtype),
        "text_encoder": tiny_21_text_encoder(tokenizer, seed).to(dtype),
        "processor": tokenizer,  # its files are the tokenizer's, those of images are not read
        "transformer": tiny_21_transformer(blocks, seed=seed).to(dtype),
    }
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    names = {"_class_name": "QwenImage21Pipeline", **index}
    (folder / "model_index.json").write_text(json.dumps(names), encoding="utf-8")
    return folder


def tiny_21_loaded(folder: Path, **settings: Any) -> QwenImage21Pipeline:
    """Return diffusers' pipeline of a tiny folder."""
    pipeline = QwenImage21Pipeline(
        tiny_qwen_scheduler(),
        AutoencoderKLQwenImage21.from_pretrained(folder / "vae"),
        Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder"),
        TinyProcessor(Qwen2Tokenizer.from_pretrained(folder / "processor")),  # type: ignore[arg-type]
        QwenImage21Transformer2DModel.from_pretrained(folder / "transformer"),
        **settings,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def comfy_21_state_dict(state: dict[str, Tensor], fused: bool = True) -> dict[str, Tensor]:
    """Return a transformer's weights under ComfyUI's names: ``gate_up`` is gate, then factor (SwiGLUFeedForward)."""
    state = dict(state)
    for name in [name for name in state if fused and name.endswith(".img_mlp.gate_layer.weight")]:
        gate, factor = state.pop(name), state.pop(name.replace("gate_layer", "proj"))
        state[name.replace("gate_layer", "gate_up")] = torch.cat([gate, factor])
    return state


def save_21_split_files(pipeline_folder: Path, folder: Path, prefix: str = "", fused: bool = True) -> SplitFiles:
    """Write the weights of a tiny pipeline folder in ComfyUI's layout."""
    return save_parts(
        "qwen_image_21",
        pipeline_folder,
        folder,
        ("qwen_image_2.1_bf16.safetensors", lambda state: comfy_21_state_dict(state, fused)),
        (
            "qwen_image_2.1_vae_bf16.safetensors",
            lambda state: {wan_22_name(name): _of_frames(name, tensor) for name, tensor in state.items()},
        ),
        ("qwen3vl_8b_bf16.safetensors", lambda state: {published_text_name(n): t for n, t in state.items()}),
        prefix,
        tokenizer="processor",
    )


def _of_frames(name: str, tensor: Tensor) -> Tensor:
    """Return a causal convolution's weight with the axis of frames; upsampling and attention have none in Wan."""
    plain = ".resample." in name or ".attentions." in name
    return tensor.unsqueeze(2).contiguous() if tensor.ndim == 4 and name.endswith("weight") and not plain else tensor


# Wan 2.2's names, written out from https://github.com/Wan-Video/Wan2.2/blob/main/wan/modules/vae2_2.py for one residual
# block a level in the encoder and two in the decoder, independently of the rules that the loader uses.
_WAN_PLACES = {
    "quant_conv": "conv1",
    "post_quant_conv": "conv2",
    **{
        f"{side}.{theirs}": f"{side}.{wan}"
        for side in ("encoder", "decoder")
        for theirs, wan in {
            "conv_in": "conv1",
            "norm_out": "head.0",
            "conv_out": "head.2",
            "mid_block.resnets.0": "middle.0",
            "mid_block.attentions.0": "middle.1",
            "mid_block.resnets.1": "middle.2",
        }.items()
    },
    **{f"encoder.down_blocks.{i}.resnets.0": f"encoder.downsamples.{i}.downsamples.0" for i in range(5)},
    **{f"encoder.down_blocks.{i}.downsampler": f"encoder.downsamples.{i}.downsamples.1" for i in range(4)},
    **{f"decoder.up_blocks.{i}.resnets.{j}": f"decoder.upsamples.{i}.upsamples.{j}" for i in range(5) for j in (0, 1)},
    **{f"decoder.up_blocks.{i}.upsampler": f"decoder.upsamples.{i}.upsamples.2" for i in range(4)},
}
_WAN_PARTS = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}
_WAN_PARTS |= {"conv_shortcut": "shortcut"}


def wan_22_name(name: str) -> str:
    """Return the name in qwen_image_2.1_vae_bf16.safetensors of a tensor of diffusers' AutoencoderKLQwenImage21."""
    place = max((key for key in _WAN_PLACES if name.startswith(f"{key}.")), key=len)
    rest = name.removeprefix(f"{place}.").split(".")
    return ".".join([_WAN_PLACES[place], _WAN_PARTS.get(rest[0], rest[0]), *rest[1:]])
