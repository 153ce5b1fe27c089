"""Qwen-Image's text encoder, Qwen2.5-VL: captions, and for edit models the reference images, to one vector a token.

A caption is put into the model's chat template, and what the language model says about the template's own beginning is
dropped again (34 tokens; 64 with edit models). Edit models see the reference images through Qwen2.5-VL's vision tower,
resized to the area that the diffusers pipelines use.

Images take places in a grid (3-D rotary positions), for which transformers 5 must know which tokens are images.
diffusers 0.42's edit pipelines do not say (https://github.com/huggingface/diffusers/issues/14194) and so give images
the places of plain text, unlike older versions, ComfyUI and the model's own training. Here ``mm_token_type_ids`` says.

The weights come from a transformers folder or ComfyUI's single file. They were published as ``model.layers...`` and
``visual...``; later transformers say ``model.language_model.layers...`` and ``model.visual...``. Both are read. Only
what is used is loaded: without images the language model alone, and never the head that would predict words. A single
file's configuration follows from its shapes, but for head widths and a few constants that no tensor shows; these are
those of Qwen2.5-VL-7B.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLConfig, Qwen2_5_VLModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from library.errors import UserError
from library.models.layer_names import count_blocks
from library.models.qwen3 import sizes, sizes_of
from library.models.text import LanguageModelEncoder, byte_tokenizer, padded
from library.models.weights import load_into, read_config, read_config_of
from library.precision.checkpoint import WeightFiles
from library.precision.recipe import Recipe, WeightLoader
from library.safetensors_io import RowRange

MOST_TOKENS = 1024  # of a caption without images; longer ones are cut, as in the pipeline
IMAGE_TOKEN = "<|image_pad|>"
_DESCRIBE = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:"
)
_ALTER = (
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how "
    "the user's text instruction should alter or modify the image. Generate a new image that meets the user's "
    "requirements while maintaining consistency with the original input where appropriate."
)


@dataclass(frozen=True)
class PromptTemplate:
    """How captions are put to the language model.

    Attributes:
        task: the system's message.
        dropped: tokens of the template's beginning whose vectors are dropped.
        label: what stands before an image, ``{}`` for its number; None: images are not seen.
        area: pixels that an image is resized to, about; 0: it stays as it is.
        between: what stands between images.
        most_tokens: of a caption without images; longer ones are cut, as in the pipeline. None: never.
    """

    task: str
    dropped: int
    label: str | None = None
    area: int = 0
    between: str = ""
    most_tokens: int | None = MOST_TOKENS

    @property
    def system(self) -> str:
        """The template's beginning."""
        return f"<|im_start|>system\n{self.task}<|im_end|>\n"

    def fill(self, caption: str, images: Sequence[int]) -> str:
        """Return the whole prompt; ``images`` says how many tokens each image takes."""
        shown = self.between.join(
            f"{(self.label or '').format(i)}<|vision_start|>{IMAGE_TOKEN * count}<|vision_end|>"
            for i, count in enumerate(images, start=1)
        )
        return f"{self.system}<|im_start|>user\n{shown}{caption}<|im_end|>\n<|im_start|>assistant\n"


TEMPLATES = {
    "qwen_image": PromptTemplate(_DESCRIBE, 34),
    "qwen_image_edit": PromptTemplate(_ALTER, 64, "", 1024 * 1024),
    "qwen_image_edit_plus": PromptTemplate(_ALTER, 64, "Picture {}: ", 384 * 384),
}


def published_text() -> dict[str, Callable[[], Any]]:
    """Return what builds Qwen2.5-VL-7B, and a tokenizer of single bytes for it, by folder."""
    text = sizes(152064, 3584, 18944, 28, 28, 4, _HEAD_DIM)
    vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584}
    config = _whole(text, vision)
    return {"text_encoder": lambda: Qwen2_5_VLModel(config), "tokenizer": byte_tokenizer}


class QwenTextEncoder(LanguageModelEncoder):
    """Qwen2.5-VL: the language model, or the whole model where reference images are seen."""

    title = "Qwen2.5-VL, 7 billion weights"

    def __init__(
        self,
        load: Callable[[], Any],
        tokenizer: PreTrainedTokenizerBase,
        template: PromptTemplate,
        fingerprint: str,
        processor: Qwen2VLImageProcessorPil | None = None,
    ) -> None:
        """``load`` gives the language model; with ``processor``, the whole model, for images that it prepares."""
        super().__init__(load, tokenizer, fingerprint)
        self.template, self.dropped = template, template.dropped
        self._processor = processor
        self.sees_references = processor is not None
        self.most_tokens = None if self.sees_references else template.most_tokens

    def inputs(self, captions: list[str], references: list[list[Image.Image]] | None) -> dict[str, Tensor]:
        """Return ids and mask [B, T], filled up at the end, and the reference images' patches."""
        shown = references if references is not None else [[] for _ in captions]
        counts: list[list[int]] = [[] for _ in captions]
        inputs: dict[str, Tensor] = {}
        flat = [self._resized(image) for images in shown for image in images]
        if self._processor is not None and flat:
            inputs |= dict(self._processor(images=flat, return_tensors="pt"))
            tokens = iter((inputs["image_grid_thw"].prod(dim=1) // self._processor.merge_size**2).tolist())
            counts = [[next(tokens) for _ in images] for images in shown]
        prompts = [self.template.fill(caption, count) for caption, count in zip(captions, counts, strict=True)]
        inputs |= padded([self.cut(prompt)[0] for prompt in prompts])
        if flat:
            inputs["mm_token_type_ids"] = (
                inputs["input_ids"] == self.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
            ).int()
            for caption, row, count in zip(captions, inputs["mm_token_type_ids"], counts, strict=True):
                if int(row.sum()) != sum(count):
                    raise UserError(f"caption {caption!r}: {IMAGE_TOKEN} is the model's word for a picture; remove it")
        return inputs

    def prompt_of(self, caption: str) -> str:
        """Return the template with a caption."""
        return self.template.fill(caption, ())

    def _resized(self, image: Image.Image) -> Image.Image:
        size = reference_size(self.template.area, *image.size) if self.template.area else image.size
        return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)


def reference_size(area: int, width: int, height: int) -> tuple[int, int]:
    """Return width and height of about ``area`` pixels in an image's proportions, multiples of 32, as the pipelines'.

    Args:
        area: pixels wanted.
        width, height: of the image.
    """
    ratio = width / height
    wide = math.sqrt(area * ratio)
    return round(wide / 32) * 32, round(wide / ratio / 32) * 32


_HEAD_DIM, _VISION_HEAD_DIM = 128, 80
_MROPE = [16, 24, 24]
# processor/preprocessor_config.json of Qwen/Qwen-Image-Edit
_PIXELS = {"min_pixels": 56 * 56, "max_pixels": 12845056}


def load_qwen_text(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    recipe: Recipe | None = None,
    *,
    image_token: int | None = None,
) -> Qwen2_5_VLTextModel | Qwen2_5_VLModel:
    """Load the language model; ``recipe`` makes it fp8.

    Args:
        path: a transformers folder or a file.
        dtype, device: of the weights.
        recipe: how linear weights become fp8; None leaves them as the file has them.
        image_token: id of the token that stands for images; None: the vision tower is not loaded.
    """
    weights = WeightFiles(path)
    config, images = _config(weights), image_token is not None
    config.image_token_id = image_token if images else config.image_token_id
    key_map = vl_key_map(weights, "" if images else "language_model.")

    def build() -> Any:
        return Qwen2_5_VLModel(config) if images else Qwen2_5_VLTextModel(config.text_config)

    return load_into(build, weights, key_map, dtype, device, fp8=WeightLoader(recipe, compute="dequant"))


def check_qwen_text(path: Path, images: bool = False) -> None:
    """Raise a UserError if ``path`` holds no Qwen2.5-VL, ``images``: that sees; reads headers only."""
    weights = WeightFiles(path)
    _config(weights)
    if images and not any(vl_name(name).startswith("visual.") for name in weights.names):
        raise UserError(
            f"{path}: Qwen2.5-VL without its vision tower, as GGUF files have it; for a model that edits images give "
            "qwen_2.5_vl_7b.safetensors as text_encoder"
        )


def image_processor(folder: Path | None) -> Qwen2VLImageProcessorPil:
    """Return what prepares images for the vision tower, without torchvision.

    Args:
        folder: with ``preprocessor_config.json``; None, or without one: the published settings.
    """
    settings: dict[str, Any] = dict(_PIXELS)
    if folder is not None and (folder / "preprocessor_config.json").is_file():
        known = ("min_pixels", "max_pixels", "size", "patch_size", "temporal_patch_size", "merge_size")
        found = read_config(folder, "preprocessor_config.json")
        settings = {key: found[key] for key in known if found.get(key) is not None} or settings
    return Qwen2VLImageProcessorPil(**settings)


def vl_name(name: str) -> str:
    """Return the name in ``Qwen2_5_VLModel``, or in ``Qwen3VLModel``, of a file's tensor."""
    bare = name.removeprefix("model.")
    return bare if bare.startswith(("visual.", "language_model.")) else f"language_model.{bare}"


def vl_key_map(weights: WeightFiles, part: str = "") -> dict[str, list[RowRange]]:
    """Return where the parameters of a ``part`` of the model lie, by default of the whole; its head is left out."""
    names = {vl_name(name): name for name in weights.names if not name.startswith("lm_head.")}
    return {name.removeprefix(part): [RowRange(source)] for name, source in names.items() if name.startswith(part)}


def vl_sizes(weights: WeightFiles, inner: str, head_dim: int = 0) -> tuple[dict[str, int], dict[str, Any]]:
    """Return what a file shows of the configurations of the language model and of the vision tower, if that is there.

    Args:
        weights: the file.
        inner: the first layer of the tower's feed-forward.
        head_dim: of the language model, where no norm shows it.
    """
    names = {vl_name(name): name for name in weights.names}

    def shape(name: str) -> tuple[int, ...]:
        return weights.shape(names.get(name, name))

    text = sizes_of(shape, names, "language_model.", head_dim)
    if "visual.patch_embed.proj.weight" not in names:
        return text, {}
    width, _, frames, patch, _ = shape("visual.patch_embed.proj.weight")
    return text, {
        "depth": count_blocks(names, "visual.blocks."),
        "hidden_size": width,
        "intermediate_size": shape(f"visual.blocks.0.mlp.{inner}.weight")[0],
        "out_hidden_size": text["hidden_size"],
        "patch_size": patch,
        "temporal_patch_size": frames,
    }


def _config(weights: WeightFiles) -> Qwen2_5_VLConfig:
    """Return the model's configuration, from its folder or from its shapes."""
    if weights.path.is_dir():
        known = read_config_of("qwen2_5_vl", weights.path, "give Qwen-Image's text encoder")
        return Qwen2_5_VLConfig.from_dict(known)
    names = set(map(vl_name, weights.names))
    in_gguf = weights.metadata.get("general.architecture") == "qwen2vl"  # which has the vision tower elsewhere
    whole = in_gguf or "visual.patch_embed.proj.weight" in names
    if "language_model.layers.0.self_attn.q_proj.bias" not in names or not whole:
        raise UserError(
            f"{weights.path}: not Qwen2.5-VL (no model.layers.0.self_attn.q_proj.bias or visual.patch_embed); give "
            "qwen_2.5_vl_7b.safetensors as text_encoder"
        )
    text, tower = vl_sizes(weights, "gate_proj", _HEAD_DIM)
    if tower:
        every = max(1, tower["depth"] // 4)  # of the 7B's 32 blocks 7, 15, 23 and 31 see the whole image
        tower |= {
            "num_heads": tower["hidden_size"] // _VISION_HEAD_DIM,
            "fullatt_block_indexes": list(range(every - 1, tower["depth"], every)),
            "tokens_per_second": 2,
        }
    return _whole(text, tower)


def _whole(text: dict[str, int], tower: dict[str, Any]) -> Qwen2_5_VLConfig:
    """Return a configuration of such sizes; what no tensor shows is Qwen2.5-VL-7B's."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": _MROPE}
    fixed: dict[str, Any] = {"max_position_embeddings": 128000, "rms_norm_eps": 1e-6, "rope_parameters": rope}
    fixed |= {"bos_token_id": None, "eos_token_id": None}
    return Qwen2_5_VLConfig(text_config=text | fixed, vision_config=tower)
