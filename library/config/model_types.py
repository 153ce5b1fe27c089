"""The model families, a row each: what a configuration must know of them, without importing a model.

The schema's choices of ``model_type``, the rules about the keys of the section ``model``, what error messages say of
them and what kohya's trainers call them follow from these rows; ``library.models`` imports a family by its path.
A new family is a row here and a folder there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Blank = Literal["grey", "black", "white", "noise"]  # what the region to fill is blanked with before it is encoded
BLANKS: tuple[Blank, ...] = get_args(Blank)
Tool = Literal["sd-scripts", "musubi-tuner"]  # kohya's projects


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
        kohya_tool: the project of kohya's that trains it, if any does.
        kohya_script: the trainer there, which the variants of an architecture share.
        kohya_module: its ``network_module``; the first row of a tool that has it is what it stands for.
    """

    family: str
    title: str
    files: tuple[str, ...] = ("vae", "text_encoder")
    tokenizers: Mapping[str, str] = field(default_factory=lambda: {"qwen_tokenizer": "tokenizer"})
    settings: tuple[str, ...] = ()
    takes_guidance: bool = False
    swappable_blocks: int = 0
    texts_differ_in_length: bool = False
    kohya_tool: Tool = "musubi-tuner"
    kohya_script: str = ""
    kohya_module: str = ""

    @property
    def is_language_model(self) -> bool:
        """Whether it is trained on conversations instead of images."""
        return not self.family

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys of the section ``model`` that it takes beside those that every family has."""
        return (*self.files, *self.tokenizers, *self.settings)


def _flux(name: str, tool: Tool = "sd-scripts", script: str = "flux_train_network.py") -> ModelType:
    return ModelType(
        f"library.models.flux.spec:{name}",
        "FLUX.1",
        files=("ae", "clip_l", "t5xxl"),
        tokenizers={"clip_l_tokenizer": "tokenizer", "t5xxl_tokenizer": "tokenizer_2"},
        settings=("t5xxl_max_token_length",),
        takes_guidance=True,
        swappable_blocks=35,
        kohya_tool=tool,
        kohya_script=script,
        kohya_module="networks.lora_flux",
    )


def _flux2(name: str, **of_dev: Any) -> ModelType:
    return ModelType(
        f"library.models.flux2.spec:{name}",
        "FLUX.2",
        **({"swappable_blocks": 12} | of_dev),
        kohya_script="flux_2_train_network.py",
        kohya_module="networks.lora_flux_2",
    )


def _flux2_dev(name: str) -> ModelType:
    tokenizers = {"mistral_tokenizer": "tokenizer"}
    return _flux2(name, tokenizers=tokenizers, takes_guidance=True, swappable_blocks=29)


def _flux3(name: str, swappable_blocks: int) -> ModelType:
    return ModelType(
        f"library.models.flux3.spec:{name}",
        "FLUX.3",
        swappable_blocks=swappable_blocks,
        texts_differ_in_length=True,
    )


def _qwen_image(name: str, *settings: str) -> ModelType:
    return ModelType(
        f"library.models.qwen_image.spec:{name}",
        "Qwen-Image",
        settings=settings,
        swappable_blocks=58,
        kohya_script="qwen_image_train_network.py",
        kohya_module="networks.lora_qwen_image",
    )


def _qwen_image_21(name: str) -> ModelType:
    return ModelType(
        f"library.models.qwen_image_21.spec:{name}",
        "Qwen-Image-2.1",
        tokenizers={"qwen_tokenizer": "processor"},
        swappable_blocks=30,
        kohya_script="qwen_image_21_train_network.py",
        kohya_module="networks.lora_qwen_image_21",
    )


def _language_model(title: str) -> ModelType:
    return ModelType("", title, files=(), tokenizers={})


MODEL_TYPES: Mapping[str, ModelType] = {
    "flux": _flux("FluxFamily"),
    "flux_fill": _flux("FluxFillFamily"),
    "flux_kontext": _flux("FluxKontextFamily", "musubi-tuner", "flux_kontext_train_network.py"),
    "flux2_klein": _flux2("KleinFamily"),
    "flux2_klein_edit": _flux2("KleinEditFamily"),
    "flux2_dev": _flux2_dev("DevFamily"),
    "flux2_dev_edit": _flux2_dev("DevEditFamily"),
    "flux3_klein": _flux3("Flux3KleinFamily", 36),
    "flux3_klein_edit": _flux3("Flux3KleinEditFamily", 41),
    "qwen_image": _qwen_image("QwenImageFamily"),
    "qwen_image_edit": _qwen_image("QwenImageEditFamily"),
    "qwen_image_edit_plus": _qwen_image("QwenImageEditPlusFamily", "zero_cond_t"),
    "qwen_image_21": _qwen_image_21("QwenImage21Family"),
    "qwen_image_21_edit": _qwen_image_21("QwenImage21EditFamily"),
    "z_image": ModelType(
        "library.models.z_image.spec:ZImageFamily",
        "Z-Image",
        swappable_blocks=28,
        texts_differ_in_length=True,
        kohya_script="zimage_train_network.py",
        kohya_module="networks.lora_zimage",
    ),
    "krea2": ModelType(
        "library.models.krea2.spec:Krea2Family",
        "Krea 2",
        swappable_blocks=26,
        kohya_script="krea2_train_network.py",
        kohya_module="networks.lora_krea2",
    ),
    "llama": _language_model("Llama 2 to 3.2"),
    "gpt2": _language_model("GPT-2"),
}
IMAGE_MODELS = tuple(name for name, row in MODEL_TYPES.items() if not row.is_language_model)
MODEL_FILE_KEYS = tuple(dict.fromkeys(key for row in MODEL_TYPES.values() for key in (*row.files, *row.tokenizers)))
# transformers' model_type of the language models that are read, GPT-2 and what differs from Llama by a line
LANGUAGE_MODEL_KINDS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3")
LANGUAGE_MODELS = tuple(name for name, row in MODEL_TYPES.items() if row.is_language_model)


def kohya_model_type(network_module: str, tool: Tool | None = None) -> str | None:
    """Return the ``model_type`` that a ``network_module`` stands for in ``tool``; None: in the first that has it."""
    for name, row in MODEL_TYPES.items():
        if row.kohya_module == network_module and tool in (None, row.kohya_tool):
            return name
    return None


def kohya_trainers() -> dict[str, Tool]:
    """Return script -> project of every trainer of kohya's whose models are families here."""
    return {row.kohya_script: row.kohya_tool for row in MODEL_TYPES.values() if row.kohya_script}
