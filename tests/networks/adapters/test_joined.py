"""One LoRA on layers that are one in the original checkpoint (split_qkv=False), against sd-scripts' arithmetic.

sd-scripts ``networks/lora_flux.py`` wraps the original layer: ``org_forward(x) + lora_up(lora_down(x)) * alpha / dim``,
``lora_down`` [dim, in], ``lora_up`` [out, dim], out being all rows of qkv (and the MLP's in ``linear1``).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from library.config.schema import NetworkConfig
from library.errors import UserError
from library.nn.frozen_linear import project_recomputed
from library.precision.linear import QuantizedLinear
from networks.adapters.base import base_weight
from networks.adapters.lora import LoRALinear, join
from networks.files.adapters import load_adapter
from networks.merging.merge import LoraSource, merge_loras
from networks.network import AdapterNetwork, attach_lora
from networks.options import Dropouts, parse_network_args
from tests.networks.conftest import filled, inject, make_flux, run_flux
from tests.precision.layers import quantize
from tests.targets import FLUX_TARGETS, QWEN_TARGETS
from tests.tiny import bfl_state_dict

JOINED = "split_qkv=False"
QKV = "double_blocks.0.img_attn.qkv"


def scaled(x: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * (1 + shift)


def layers(fp8: bool = False, **options: Dropouts) -> list[LoRALinear]:
    """Return four joined layers of 24, 24, 24 and 48 rows with values in A and B."""
    torch.manual_seed(0)
    found = []
    for out in (24, 24, 24, 48):
        base: nn.Module = nn.Linear(32, out).requires_grad_(False)
        base = QuantizedLinear(quantize(base.weight, "row"), base.bias) if fp8 else base  # type: ignore[arg-type]
        found.append(LoRALinear(base, 4, 2.0, **options))
    join(found)
    for parameter in found[0].trained().values():
        nn.init.normal_(parameter)
    return found


def in_sd_scripts(joined: list[LoRALinear], x: Tensor) -> Tensor:
    """Return what the wrapped original layer gives."""
    weight = torch.cat([base_weight(layer.base) for layer in joined])
    bias = torch.cat([layer.bias for layer in joined])  # type: ignore[misc]
    down, up = (parameter for parameter in joined[0].trained().values())
    return F.linear(x, weight, bias) + F.linear(F.linear(x, down), up) * (2.0 / 4)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("module_dropout", [0.0, 1e-9], ids=["one autograd step", "textbook"])
def test_outputs_and_gradients_are_those_of_one_lora_on_the_joined_layer(module_dropout: float, fp8: bool) -> None:
    joined = layers(fp8, dropouts=Dropouts(of_module=module_dropout))
    assert [len(layer.trained()) for layer in joined] == [2, 0, 0, 0]
    down, up = joined[0].trained().values()
    assert (tuple(down.shape), tuple(up.shape)) == ((4, 32), (120, 4))
    x, shift = torch.randn(2, 5, 32, requires_grad=True), torch.randn(2, 1, 32)
    ours = torch.cat(project_recomputed(joined, scaled, x, shift), dim=-1)
    theirs = in_sd_scripts(joined, scaled(x, shift))
    gradient = torch.randn_like(theirs)
    found = torch.autograd.grad(ours, [x, down, up], gradient)
    wanted = torch.autograd.grad(theirs, [x, down, up], gradient)
    for one, other in zip((ours, *found), (theirs, *wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)  # fp32, other orders of summation
    alone = torch.cat([layer(scaled(x, shift)) for layer in joined], dim=-1)
    torch.testing.assert_close(alone, theirs, rtol=1e-5, atol=1e-5)


def test_a_dropout_is_drawn_once_for_all_parts() -> None:
    joined = layers(dropouts=Dropouts(0.5, 0.5))
    up = joined[0].trained()["lora_B.weight"]
    with torch.no_grad():
        up.copy_(up[:24].repeat(5, 1))
        q, k, v, wide = (y - layer.base(torch.ones(7, 3, 32)) for y, layer in zip(
            LoRALinear.forward_together(joined, torch.ones(7, 3, 32)), joined, strict=True))  # fmt: skip
    assert q.abs().amax() > 0
    for other in (k, v, wide[..., :24], wide[..., 24:]):
        torch.testing.assert_close(q, other, rtol=0, atol=1e-5)  # differences of fp32 outputs


def trained(*network_args: str, alpha: float = 4.0) -> tuple[nn.Module, AdapterNetwork]:
    model = make_flux()
    return model, filled(model, FLUX_TARGETS, *network_args, scale=0.3, network_alpha=alpha)


def test_a_flux_network_has_the_parameters_of_sd_scripts() -> None:
    model = make_flux()
    shapes = {name: t.shape for name, t in bfl_state_dict(model.state_dict()).items() if name.endswith(".weight")}
    blocks = [shape for name, shape in shapes.items() if "_blocks." in name and len(shape) == 2]
    network = inject(model, JOINED)
    assert sum(p.numel() for p in network.parameters()) == sum(4 * (out + columns) for out, columns in blocks)
    assert len(network.parameters()) == 2 * len(blocks)
    assert "one LoRA on each double_blocks.*.img_attn.qkv" in network.describe()
    assert [len(group["params"]) for group in network.parameter_groups(1e-3, 16.0)] == [len(blocks)] * 2


@pytest.mark.parametrize("save_format", ["kohya", "comfy", "diffusers"])
def test_every_layout_holds_the_update_and_gives_the_network_back(save_format: str, tmp_path: Path) -> None:
    model, network = trained(JOINED, alpha=3.0)
    path = tmp_path / "lora.safetensors"
    network.save(path, save_format, "fp32", {})
    tensors = load_file(path)
    down, up = network.modules["transformer_blocks.0.attn.to_q"].trained().values()
    if save_format == "diffusers":
        first, *others = (tensors[f"transformer.transformer_blocks.0.attn.to_{x}.lora_A.weight"] for x in "qkv")
        assert first.shape == down.shape
        assert all(torch.equal(first, other) for other in others)
    else:
        stem = f"lora_unet_{QKV.replace('.', '_')}" if save_format == "kohya" else f"diffusion_model.{QKV}"
        assert torch.equal(tensors[f"{stem}.lora_down.weight"], down)
        assert torch.equal(tensors[f"{stem}.lora_up.weight"], up)
        assert float(tensors[f"{stem}.alpha"]) == 3.0
    base = bfl_state_dict(make_flux().state_dict())
    save_file(base, tmp_path / "base.safetensors")
    merge_loras(tmp_path / "base.safetensors", [LoraSource(path, 1.0)], tmp_path / "m.safetensors", FLUX_TARGETS)
    expected = base[f"{QKV}.weight"] + 3.0 / 4 * up.detach() @ down.detach()
    torch.testing.assert_close(load_file(tmp_path / "m.safetensors")[f"{QKV}.weight"], expected, rtol=1e-5, atol=1e-6)
    again = make_flux()
    inject(again, JOINED, alpha=3.0).load_file(path)
    torch.testing.assert_close(run_flux(again), run_flux(model), rtol=1e-5, atol=1e-6)
    attached = make_flux()
    network = attach_lora(attached, load_adapter(path, FLUX_TARGETS).weights, FLUX_TARGETS, str(path))
    assert len(network.modules["transformer_blocks.0.attn.to_k"].trained()) == 0  # dim_from_weights keeps them joined
    torch.testing.assert_close(run_flux(attached), run_flux(model), rtol=1e-5, atol=1e-6)


def test_loras_of_their_own_do_not_fit_a_joined_network_but_the_reverse(tmp_path: Path) -> None:
    model, joined = trained(JOINED)
    joined.save(tmp_path / "joined.safetensors", "kohya", "fp32", {})
    apart = make_flux()
    inject(apart).load_file(tmp_path / "joined.safetensors")
    torch.testing.assert_close(run_flux(apart), run_flux(model), rtol=1e-5, atol=1e-6)
    trained()[1].save(tmp_path / "apart.safetensors", "kohya", "fp32", {})
    with pytest.raises(UserError, match="has a LoRA of its own, here it has one with .*; set split_qkv=True"):
        inject(make_flux(), JOINED).load_file(tmp_path / "apart.safetensors")


def test_layers_of_which_some_are_left_out_have_loras_of_their_own() -> None:
    network = inject(make_flux(), JOINED, r"exclude_patterns=transformer_blocks\.0\.attn\.to_q")
    assert len(network.modules["transformer_blocks.0.attn.to_k"].trained()) == 2
    assert len(network.modules["transformer_blocks.1.attn.to_k"].trained()) == 0


def test_what_cannot_be_joined_is_refused() -> None:
    for settings, targets, message in (
        ({"network_type": "dora"}, FLUX_TARGETS, "split_qkv=False: network_type dora cannot be trained so"),
        ({"init_lora_weights": "pissa"}, FLUX_TARGETS, "split_qkv=False: init_lora_weights pissa begins at layers"),
        ({}, QWEN_TARGETS, "qwen_image's q, k and v are layers of their own; remove it"),
    ):
        with pytest.raises(UserError, match=message):
            parse_network_args(NetworkConfig(network_args=[JOINED], **settings), targets)
