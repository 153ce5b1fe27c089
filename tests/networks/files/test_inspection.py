"""What is told of a LoRA file, against the full update matrices."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

from library.config.run_schema import SAVE_FORMATS
from library.errors import UserError
from networks.files.adapters import load_lora
from networks.files.inspection import inspect_lora
from networks.files.metadata import build_metadata
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from networks.network import AdapterNetwork
from tests.networks.conftest import inject, make_flux, train_a_little
from tests.networks.files.test_adapter_files import trained
from tests.targets import FLUX_TARGETS


@pytest.fixture
def network() -> AdapterNetwork:
    network = inject(make_flux(), "single_dim=8", "in_dims=[2,0,0,0,0]", alpha=3.0)
    train_a_little(network)
    return network


@pytest.mark.parametrize("layout", SAVE_FORMATS)
def test_rank_alpha_and_norm_are_the_same_in_every_layout(layout: str, network: AdapterNetwork, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_adapter(path, network.weights(), FLUX_TARGETS, layout)
    report = inspect_lora(path)
    # FLUX's layers are not all Qwen-Image's in any layout, so the names alone tell the family
    assert (report.families, report.layout, report.notes) == (("flux",), layout, ())
    assert (report.kind, report.count) == ("LoRA", len(network.modules))
    assert len(report.layers) == len(network.modules)
    for layer in report.layers:
        module = network.modules[layer.name]
        delta = module.weights().delta().double()
        assert layer.rank == module.rank
        scale = 1.0 if layout == "diffusers" else module.scale  # folded into B there, and where scales differ
        assert layer.alpha / layer.rank == pytest.approx(scale, rel=1e-6)
        assert layer.norm == pytest.approx(delta.norm().item(), rel=1e-5)  # delta is an fp32 product
        assert layer.rms == pytest.approx(delta.square().mean().sqrt().item(), rel=1e-5)


def test_layers_come_in_the_models_order_with_part_and_block(network: AdapterNetwork, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_adapter(path, network.weights(), FLUX_TARGETS, "kohya")
    layers = inspect_lora(path).layers
    first, last = layers[0], layers[-1]
    assert (first.part, first.block, first.layer) == ("transformer_blocks", 0, "attn.to_q")
    assert (last.part, last.block, last.layer) == ("", None, "x_embedder")
    parts = list(dict.fromkeys(layer.part for layer in layers))
    assert parts == ["transformer_blocks", "single_transformer_blocks", ""]


def test_a_file_of_no_known_family_is_shown_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    pair = {"down": torch.ones(2, 6), "up": torch.ones(8, 2)}
    save_file({f"lora_unet_input_blocks_4_1_attn.lora_{name}.weight": each for name, each in pair.items()}, path)
    report = inspect_lora(path)
    assert (report.families, report.count, report.layers) == ((), 0, ())
    assert "keys are no LoRA weights of" in report.notes[0]


def test_every_family_that_fits_is_named_unless_the_metadata_decide(tmp_path: Path) -> None:
    layer = {"transformer_blocks.0.attn.to_q": LoraWeights(torch.ones(1, 4), torch.ones(4, 1), 1.0)}
    save_adapter(tmp_path / "a", layer, FLUX_TARGETS)
    assert inspect_lora(tmp_path / "a").families == ("flux", "flux2_klein", "qwen_image", "qwen_image_21", "krea2")
    save_adapter(tmp_path / "b", layer, FLUX_TARGETS, metadata={"ss_base_model_version": "qwen_image"})
    assert inspect_lora(tmp_path / "b").families == ("qwen_image",)


@pytest.mark.parametrize(("family", "outputs"), [("flux", 7 * 32), ("flux2_klein", 9 * 32)])
def test_flux_1_and_2_are_told_apart_by_the_width_of_a_fused_layer(family: str, outputs: int, tmp_path: Path) -> None:
    """As AI toolkit and ComfyUI write them: BFL's names, the same in both, and no metadata."""
    stem = "diffusion_model.single_blocks.0.linear1"
    pair = {f"{stem}.lora_A.weight": torch.ones(2, 32), f"{stem}.lora_B.weight": torch.ones(outputs, 2)}
    save_file(pair, tmp_path / "a.safetensors")
    assert family in inspect_lora(tmp_path / "a.safetensors").families
    assert ("flux" in inspect_lora(tmp_path / "a.safetensors").families) == (family == "flux")


def test_a_dora_is_counted_with_one_note(tmp_path: Path) -> None:
    _, network = trained("dora")
    network.save(tmp_path / "a.safetensors", "comfy", "fp32", {})
    report = inspect_lora(tmp_path / "a.safetensors")
    assert (report.families, report.count, report.layers) == (("flux",), len(network.modules), ())
    assert report.notes == ("is no LoRA; merge_lora.py merges a DoRA into a model",)


@pytest.mark.parametrize("kind", ["lokr", "loha"])
def test_another_kind_shows_the_size_of_each_update(kind: str, tmp_path: Path) -> None:
    _, network = trained(kind)
    network.save(tmp_path / "a.safetensors", "comfy", "fp32", {})
    report = inspect_lora(tmp_path / "a.safetensors")
    assert (report.families, report.kind.lower(), report.notes) == (("flux",), kind, ())
    assert {layer.name for layer in report.layers} == network.modules.keys()
    for layer in report.layers:
        module = network.modules[layer.name]
        with torch.no_grad():
            delta = (module(torch.eye(module.in_features)) - module.bias).t() - module.base.weight
        assert layer.norm == pytest.approx(float(delta.norm()), rel=1e-4)
        assert layer.rms == pytest.approx(float(delta.square().mean().sqrt()), rel=1e-4)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none.safetensors: no such file"):
        inspect_lora(tmp_path / "none.safetensors")


def test_training_facts_and_modelspec_have_kohyas_keys_and_string_values() -> None:
    facts = {
        "network_dim": 16,
        "network_alpha": 8.0,
        "learning_rate": 1e-4,
        "seed": None,
        "gradient_checkpointing": True,
    }
    metadata = build_metadata(
        facts, FLUX_TARGETS, title="cat", timestamp=1700000000.7, architecture="flux-1-schnell", resolution=(768, 512),
        spec={"description": "mine"}, base_fingerprint="abc", config='{"a": 1}', version="0.1", attention=None,
    )  # fmt: skip
    assert metadata == {
        "ss_network_module": "networks.lora_flux",
        "ss_base_model_version": "flux1",
        "ss_output_name": "cat",
        "ss_network_dim": "16",
        "ss_network_alpha": "8.0",
        "ss_learning_rate": "0.0001",
        "ss_seed": "None",
        "ss_gradient_checkpointing": "True",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": "flux-1-schnell/lora",
        "modelspec.implementation": "https://github.com/black-forest-labs/flux",
        "modelspec.title": "cat",
        "modelspec.resolution": "768x512",
        "modelspec.date": "2023-11-14T22:13:20+00:00",
        "modelspec.description": "mine",
        "tandem.version": "0.1",
        "tandem.base_fingerprint": "abc",
        "tandem.config": '{"a": 1}',
    }


def test_hashes_are_those_of_the_file(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    weights = {  # over 1 MiB in bf16, so that the legacy hash sees data; alphas are fp32 beside it
        f"transformer_blocks.{i}.ff.net.2": LoraWeights(
            torch.randn(64, 4096, generator=rng), torch.randn(1024, 64, generator=rng), 32.0
        )
        for i in range(3)
    }
    path = tmp_path / "a.safetensors"
    save_adapter(path, weights, FLUX_TARGETS, "kohya", "bf16", {"ss_seed": "1", "modelspec.title": "cat"})
    data = path.read_bytes()
    (header,) = struct.unpack("<Q", data[:8])
    metadata = load_lora(path, FLUX_TARGETS).metadata
    digest = hashlib.sha256(data[8 + header :]).hexdigest()
    assert metadata["modelspec.hash_sha256"] == f"0x{digest}"
    assert metadata["sshs_model_hash"] == digest
    # sd-webui's old hash, over the file as it is with the ss_ metadata alone
    alone = safetensors.torch.save(safetensors.torch.load(data), {"ss_seed": "1"})
    assert metadata["sshs_legacy_hash"] == hashlib.sha256(alone[0x100000:0x110000]).hexdigest()[:8]


def test_a_name_with_bytes_that_are_not_utf8_is_spelt_in_the_metadata(tmp_path: Path) -> None:
    weights = {"transformer_blocks.0.attn.to_q": LoraWeights(torch.ones(2, 64), torch.ones(64, 2), 2.0)}
    path = tmp_path / "a.safetensors"
    save_adapter(path, weights, FLUX_TARGETS, "kohya", metadata={"ss_sd_model_name": "caf\udce9.safetensors"})
    assert load_lora(path, FLUX_TARGETS).metadata["ss_sd_model_name"] == "caf\\udce9.safetensors"
