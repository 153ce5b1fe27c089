"""Mistral's language models as text encoders: loaded as far as their layers are read, as Qwen3 is (``qwen3.py``).

The file is a transformers folder, also of a model that sees images, or one of ComfyUI's, whose configuration follows
from its shapes; of both the language model alone is read. Mistral Small 3 and Ministral 3 have the same names and a
head of the same width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from library.errors import UserError
from library.models.family import Family
from library.models.qwen3 import load_layers, prefix_of, sizes, sizes_of, without_norm
from library.models.text import LanguageModelEncoder, byte_tokenizer, load_tokenizer
from library.models.weights import read_config
from library.precision.checkpoint import WeightFiles
from library.precision.recipe import Recipe

HEAD_DIM = 128


@dataclass(frozen=True)
class MistralKind:
    """A kind of Mistral's language models, as a text encoder.

    Attributes:
        title: what people call it. owner: the model whose text encoder it is. file: that it is published as.
        model, config: transformers' classes; ``fixed``: arguments of ``config`` that no tensor shows.
        sizes: as published, as :func:`library.models.qwen3.sizes` takes them, of the layers that are read.
        specials: tokens of its tokenizer; the first one others' have not.
    """

    title: str
    owner: str
    file: str
    model: Any
    config: Any
    fixed: Mapping[str, Any]
    sizes: tuple[int, ...]
    specials: tuple[str, ...]

    def tokenizer(self, folder_or_name: str | Path) -> PreTrainedTokenizerBase:
        """Load the tokenizer from a folder or the hub."""
        load = PreTrainedTokenizerFast.from_pretrained
        return load_tokenizer(load, folder_or_name, "mistral_tokenizer", self.specials[0], self.title)

    def published(self) -> dict[str, Callable[[], Any]]:
        """Return what builds the layers that are read, and a tokenizer of single bytes, by folder."""
        config = self.config(**self.fixed, **sizes(*self.sizes))
        return {
            "text_encoder": lambda: without_norm(self.model(config)),
            "tokenizer": lambda: byte_tokenizer("<pad>", "<s>", *self.specials),
        }

    def width(self, path: Path) -> int:
        """Return the width of the vectors that the model in ``path`` gives; reads headers only."""
        return self._describe(WeightFiles(path))[1].hidden_size

    def load(
        self, path: Path, layers: int, dtype: torch.dtype, device: torch.device | str, recipe: Recipe | None
    ) -> Any:
        """Load the first ``layers``.

        Args:
            path: a transformers folder or a file.
            layers: how many; negative: all but so many.
            dtype, device: of the weights.
            recipe: how linear weights become fp8; None leaves them as the file has them.
        """
        weights = WeightFiles(path)
        prefix, config = self._describe(weights)
        kept = layers if layers >= 0 else config.num_hidden_layers + layers
        return load_layers(self.model, weights, prefix, config, kept, dtype, device, recipe)

    def _describe(self, weights: WeightFiles) -> tuple[str, Any]:
        """Return what stands before the language model's names, and the configuration of all its layers."""
        prefix = prefix_of(weights)
        if weights.path.is_dir():
            known = read_config(weights.path)
            text = known.get("text_config", known)
            if text.get("model_type") != self.config.model_type:
                raise UserError(
                    f"{weights.path / 'config.json'}: {text.get('model_type')!r}, not {self.config.model_type}; give "
                    f"{self.owner}'s text encoder"
                )
            return prefix, self.config.from_dict(text)
        if "general.architecture" in weights.metadata:  # there the rows of q and k are in another order
            raise UserError(f"{weights.path}: {self.title} is not read from GGUF; give {self.file} as text_encoder")
        first = f"{prefix}layers.0"
        if f"{first}.self_attn.q_norm.weight" in weights or f"{first}.mlp.gate_proj.weight" not in weights:
            raise UserError(
                f"{weights.path}: not {self.title} (no {first}.mlp.gate_proj, or norms of queries); give {self.file} "
                "as text_encoder"
            )
        return prefix, self.config(**self.fixed, **sizes_of(weights.shape, weights.names, prefix, HEAD_DIM))


class MistralFamily(Family):
    """A family whose captions are read by one of Mistral's language models.

    Attributes:
        mistral: which one.
        text_encoder: what puts captions to it and keeps of its vectors what the transformer is given.
        text_layers: how many layers are loaded; negative: all but so many.
        text_settings: what its vectors depend on, for the names of cached ones.
        text_argument: of the transformer, how wide they are.
    """

    mistral: MistralKind
    text_encoder: type[LanguageModelEncoder]
    text_layers: int
    text_settings: tuple[object, ...]
    text_argument: str

    @classmethod
    def published_texts(cls) -> dict[str, Callable[[], Any]]:
        """Return the layers that are read."""
        return cls.mistral.published()

    def check_text_encoders(self) -> None:
        """Compare the width of the vectors with what the transformer takes."""
        width = self.mistral.width(self.files.text_encoders[0])
        self.check_text_width(width, self.text_argument, self.mistral.title, len(self.text_encoder.layers) or 1)

    def load_text_encoder(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", *, recipe: Recipe | None = None
    ) -> LanguageModelEncoder:
        """Return the text encoder; its tokenizer is loaded now."""
        (path,), (folder,) = self.files.text_encoders, self.files.tokenizers
        fingerprint = self.text_fingerprint(dtype, recipe, *self.text_settings)
        load = partial(self.mistral.load, path, self.text_layers, dtype, device, recipe)
        return self.text_encoder(load, self.mistral.tokenizer(folder), fingerprint)
