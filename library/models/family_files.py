"""How the models of a family are kept: the row that stands in each family's ``files.py``, and what tables share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from library.config.model_types import MODEL_TYPES
from library.models.layer_names import KeyNames, count_blocks, original_key_map
from library.models.weights import KeyMap
from library.precision.checkpoint import WeightFiles

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Part:
    """A part of a model beside its transformer.

    Attributes:
        option: the key of ``[model]`` that names it. folder: where a diffusers folder has it. published: the file that
        the option is to name; of a tokenizer its name on the hub, if the option has no default.
    """

    option: str
    folder: str
    published: str = ""


@dataclass(frozen=True)
class FamilyFiles:
    """How the models of a family are kept.

    Attributes:
        model_type: the family's first; its rows in ``library.models.inspection`` name it too.
        arguments: from the shapes of a file, under diffusers' names, to the arguments of that class.
        keys, norms: names of a file that are not diffusers' (``library.models.layer_names``).
        vae, text_encoders, tokenizers: the other parts.
        unused: regular expressions of a file's tensors that no parameter takes.
        variants: tensor -> a variant that has it and is not supported.
    """

    model_type: str
    arguments: Callable[[Shapes], dict[str, Any]]
    keys: KeyNames
    vae: Part
    text_encoders: tuple[Part, ...]
    tokenizers: tuple[Part, ...]
    norms: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    variants: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Return what people call the architecture."""
        return MODEL_TYPES[self.model_type].title

    @property
    def transformer(self) -> str:
        """Return diffusers' class."""
        return MODEL_TYPES[self.model_type].transformer

    def key_map(self, weights: WeightFiles, prefix: str) -> KeyMap:
        """Return where each parameter of the transformer lies in ``weights``, whatever the layout of their names."""
        found = original_key_map(weights, prefix, self.keys, self.norms)
        return {name: pieces for name, pieces in found.items() if not any(re.fullmatch(u, name) for u in self.unused)}


def block_sizes(shapes: Shapes, inputs: str, norm: str, **stacks: str) -> dict[str, Any]:
    """Return the arguments of a transformer that its first layer and its blocks show: channels, heads, blocks.

    Args:
        shapes: of a file.
        inputs: the layer that latents go into.
        norm: that of a head's queries.
        stacks: argument -> what stands before the index of the blocks that it counts.
    """
    width, in_channels = shapes[f"{inputs}.weight"]
    (head_dim,) = shapes[f"{norm}.weight"]
    blocks = {argument: count_blocks(shapes, f"{stack}.") for argument, stack in stacks.items()}
    heads = {"attention_head_dim": head_dim, "num_attention_heads": width // head_dim}
    return {"in_channels": in_channels, **blocks, **heads}


def rope_axes(head_dim: int) -> tuple[int, int, int]:
    """Return how a head is shared among index, row and column: (16, 56, 56) for 128.

    No tensor shows the split. An eighth for the index is FLUX.1's and Qwen-Image's; for narrower heads, which only
    small test models have, at least 8, so 32 gives (8, 12, 12).
    """
    first = max(8, head_dim // 8)
    return (first, (head_dim - first) // 2, (head_dim - first) // 2)
