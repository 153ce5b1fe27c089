"""One model, two namings: a table of modules in diffusers' names against the original checkpoint's.

A row pairs an original module (``double_blocks.{i}.img_attn.qkv``) with the diffusers modules stacked in it
(``to_q``, ``to_k``, ``to_v``), ``{i}`` being the block's index. Stacking is by output rows, counted in
multiples of the module's input columns: (1, 1, 1) for q, k, v. ``halves_swapped`` marks modulations whose
two halves (shift, scale) come in the other order.

File formats write names with dots or, like kohya, with underscores; both are found by :meth:`KeyMap.find`.

FLUX.1's linear layers: Black Forest Labs' names and the diffusers modules that hold the same weights.

Source: diffusers' ``convert_flux_transformer_checkpoint_to_diffusers`` and BFL's reference implementation.
diffusers splits the fused ``qkv`` (rows q, k, v) and the single blocks' ``linear1`` (rows q, k, v, MLP),
and reads the last modulation as (scale, shift) where BFL writes (shift, scale).

Qwen-Image's linear layers.

The original checkpoint has diffusers' own names, so the layouts of LoRA files differ by prefix and separator only:
``transformer.transformer_blocks.0.attn.to_q``, ``diffusion_model.transformer_blocks.0.attn.to_q``,
``lora_unet_transformer_blocks_0_attn_to_q``; Lightning's files have no prefix. All of them load in diffusers and in
ComfyUI.

Z-Image's linear layers: ComfyUI's names, which stack q, k and v, and the diffusers modules of the same weights.

ComfyUI knows the stacked names below ``lora_unet_``, diffusers' own below ``diffusion_model.`` and ``transformer.``;
diffusers splits a stacked ``qkv`` below ``lora_unet_`` only. So of the three layouts kohya's has the stacked names.

Language models' linear layers: this repository's module names and those of transformers, which PEFT's files have.

A ``TransformerLM`` is trained with its joined matrices taken apart (``library.models.llm.model``), so that every
layer here is one of transformers' own. GPT-2 joins q, k and v there too, as ``c_attn``.

The text encoders' linear layers, in transformers' names and in those of LoRA files.

CLIP's layers lay below ``text_model`` until transformers 5; every published file has that in its keys. T5 has one
naming. Both follow sd-scripts in what is trained: the linear layers of attention and feed-forward.

What files put before a module's name, by layout (the first is written, all are read):

    diffusers   text_encoder.text_model.encoder.layers.0.mlp.fc1, text_encoder_2.encoder.block.0...
    kohya       lora_te1_text_model_encoder_layers_0_mlp_fc1, lora_te3_encoder_block_0_...; lora_te2_ is OneTrainer's T5
    comfy       the same as kohya: ComfyUI (``model_lora_keys_clip``) and diffusers read these in every version, but
                its own text_encoders.clip_l.transformer.... only newer ComfyUI does, and diffusers raises on it

diffusers knows CLIP's keys only and passes over T5's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeyRow:
    """One original module and the diffusers modules stacked in it: templates with ``{i}`` for the block.

    Attributes:
        original: the original module's name. parts: the diffusers modules, in the order of their rows.
        rows: each part's output rows as a multiple of the input columns; empty where there is one part.
        halves_swapped: the part's two row halves come in the other order.
        transposed: published files keep the weight as [in, out] (transformers' Conv1D).
    """

    original: str
    parts: tuple[str, ...]
    rows: tuple[int, ...] = ()
    halves_swapped: bool = False
    transposed: bool = False

    def part_rows(self, out_features: int, in_features: int) -> list[int]:
        """Return how many output rows of the original module belong to each part.

        Raises:
            ValueError: the parts do not add up to ``out_features``.
        """
        rows = [multiple * in_features for multiple in self.rows] or [out_features]
        if sum(rows) != out_features:
            raise ValueError(f"{out_features} output rows, {sum(rows)} expected for {in_features} input columns")
        return rows

    def swap(self, up: Tensor) -> Tensor:
        """Return ``up`` with its row halves exchanged if the row asks for it; twice is nothing."""
        return torch.cat(up.chunk(2)[::-1]) if self.halves_swapped else up


@dataclass(frozen=True)
class KeyPlace:
    """A name found in a :class:`KeyMap`: its row, its block, and the part (None: the original module)."""

    row: KeyRow
    block: str
    part: int | None

    @property
    def original(self) -> str:
        """Full name of the original module."""
        return self.row.original.replace("{i}", self.block)

    @property
    def modules(self) -> list[str]:
        """Full diffusers names of all parts of the original module."""
        return [part.replace("{i}", self.block) for part in self.row.parts]


@dataclass(frozen=True)
class KeyMap:
    """All linear layers of a family in both namings."""

    rows: tuple[KeyRow, ...]

    def find(self, name: str) -> KeyPlace | None:
        """Return the place of a module name in either naming, with dots or underscores, or None."""
        normal = name.replace(".", "_")
        for pattern, row, part in self._patterns:
            if match := pattern.fullmatch(normal):
                return KeyPlace(row, match[1] if pattern.groups else "", part)
        return None

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], KeyRow, int | None]]:
        renamed = [row for row in self.rows if row.original not in row.parts]  # the others' names say the part
        templates: list[tuple[str, KeyRow, int | None]] = [(row.original, row, None) for row in renamed]
        templates += [(part, row, index) for row in self.rows for index, part in enumerate(row.parts)]
        return [
            (re.compile(re.escape(t.replace(".", "_")).replace(r"\{i\}", r"(\d+)")), row, part)
            for t, row, part in templates
        ]


def _double(image: str, block: str) -> KeyRow:
    return KeyRow(f"double_blocks.{{i}}.{image}", (f"transformer_blocks.{{i}}.{block}",))


FLUX_KEYS = KeyMap(
    rows=(
        KeyRow(
            "double_blocks.{i}.img_attn.qkv",
            tuple(f"transformer_blocks.{{i}}.attn.{name}" for name in ("to_q", "to_k", "to_v")),
            rows=(1, 1, 1),
        ),
        KeyRow(
            "double_blocks.{i}.txt_attn.qkv",
            tuple(f"transformer_blocks.{{i}}.attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj")),
            rows=(1, 1, 1),
        ),
        _double("img_attn.proj", "attn.to_out.0"),
        _double("txt_attn.proj", "attn.to_add_out"),
        _double("img_mlp.0", "ff.net.0.proj"),
        _double("img_mlp.2", "ff.net.2"),
        _double("txt_mlp.0", "ff_context.net.0.proj"),
        _double("txt_mlp.2", "ff_context.net.2"),
        _double("img_mod.lin", "norm1.linear"),
        _double("txt_mod.lin", "norm1_context.linear"),
        KeyRow(
            "single_blocks.{i}.linear1",
            tuple(
                f"single_transformer_blocks.{{i}}.{name}"
                for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
            ),
            rows=(1, 1, 1, 4),
        ),
        KeyRow("single_blocks.{i}.linear2", ("single_transformer_blocks.{i}.proj_out",)),
        KeyRow("single_blocks.{i}.modulation.lin", ("single_transformer_blocks.{i}.norm.linear",)),
        KeyRow("img_in", ("x_embedder",)),
        KeyRow("txt_in", ("context_embedder",)),
        KeyRow("time_in.in_layer", ("time_text_embed.timestep_embedder.linear_1",)),
        KeyRow("time_in.out_layer", ("time_text_embed.timestep_embedder.linear_2",)),
        KeyRow("vector_in.in_layer", ("time_text_embed.text_embedder.linear_1",)),
        KeyRow("vector_in.out_layer", ("time_text_embed.text_embedder.linear_2",)),
        KeyRow("guidance_in.in_layer", ("time_text_embed.guidance_embedder.linear_1",)),
        KeyRow("guidance_in.out_layer", ("time_text_embed.guidance_embedder.linear_2",)),
        KeyRow("final_layer.linear", ("proj_out",)),
        KeyRow("final_layer.adaLN_modulation.1", ("norm_out.linear",), halves_swapped=True),
    )
)


_BLOCK = (
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"attn.{name}" for name in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
    *(f"{stream}_mlp.net.{layer}" for stream in ("img", "txt") for layer in ("0.proj", "2")),
    *(f"{stream}_mod.1" for stream in ("img", "txt")),
)
_TOP = (
    "img_in",
    "txt_in",
    *(f"time_text_embed.timestep_embedder.linear_{i}" for i in (1, 2)),
    "norm_out.linear",
    "proj_out",
)

QWEN_KEYS = KeyMap(tuple(KeyRow(n, (n,)) for n in (*(f"transformer_blocks.{{i}}.{layer}" for layer in _BLOCK), *_TOP)))


_STACKS = ("layers.{i}", "noise_refiner.{i}", "context_refiner.{i}")
_SAME = (*(f"feed_forward.w{i}" for i in (1, 2, 3)), "adaLN_modulation.0")


def _block(stack: str) -> tuple[KeyRow, ...]:
    attention = f"{stack}.attention"
    return (
        KeyRow(f"{attention}.qkv", tuple(f"{attention}.to_{x}" for x in "qkv"), rows=(1, 1, 1)),
        KeyRow(f"{attention}.out", (f"{attention}.to_out.0",)),
        *(KeyRow(f"{stack}.{layer}", (f"{stack}.{layer}",)) for layer in _SAME),
    )


Z_IMAGE_KEYS = KeyMap(
    rows=(
        *(row for stack in _STACKS for row in _block(stack)),
        *(KeyRow(name, (name,)) for name in ("cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2")),
        KeyRow("x_embedder", ("all_x_embedder.2-1",)),
        KeyRow("final_layer.linear", ("all_final_layer.2-1.linear",)),
        KeyRow("final_layer.adaLN_modulation.1", ("all_final_layer.2-1.adaLN_modulation.1",)),
    )
)


_LLAMA = {
    "attention.qkv.q_proj": "self_attn.q_proj",
    "attention.qkv.k_proj": "self_attn.k_proj",
    "attention.qkv.v_proj": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "feed_forward.gate_up.gate_proj": "mlp.gate_proj",
    "feed_forward.gate_up.up_proj": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
_GPT2 = {
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}

LLAMA_KEYS = KeyMap(
    tuple(KeyRow(f"blocks.{{i}}.{ours}", (f"model.layers.{{i}}.{theirs}",)) for ours, theirs in _LLAMA.items())
)
GPT2_KEYS = KeyMap(
    tuple(
        KeyRow(f"blocks.{{i}}.{ours}", (f"transformer.h.{{i}}.{theirs}",), transposed=True)
        for ours, theirs in _GPT2.items()
    )
)


_CLIP_LAYERS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.out_proj",
    "mlp.fc1",
    "mlp.fc2",
)
_T5_LAYERS = (
    *(f"layer.0.SelfAttention.{name}" for name in "qkvo"),
    *(f"layer.1.DenseReluDense.{name}" for name in ("wi_0", "wi_1", "wo")),
)

CLIP_KEYS = KeyMap(
    tuple(
        KeyRow(f"text_model.encoder.layers.{{i}}.{layer}", (f"encoder.layers.{{i}}.{layer}",)) for layer in _CLIP_LAYERS
    )
)
T5_KEYS = KeyMap(
    tuple(KeyRow(f"encoder.block.{{i}}.{layer}", (f"encoder.block.{{i}}.{layer}",)) for layer in _T5_LAYERS)
)

CLIP_PREFIXES = {
    "diffusers": ("text_encoder.",),
    "kohya": ("lora_te1_", "lora_te_"),
    "comfy": ("lora_te1_", "text_encoders.clip_l.transformer."),
}
T5_PREFIXES = {
    "diffusers": ("text_encoder_2.",),
    "kohya": ("lora_te3_", "lora_te2_"),
    "comfy": ("lora_te3_", "text_encoders.t5xxl.transformer."),
}
