"""FLUX.1's linear layers: Black Forest Labs' names and the diffusers modules that hold the same weights.

Source: diffusers' ``convert_flux_transformer_checkpoint_to_diffusers`` and BFL's reference implementation.
diffusers splits the fused ``qkv`` (rows q, k, v) and the single blocks' ``linear1`` (rows q, k, v, MLP),
and reads the last modulation as (scale, shift) where BFL writes (shift, scale).
"""

from __future__ import annotations

from networks.key_map import KeyMap, KeyRow


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
