"""Z-Image's linear layers: ComfyUI's names, which stack q, k and v, and the diffusers modules of the same weights.

ComfyUI knows the stacked names below ``lora_unet_``, diffusers' own below ``diffusion_model.`` and ``transformer.``;
diffusers splits a stacked ``qkv`` below ``lora_unet_`` only. So of the three layouts kohya's has the stacked names.
"""

from __future__ import annotations

from networks.key_map import KeyMap, KeyRow

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
