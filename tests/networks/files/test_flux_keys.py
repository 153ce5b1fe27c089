"""The FLUX key map against diffusers' own conversion of a checkpoint in the original layout."""

from __future__ import annotations

import torch
from diffusers import FluxTransformer2DModel
from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers

from library.models.flux.files import FLUX_KEYS


def original_shapes() -> dict[str, tuple[int, int]]:
    """Original linear layers at FLUX.1's width: diffusers' converter splits linear1 at 3072."""
    wide = {"qkv": 9216, "linear1": 21504, "mlp.0": 12288}
    shapes = {}
    for row in FLUX_KEYS.rows:
        name = row.original.replace("{i}", "0")
        out = next((size for part, size in wide.items() if name.endswith(part)), 3072)
        shapes[name] = (out, 3072)
    return shapes


def test_every_row_of_every_original_layer_lands_where_diffusers_puts_it() -> None:
    checkpoint, start = {}, {}
    count = 0
    for name, (out, columns) in original_shapes().items():
        start[name] = count
        # one number per row instead of a matrix: which original row it is
        checkpoint[f"{name}.weight"] = torch.arange(count, count + out)
        checkpoint[f"{name}.bias"] = torch.zeros(out)
        count += out
        assert columns == 3072
    for norm in ("img_attn.norm", "txt_attn.norm"):
        checkpoint[f"double_blocks.0.{norm}.query_norm.scale"] = torch.zeros(1)
        checkpoint[f"double_blocks.0.{norm}.key_norm.scale"] = torch.zeros(1)
    checkpoint["single_blocks.0.norm.query_norm.scale"] = torch.zeros(1)
    checkpoint["single_blocks.0.norm.key_norm.scale"] = torch.zeros(1)
    converted = convert_flux_transformer_checkpoint_to_diffusers(checkpoint)
    seen = set()
    for name, shape in original_shapes().items():
        place = FLUX_KEYS.find(name)
        assert place is not None
        assert place.original == name
        top = start[name]
        for module, rows in zip(place.modules, place.row.part_rows(*shape), strict=True):
            expected = torch.arange(top, top + rows)
            assert torch.equal(converted[f"{module}.weight"], place.row.swap(expected)), module
            top += rows
            seen.add(f"{module}.weight")
        assert top == start[name] + shape[0]
    linears = {k for k in converted if k.endswith(".weight") and "attn.norm" not in k}
    assert seen == linears


def test_names_are_found_with_dots_and_underscores_in_both_namings() -> None:
    model = FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=1, joint_attention_dim=8,
        pooled_projection_dim=8, in_channels=4, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            for spelling in (name, name.replace(".", "_")):
                place = FLUX_KEYS.find(spelling)
                assert place is not None
                assert place.part is not None
                assert place.modules[place.part] == name
                assert FLUX_KEYS.find(place.original.replace(".", "_")) is not None
    for wrong in ("double_blocks.x.img_attn.qkv", "transformer_blocks.0.attn.norm_q", "single_blocks.0", ""):
        assert FLUX_KEYS.find(wrong) is None
