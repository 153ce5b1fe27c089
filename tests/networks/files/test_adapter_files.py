"""Files of other kinds: merging into every layout and at any strength, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from library.config.schema import NetworkConfig
from library.errors import UserError
from library.models.flux.files import FLUX_TARGETS
from networks.files.adapters import load_adapter, load_lora
from networks.files.layouts import LAYOUTS, check_save_format, split_key
from networks.files.weights import KINDS as WEIGHTS
from networks.merging.merge import LoraSource, merge_loras
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.networks.conftest import comfy_weight, filled, make_flux, run_flux
from tests.tiny import bfl_state_dict

KINDS = ["dora", "lokr", "loha"]
STEM = "lycoris_transformer_blocks_0_attn_to_k"


def trained(kind: str) -> tuple[torch.nn.Module, AdapterNetwork]:
    """Return a model with a network of ``kind`` that has been given values."""
    model = make_flux()
    return model, filled(model, network_type=kind, network_dim=6)


def save(network: AdapterNetwork, path: Path, save_format: str = "comfy") -> Path:
    network.save(path, save_format, "fp32", {})
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_merged_into_bfls_layout_is_the_running_model(kind: str, tmp_path: Path) -> None:
    model, network = trained(kind)
    path = save(network, tmp_path / "a.safetensors")
    base = {f"model.diffusion_model.{k}": v for k, v in bfl_state_dict(make_flux().state_dict()).items()}
    save_file(base, tmp_path / "base.safetensors")
    merge_loras(tmp_path / "base.safetensors", [LoraSource(path, 1.0)], tmp_path / "m.safetensors", FLUX_TARGETS)
    merged = load_file(tmp_path / "m.safetensors")
    expected = make_flux()
    for name, layer in network.modules.items():
        identity = torch.eye(layer.in_features)
        with torch.no_grad():  # W'^T, read off the layer by what it makes of unit vectors
            expected.get_submodule(name).weight.copy_((layer(identity) - layer.bias).t())
    torch.testing.assert_close(run_flux(expected), run_flux(model), rtol=1e-3, atol=1e-4)
    wanted = bfl_state_dict(expected.state_dict())
    for key, tensor in wanted.items():
        # fp32: a weight as a sum of products against the formula of the file
        torch.testing.assert_close(merged[f"model.diffusion_model.{key}"], tensor, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_strength_is_a_share_of_the_change(kind: str, tmp_path: Path) -> None:
    path = save(trained(kind)[1], tmp_path / "a.safetensors")
    stem = {k.partition(".")[2]: t for k, t in load_file(path).items() if k.startswith(STEM)}
    make_flux().save_pretrained(tmp_path / "base")
    merge_loras(tmp_path / "base", [LoraSource(path, 0.3)], tmp_path / "merged", FLUX_TARGETS)
    name = "transformer_blocks.0.attn.to_k.weight"
    before = load_file(tmp_path / "base" / "diffusion_pytorch_model.safetensors")[name].double()
    after = load_file(tmp_path / "merged" / "diffusion_pytorch_model.safetensors")[name].double()
    expected = before + 0.3 * (comfy_weight(before, stem) - before)
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)  # fp32


def test_lengths_of_columns_are_divided_as_everywhere(tmp_path: Path) -> None:
    weight = make_flux().transformer_blocks[0].attn.to_k.weight.detach().double()
    rng = torch.Generator().manual_seed(0)
    down, up = torch.randn(2, 32, generator=rng), torch.randn(32, 2, generator=rng)
    lengths = torch.rand(1, 32, generator=rng) + 0.5
    tensors = {"lora_down.weight": down, "lora_up.weight": up, "dora_scale": lengths, "alpha": torch.tensor(1.0)}
    save_file({f"{STEM}.{key}": tensor for key, tensor in tensors.items()}, tmp_path / "dora.safetensors")
    changed = weight + 0.5 * (up @ down).double()
    expected = changed * (lengths.double() / changed.norm(dim=0, keepdim=True))
    (module,) = load_adapter(tmp_path / "dora.safetensors", FLUX_TARGETS).weights.values()
    torch.testing.assert_close(module.apply(weight.float(), 1.0).double(), expected, rtol=1e-5, atol=1e-6)


LOKR = {"lokr_w1": torch.ones(4, 4), "lokr_w2": torch.ones(8, 8), "alpha": torch.tensor(1.0)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{STEM}.{k}": t for k, t in LOKR.items() if k != "lokr_w2"}, "has lokr_w1, which is no complete LoKr"),
        ({f"{STEM}.{k}": t for k, t in (LOKR | {"lokr_t2": torch.ones(1)}).items()}, f"encoders: {STEM}.lokr_t2;"),
        ({f"lora_unet_double_blocks_0_img_attn_qkv.{k}": t for k, t in LOKR.items()}, "32 output rows, 96 expected"),
        ({f"{STEM}.{k}": t for k, t in (LOKR | {"lokr_w1": torch.full((4, 4), torch.nan)}).items()}, "NaN or infinity"),
        ({f"{STEM}.lora_down.weight": torch.ones(2, 32)}, "has no up-projection; the file is incomplete"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(tensors: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(UserError) as caught:
        load_adapter(tmp_path / "a.safetensors", FLUX_TARGETS)
    assert message in str(caught.value)


def test_a_file_for_another_model_is_refused_by_shape(tmp_path: Path) -> None:
    save_file({f"{STEM}.{k}": t for k, t in (LOKR | {"lokr_w2": torch.ones(4, 8)}).items()}, tmp_path / "a.safetensors")
    make_flux().save_pretrained(tmp_path / "base")
    with pytest.raises(UserError, match="to_k is for 16x32, the base has 32x32; it was trained on another model"):
        merge_loras(tmp_path / "base", [LoraSource(tmp_path / "a.safetensors", 1.0)], tmp_path / "m", FLUX_TARGETS)


def test_a_plain_lora_is_no_other_kind_and_the_reverse(mixed_lora, tmp_path: Path) -> None:
    _, lora = mixed_lora()
    lora.save(tmp_path / "lora.safetensors", "kohya", "fp32", {})
    file = load_adapter(tmp_path / "lora.safetensors", FLUX_TARGETS)
    assert file.weights.keys() == lora.modules.keys()
    assert file.layout == "kohya"
    path = save(trained("loha")[1], tmp_path / "loha.safetensors")
    with pytest.raises(UserError, match=r"is a LoHa \(.*hada_w1_a\), no LoRA; merge it into a model with merge_lora"):
        load_lora(path, FLUX_TARGETS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"network_dim": 4}, "network_dim as in the file"),
        ({"network_type": "lokr"}, "is a LoHa, here it is a LoKr and 39 more; set network_type"),
        ({"network_args": ["train_single_block_indices=0"]}, "not trained here: single_transformer_blocks.1"),
    ],
)
def test_going_on_from_another_network_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    path = save(trained("loha")[1], tmp_path / "loha.safetensors")
    settings = {"network_type": "loha", "network_dim": 6, "network_alpha": 3.0} | changes
    options = parse_network_args(NetworkConfig(**settings), FLUX_TARGETS)
    network = inject_adapter(make_flux(), options, FLUX_TARGETS, seed=0)
    with pytest.raises(UserError, match=message):
        network.load_file(path)


@pytest.mark.parametrize("save_format", ["diffusers", "comfy"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_dora_in_16_bits_changes_what_was_trained(save_format: str, precision: str, tmp_path: Path) -> None:
    model, network = trained("dora")
    with torch.no_grad():
        for layer in network.modules.values():
            layer.lora_B.weight.mul_(0.05)  # a change of about 1 % of the weight, as after a usual run
            layer.magnitude.copy_(layer.row_norms() * 1.005)
    network.save(tmp_path / "dora.safetensors", save_format, precision, {})
    read = load_adapter(tmp_path / "dora.safetensors", FLUX_TARGETS).weights
    model.double()
    for name, layer in network.modules.items():
        base = layer.weight.double()
        with torch.no_grad():
            expected = (layer(torch.eye(layer.in_features).double()) - layer.bias).t() - base
        change = read[name].apply(base.float(), 1.0).double() - base
        assert float((change - expected).norm() / expected.norm()) < 2.0**-7


@pytest.mark.parametrize("kind", ["lokr", "loha"])
@pytest.mark.parametrize("save_format", ["comfy", "kohya"])
def test_going_on_with_another_alpha_keeps_the_update_and_the_configs_alpha(
    kind: str, save_format: str, tmp_path: Path
) -> None:
    model, network = trained(kind)
    path = save(network, tmp_path / "a.safetensors", save_format)
    options = parse_network_args(NetworkConfig(network_type=kind, network_dim=6, network_alpha=1.0), FLUX_TARGETS)
    other = make_flux()
    fresh = inject_adapter(other, options, FLUX_TARGETS, seed=0)
    assert fresh.load_file(path).endswith("of them rescaled to this run's alpha / rank")
    assert {layer.alpha for layer in fresh.modules.values()} == {1.0}
    torch.testing.assert_close(run_flux(other), run_flux(model), rtol=1e-5, atol=1e-6)


def test_only_layouts_that_can_be_asked_for_are_offered() -> None:
    with pytest.raises(UserError, match="set save_format = diffusers or comfy$"):
        check_save_format("dora", "kohya")


def test_every_tensor_is_read_by_the_name_it_is_written_with() -> None:
    for layout in LAYOUTS.values():
        for name in set[str]().union(*(names for kind in layout.kinds for names in WEIGHTS[kind].complete)):
            if (written := layout.names.get(name, name)) is not None:
                assert split_key(f"blocks.0.to_q.{written}") == ("blocks.0.to_q", name)
