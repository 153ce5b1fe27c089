"""The model families, a row each: what a configuration must know of them, without importing a model.

The schema's choices of ``model_type``, the rules about the keys of the section ``model``, what error messages say of
them and what kohya's trainers call them follow from these rows; ``library.models`` imports a family by its path.
A new family is a row here and a folder there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Blank = Literal["grey", "black", "white", "noise"]  # what the region to fill is blanked with before it is encoded
BLANKS: tuple[Blank, ...] = get_args(Blank)


@dataclass(frozen=True)
class ModelType:
    """One value of ``model_type``.

    Attributes:
        family: where its class is, "module:name"; empty for language models, which are known by their files.
        title: what people call the architecture.
        files: keys that say where the parts of a model lie whose transformer is a single file.
        tokenizers: keys of tokenizers -> the folder that has each in a diffusers pipeline.
        settings: other keys of the section ``model`` that not every family takes.
        takes_guidance: whether the transformer takes a guidance scale.
        swappable_blocks: how many blocks can lie in host memory at most.
        texts_differ_in_length: whether a batch's texts keep their lengths; then its parts differ in shape.
        kohya_module: the ``network_module`` that trains it in ``kohya_tool``, if any does; several variants of an
            architecture share one, the first row is what it stands for.
    """

    family: str
    title: str
    files: tuple[str, ...] = ()
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    takes_guidance: bool = False
    swappable_blocks: int = 0
    texts_differ_in_length: bool = False
    kohya_module: str = ""
    kohya_tool: str = ""

    @property
    def is_language_model(self) -> bool:
        """Whether it is trained on conversations instead of images."""
        return not self.family

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys of the section ``model`` that it takes beside those that every family has."""
        return (*self.files, *self.tokenizers, *self.settings)


def _flux(name: str) -> ModelType:
    return ModelType(
        family=f"library.models.flux.spec:{name}",
        title="FLUX.1",
        files=("ae", "clip_l", "t5xxl"),
        tokenizers={"clip_l_tokenizer": "tokenizer", "t5xxl_tokenizer": "tokenizer_2"},
        settings=("t5xxl_max_token_length",),
        takes_guidance=True,
        swappable_blocks=35,
        kohya_module="networks.lora_flux",
        kohya_tool="sd-scripts",
    )


def _flux2(name: str, tokenizer: str, guidance: bool, swappable: int) -> ModelType:
    return ModelType(
        family=f"library.models.flux2.spec:{name}",
        title="FLUX.2",
        files=("vae", "text_encoder"),
        tokenizers={tokenizer: "tokenizer"},
        takes_guidance=guidance,
        swappable_blocks=swappable,
        kohya_module="networks.lora_flux_2",
        kohya_tool="musubi-tuner",
    )


def _qwen_image_21(name: str) -> ModelType:
    return ModelType(
        family=f"library.models.qwen_image_21.spec:{name}",
        title="Qwen-Image-2.1",
        files=("vae", "text_encoder"),
        tokenizers={"qwen_tokenizer": "processor"},
        swappable_blocks=30,
    )


def _qwen_image(name: str, *settings: str) -> ModelType:
    return ModelType(
        family=f"library.models.qwen_image.spec:{name}",
        title="Qwen-Image",
        files=("vae", "text_encoder"),
        tokenizers={"qwen_tokenizer": "tokenizer"},
        settings=settings,
        swappable_blocks=58,
        kohya_module="networks.lora_qwen_image",
        kohya_tool="musubi-tuner",
    )


def _flux3(name: str, swappable_blocks: int) -> ModelType:
    return ModelType(
        family=f"library.models.flux3.spec:{name}",
        title="FLUX.3",
        files=("vae", "text_encoder"),
        tokenizers={"qwen_tokenizer": "tokenizer"},
        swappable_blocks=swappable_blocks,
        texts_differ_in_length=True,
    )


MODEL_TYPES: Mapping[str, ModelType] = {
    "flux": _flux("FluxFamily"),
    "flux_fill": _flux("FluxFillFamily"),
    "flux_kontext": _flux("FluxKontextFamily"),
    "flux3_klein": _flux3("Flux3KleinFamily", 36),
    "flux3_klein_edit": _flux3("Flux3KleinEditFamily", 41),
    "qwen_image": _qwen_image("QwenImageFamily"),
    "qwen_image_edit": _qwen_image("QwenImageEditFamily"),
    "qwen_image_edit_plus": _qwen_image("QwenImageEditPlusFamily", "zero_cond_t"),
    "qwen_image_21": _qwen_image_21("QwenImage21Family"),
    "qwen_image_21_edit": _qwen_image_21("QwenImage21EditFamily"),
    "z_image": ModelType(
        family="library.models.z_image.spec:ZImageFamily",
        title="Z-Image",
        files=("vae", "text_encoder"),
        tokenizers={"qwen_tokenizer": "tokenizer"},
        swappable_blocks=28,
        texts_differ_in_length=True,
        kohya_module="networks.lora_zimage",
        kohya_tool="musubi-tuner",
    ),
    "flux2_klein": _flux2("KleinFamily", "qwen_tokenizer", False, 12),
    "flux2_klein_edit": _flux2("KleinEditFamily", "qwen_tokenizer", False, 12),
    "flux2_dev": _flux2("DevFamily", "mistral_tokenizer", True, 29),
    "flux2_dev_edit": _flux2("DevEditFamily", "mistral_tokenizer", True, 29),
    "krea2": ModelType(
        family="library.models.krea2.spec:Krea2Family",
        title="Krea 2",
        files=("vae", "text_encoder"),
        tokenizers={"qwen_tokenizer": "tokenizer"},
        swappable_blocks=26,
        kohya_module="networks.lora_krea2",
        kohya_tool="musubi-tuner",
    ),
    "llama": ModelType(family="", title="Llama 2 to 3.2"),
    "gpt2": ModelType(family="", title="GPT-2"),
}
IMAGE_MODELS = tuple(name for name, row in MODEL_TYPES.items() if not row.is_language_model)
MODEL_FILE_KEYS = tuple(dict.fromkeys(key for row in MODEL_TYPES.values() for key in (*row.files, *row.tokenizers)))
LANGUAGE_MODELS = tuple(name for name, row in MODEL_TYPES.items() if row.is_language_model)


def kohya_model_type(network_module: str) -> str | None:
    """Return the ``model_type`` that a ``network_module`` of kohya's trainers stands for."""
    named = (name for name, row in MODEL_TYPES.items() if row.kohya_module and row.kohya_module == network_module)
    return next(named, None)
