"""The model families, a row each: what a configuration must know of them, without importing a model.

The rows are read from model_types.toml. The schema's choices of ``model_type``, the rules about the keys of the section
``model``, what error messages say of them and what kohya's trainers call them follow from these rows;
``library.models`` imports a family by its path. A new family is a row there and a folder in ``library/models``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from library.files import read_toml

Blank = Literal["grey", "black", "white", "noise"]  # what the region to fill is blanked with before it is encoded
ConditionKind = Literal["none", "fill", "references"]
BLANKS: tuple[Blank, ...] = get_args(Blank)
Tool = Literal["sd-scripts", "musubi-tuner"]  # kohya's projects


@dataclass(frozen=True)
class ModelType:
    """One value of ``model_type``.

    Attributes:
        title: what people call the architecture.
        family: where its class is, "module:name"; empty for language models, which are known by their files.
        transformer, pipeline: diffusers' classes. words: in a file's name they tell this variant from others.
        files: keys that say where the parts of a model lie whose transformer is a single file.
        tokenizers: keys of tokenizers -> the folder that has each in a diffusers pipeline.
        settings: other keys of the section ``model`` that not every family takes.
        conditioning: what a sample must bring besides its caption.
        pixel_multiple: sides of images are multiples of it in the published models.
        takes_guidance: whether the transformer takes a guidance scale.
        swappable_blocks: how many blocks can lie in host memory at most.
        texts_differ_in_length: whether a batch's texts keep their lengths; then its parts differ in shape.
        kohya_tool: the project of kohya's that trains it, if any does.
        kohya_script: the trainer there, which the variants of an architecture share.
        kohya_module: its ``network_module``; the first row of a tool that has it is what it stands for.
    """

    title: str
    family: str = ""
    transformer: str = ""
    pipeline: str = ""
    words: tuple[str, ...] = ()
    files: tuple[str, ...] = ("vae", "text_encoder")
    tokenizers: Mapping[str, str] = field(default_factory=lambda: {"qwen_tokenizer": "tokenizer"})
    settings: tuple[str, ...] = ()
    conditioning: ConditionKind = "none"
    pixel_multiple: int = 16
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


def _rows(tables: dict[str, Any]) -> Iterator[tuple[str, ModelType]]:
    for name, table in tables.items():
        if like := table.pop("like", None):  # an earlier one
            table = tables[name] = tables[like] | table
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
        }
        yield name, ModelType(**values)


MODEL_TYPES: Mapping[str, ModelType] = dict(_rows(read_toml(Path(__file__).with_name("model_types.toml"))[0]))
IMAGE_MODELS = tuple(name for name, row in MODEL_TYPES.items() if not row.is_language_model)
MODEL_FILE_KEYS = tuple(dict.fromkeys(key for row in MODEL_TYPES.values() for key in (*row.files, *row.tokenizers)))
PATHS = {  # options and keys of datasets that name files or folders
    *("pretrained_model_name_or_path", *MODEL_FILE_KEYS, "network_weights", "base_weights", "tokenizer", "init_from"),
    *(
        "dataset_config",
        "cache_directory",
        "train_data",
        "validation_data",
        "data_dir",
        "sample_prompts",
        "chat_template",
    ),
    *("resume", "output_dir", "logging_dir", "save_fallback_dir", "sample_model"),
    *("distill_from", "distill_lora", "distill_cache", "preserve_prompts", "general_prompts"),
    *("image_dir", "metadata_file", "conditioning_data_dir", "control_directory", "inpaint_mask_directory"),
    *("paired_directory", "slider_prompts"),
}
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
