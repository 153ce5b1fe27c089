"""What a file's tensor names say about the model: its architecture, and the norms that leave no trace in the file.

Weights do not say which class computes with them. A one-dimensional weight with a bias may be a LayerNorm or a
GroupNorm; and most norms of a diffusion transformer have no weights at all (``elementwise_affine=False``: scale and
shift come from the modulation), so no tensor shows them. A row of :data:`ARCHITECTURES` adds that knowledge. The rows
are checked against the modules of diffusers' and transformers' classes in ``tests/models/test_inspection.py``; BFL's
names follow https://github.com/black-forest-labs/flux/blob/main/src/flux/modules/layers.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class WeightlessNorms:
    """Norms without weights.

    Attributes:
        owner: regular expression of the tensor that is there once for each module that has these norms.
        names: the norms' names, with ``\\1`` for the owner's block.
        kind: their class.
    """

    owner: str
    names: tuple[str, ...]
    kind: str = "LayerNorm"


@dataclass(frozen=True)
class Architecture:
    """One naming of one architecture.

    Attributes:
        name: for people.
        marks: regular expressions; each must match a whole tensor name.
        with_bias: what a norm with weight and bias is.
        without_bias: what a norm with a weight alone is.
        weightless: norms that no tensor shows.
        facts: label -> (tensor, axis): a size worth telling; axis None tells whether the tensor is there.
    """

    name: str
    marks: tuple[str, ...]
    with_bias: str = "LayerNorm"
    without_bias: str = "RMSNorm"
    weightless: tuple[WeightlessNorms, ...] = ()
    facts: tuple[tuple[str, str, int | None], ...] = ()

    def weightless_norms(self, names: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield (name, kind) of every norm that is in the model but not in its tensors ``names``."""
        for row in self.weightless:
            for name in names:
                if match := re.fullmatch(row.owner, name):
                    for norm in row.names:
                        yield match.expand(norm), row.kind


def _norms(owner: str, *names: str) -> WeightlessNorms:
    return WeightlessNorms(owner, names)


_AE_FACTS = (("latent channels", r"decoder.conv_in.weight", 1),)
ARCHITECTURES = (
    Architecture(
        "FLUX.1 transformer (diffusers' names)",
        (r"single_transformer_blocks\.0\.attn\.to_q\.weight", r"transformer_blocks\.0\.norm1_context\.linear\.weight"),
        weightless=(
            _norms(
                r"transformer_blocks\.(\d+)\.norm1\.linear\.weight",
                r"transformer_blocks.\1.norm1.norm",
                r"transformer_blocks.\1.norm2",
            ),
            _norms(
                r"transformer_blocks\.(\d+)\.norm1_context\.linear\.weight",
                r"transformer_blocks.\1.norm1_context.norm",
                r"transformer_blocks.\1.norm2_context",
            ),
            _norms(
                r"single_transformer_blocks\.(\d+)\.norm\.linear\.weight", r"single_transformer_blocks.\1.norm.norm"
            ),
            _norms(r"norm_out\.linear\.weight", "norm_out.norm"),
        ),
        facts=(
            ("width", "x_embedder.weight", 0),
            ("guidance", "time_text_embed.guidance_embedder.linear_1.weight", None),
        ),
    ),
    Architecture(
        "FLUX.1 transformer (Black Forest Labs' names)",
        (r"double_blocks\.0\.img_attn\.qkv\.weight", r"double_blocks\.0\.img_mod\.lin\.weight"),
        weightless=(
            _norms(
                r"double_blocks\.(\d+)\.img_mod\.lin\.weight",
                *(rf"double_blocks.\1.{stream}_norm{n}" for stream in ("img", "txt") for n in (1, 2)),
            ),
            _norms(r"single_blocks\.(\d+)\.modulation\.lin\.weight", r"single_blocks.\1.pre_norm"),
            _norms(r"final_layer\.linear\.weight", "final_layer.norm_final"),
        ),
        facts=(("width", "img_in.weight", 0), ("guidance", "guidance_in.in_layer.weight", None)),
    ),
    Architecture(
        "Qwen-Image transformer",
        (r"transformer_blocks\.0\.img_mod\.1\.weight", r"txt_norm\.weight"),
        weightless=(
            *(
                _norms(
                    rf"transformer_blocks\.(\d+)\.{stream}_mod\.1\.weight",
                    rf"transformer_blocks.\1.{stream}_norm1",
                    rf"transformer_blocks.\1.{stream}_norm2",
                )
                for stream in ("img", "txt")
            ),
            _norms(r"norm_out\.linear\.weight", "norm_out.norm"),
        ),
        facts=(("width", "img_in.weight", 0),),
    ),
    Architecture(
        "Z-Image transformer",
        (r"cap_pad_token", r"layers\.0\.adaLN_modulation\.0\.weight"),
        weightless=(_norms(r"(final_layer|all_final_layer\.2-1)\.linear\.weight", r"\1.norm_final"),),
        facts=(("width", "cap_embedder.1.weight", 0),),
    ),
    Architecture(
        "image autoencoder, AutoencoderKL (diffusers' names)",
        (r"encoder\.down_blocks\.0\.resnets\.0\.norm1\.weight",),
        with_bias="GroupNorm",
        facts=_AE_FACTS,
    ),
    Architecture(
        "image autoencoder, AutoencoderKL (Black Forest Labs' names)",
        (r"encoder\.down\.0\.block\.0\.norm1\.weight",),
        with_bias="GroupNorm",
        facts=_AE_FACTS,
    ),
    Architecture(
        "Qwen-Image autoencoder (diffusers' names)",
        (r"encoder\.down_blocks\.0\.norm1\.gamma",),
        facts=_AE_FACTS,
    ),
    Architecture(
        "Qwen-Image autoencoder (Wan's names)",
        (r"encoder\.downsamples\.0\.residual\.0\.gamma",),
        facts=(("latent channels", "decoder.conv1.weight", 1),),
    ),
    Architecture(
        "CLIP text encoder",
        (
            r"(text_model\.)?encoder\.layers\.0\.layer_norm1\.weight",
            r"(text_model\.)?embeddings\.token_embedding\.weight",
        ),
    ),
    Architecture(
        "T5 encoder",
        (r"encoder\.block\.0\.layer\.0\.SelfAttention\.q\.weight",),
        facts=(("width", "shared.weight", 1), ("vocabulary", "shared.weight", 0)),
    ),
    Architecture(
        "Qwen2.5-VL text encoder",
        (r"(model\.)?visual\.blocks\.0\.attn\.qkv\.weight", r"(.*\.)?layers\.0\.self_attn\.q_proj\.weight"),
    ),
    Architecture("Llama-style language model", (r"(model\.)?layers\.0\.input_layernorm\.weight",)),
    Architecture(
        "GPT-2 language model",
        (r"(transformer\.)?h\.0\.ln_1\.weight",),
        without_bias="LayerNorm",
    ),
)
UNKNOWN = Architecture("unknown architecture", (), with_bias="LayerNorm or GroupNorm")


def recognise(names: Collection[str]) -> Architecture:
    """Return the first architecture all of whose marks are among the tensor ``names``, else :data:`UNKNOWN`."""
    for row in ARCHITECTURES:
        if all(any(re.fullmatch(mark, name) for name in names) for mark in row.marks):
            return row
    return UNKNOWN
