"""The file read back: held to full updates in fp64, to the dtypes' rounding, and to files changed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from library.errors import UserError
from networks.files.verify import check_file, distance
from networks.network import AdapterNetwork
from tests.networks.conftest import filled, random_pair
from tests.tiny import tiny_flux_transformer


def trained(kind: str = "lora") -> AdapterNetwork:
    """A network whose every layer does something."""
    return filled(tiny_flux_transformer(), scale=0.02, network_type=kind, network_alpha=2.0)


def edited(path: Path, key_part: str, change: object) -> Path:
    """Rewrite the file with one tensor changed (a function) or left out (None)."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    key = next(key for key in sorted(tensors) if key_part in key)
    tensor = tensors.pop(key)
    if callable(change):
        tensors[key] = change(tensor)
    elif isinstance(change, str):
        tensors[change] = tensor
    save_file(tensors, path, metadata)
    return path


@pytest.mark.parametrize("layout", ["diffusers", "kohya", "comfy"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_saved_lora_is_what_was_trained(tmp_path: Path, layout: str, precision: str) -> None:
    network = trained()
    network.save(tmp_path / "x.safetensors", layout, precision, {})
    found = check_file(tmp_path / "x.safetensors", network, layout)
    assert found.layers == len(network.modules)
    unit = {"fp32": 1e-7, "bf16": 2.0**-8, "fp16": 2.0**-11}[precision]
    assert found.largest <= 2 * unit
    if precision != "fp32":
        assert found.largest > unit / 100  # it does see the rounding


@pytest.mark.parametrize("kind", ["dora", "lokr", "loha"])
def test_other_kinds(tmp_path: Path, kind: str) -> None:
    network = trained(kind)
    network.save(tmp_path / "x.safetensors", "comfy", "bf16", {})
    assert check_file(tmp_path / "x.safetensors", network, "comfy").layers == len(network.modules)
    with torch.no_grad():
        network.parameters()[5].mul_(1.02)
    with pytest.raises(UserError, match="differs from what was trained"):
        check_file(tmp_path / "x.safetensors", network, "comfy")


def test_the_distance_is_that_of_the_full_updates() -> None:
    random = torch.Generator().manual_seed(0)
    one, other = (random_pair((30, 40), 4, alpha, random) for alpha in (3.0, 8.0))
    expected = (one.delta(torch.float64) - other.delta(torch.float64)).norm() / other.delta(torch.float64).norm()
    assert distance(one, other) == pytest.approx(float(expected), rel=1e-9)
    assert distance(one, one) < 1e-7  # fp64 within the trace: sqrt(1e-16)


@pytest.mark.parametrize(
    ("key_part", "change", "message"),
    [
        ("lora_down", lambda t: t * 1.05, "differs from what was trained"),
        ("alpha", lambda t: t * 1.05, "differs from what was trained"),
        ("lora_up", lambda t: t.roll(1, 0), "differs from what was trained"),
        ("alpha", None, "differs from what was trained"),
        ("lora_up", None, "has no up-projection"),
        ("lora_up", "lora_unet_x.lora_B.weight", "are no LoRA weights of flux"),
        ("lora_down", "transformer.double_blocks.0.x.lora_down.weight", "are no LoRA weights of flux"),
        # spellings that Tandem reads, and the programs that the format is for do not all
        ("img_mlp_0.lora_up", "lora_unet_double_blocks_0_img_mlp_0.lora_B.weight", "diffusers would pass over"),
        ("img_attn_proj.alpha", lambda t: t.expand(2).clone(), "has 2 alphas"),
    ],
)
def test_a_file_that_was_changed_is_found_out(tmp_path: Path, key_part: str, change: object, message: str) -> None:
    network = trained()
    network.save(tmp_path / "x.safetensors", "kohya", "fp32", {})
    with pytest.raises(UserError, match=message):
        check_file(edited(tmp_path / "x.safetensors", key_part, change), network, "kohya")


def test_a_layer_less_is_found_out(tmp_path: Path) -> None:
    network = trained()
    network.save(tmp_path / "x.safetensors", "diffusers", "fp32", {})
    for role in ("lora_A", "lora_B"):
        edited(tmp_path / "x.safetensors", f"transformer.transformer_blocks.0.attn.to_k.{role}", None)
    with pytest.raises(UserError, match=r"not those trained \(transformer_blocks.0.attn.to_k\)"):
        check_file(tmp_path / "x.safetensors", network, "diffusers")
