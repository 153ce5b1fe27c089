"""A LoRA of which a part fits: refused, and with ``allow_partial`` taken in part, with every name said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file, save_file

from library.config.rules import find_conflicts
from library.config.schema import NetworkConfig, TrainConfig
from library.errors import UserError
from library.models.flux.files import FLUX_TARGETS
from networks.files.writing import save_adapter
from networks.merging.merge import LoraSelection, LoraSource, merge_loras
from networks.network import inject_adapter
from networks.options import parse_network_args
from tests.networks.conftest import inject, make_flux, train_a_little

KEPT, GONE, MISSHAPEN = (f"transformer_blocks.0.attn.to_{part}" for part in "qkv")
STRANGE = "transformer.transformer_blocks.0.attn.to_x.lora_A.weight"
UNKNOWN = (STRANGE, STRANGE.replace("_A", "_B"))

PARTIAL = LoraSelection(allow_partial=True)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A file of to_q and to_v (its shape wrong) of block 0, to_q of a block 9 there is not, and unknown keys."""
    network = inject(make_flux(), r"include_patterns=transformer_blocks\.0\.attn\.to_[qv]$", dim=2, alpha=2.0)
    train_a_little(network)
    path = tmp_path / "mixed.safetensors"
    save_adapter(path, network.weights(), FLUX_TARGETS, "diffusers")
    tensors = dict(load_file(path))
    for side in ("lora_A.weight", "lora_B.weight"):
        tensors[f"transformer.transformer_blocks.9.attn.to_q.{side}"] = tensors[f"transformer.{KEPT}.{side}"].clone()
    tensors[f"transformer.{MISSHAPEN}.lora_A.weight"] = torch.ones(2, 48)
    tensors |= {key: torch.ones(2, 2) for key in UNKNOWN}
    save_file(tensors, path)
    return path


def test_going_on_from_a_part_names_every_module(mixed: Path) -> None:
    network = inject(make_flux(), r"include_patterns=transformer_blocks\.0\.attn\.to_[qkv]$", dim=2, alpha=2.0)
    fresh = network.modules[MISSHAPEN].lora_A.weight.clone()
    with pytest.raises(UserError, match=r"2 keys are no LoRA weights of .*to_x"):
        network.load_file(mixed)
    line = network.load_file(mixed, allow_partial=True)
    assert line == (
        f"{mixed}: 1 modules matched; 2 not known ({', '.join(UNKNOWN)}); 1 without a place here "
        f"(transformer_blocks.9.attn.to_q); 1 of another shape ({MISSHAPEN} is for a layer of 32x48, the model's has "
        f"32x32); 2 newly initialised ({GONE}, {MISSHAPEN})"
    )
    taken = load_file(mixed)[f"transformer.{KEPT}.lora_A.weight"]
    assert torch.equal(network.modules[KEPT].lora_A.weight, taken)
    assert torch.equal(network.modules[MISSHAPEN].lora_A.weight, fresh)


def test_nothing_that_fits_is_refused_all_the_same(mixed: Path) -> None:
    other = inject(make_flux(), r"include_patterns=transformer_blocks\.1\.attn\.to_q$", dim=2)
    with pytest.raises(UserError, match="nothing of it fits: .*; give a LoRA of this model"):
        other.load_file(mixed, allow_partial=True)


def test_merging_a_part_names_every_module_and_changes_the_rest_only(mixed: Path, tmp_path: Path) -> None:
    make_flux().save_pretrained(tmp_path / "base")
    sources = [LoraSource(mixed, 1.0)]
    with pytest.raises(UserError, match="2 keys are no LoRA weights"):
        merge_loras(tmp_path / "base", sources, tmp_path / "merged", FLUX_TARGETS)
    report = merge_loras(
        tmp_path / "base", sources, tmp_path / "merged", FLUX_TARGETS, selection=LoraSelection(allow_partial=True)
    )
    (note,) = report.notes
    assert note == (
        f"{mixed}: 1 modules matched; 2 not known ({', '.join(UNKNOWN)}); 1 without a place here "
        f"(transformer_blocks.9.attn.to_q); 1 of another shape ({MISSHAPEN} is for 32x48, the base has 32x32)"
    )
    before = make_flux().state_dict()
    after = FluxTransformer2DModel.from_pretrained(tmp_path / "merged").state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == [f"{KEPT}.weight"]
    read = load_file(mixed)  # alpha is the rank: the scale is 1
    update = read[f"transformer.{KEPT}.lora_B.weight"] @ read[f"transformer.{KEPT}.lora_A.weight"]
    torch.testing.assert_close(after[f"{KEPT}.weight"], before[f"{KEPT}.weight"] + update, rtol=1e-6, atol=1e-7)


def test_merging_what_fits_nowhere_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    network = inject(make_flux(3), r"include_patterns=transformer_blocks\.2\.attn\.to_q$")
    train_a_little(network)
    save_adapter(tmp_path / "a.safetensors", network.weights(), FLUX_TARGETS, "diffusers")
    make_flux().save_pretrained(tmp_path / "base")
    sources = [LoraSource(tmp_path / "a.safetensors", 1.0)]
    with pytest.raises(UserError, match="nothing of it fits"):
        merge_loras(
            tmp_path / "base", sources, tmp_path / "merged", FLUX_TARGETS, selection=LoraSelection(allow_partial=True)
        )
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("kind", ["lokr", "dora"])
def test_other_kinds_go_on_from_a_part_too(kind: str, tmp_path: Path) -> None:
    def network(pattern: str):
        config = NetworkConfig(network_dim=2, network_type=kind, network_args=[f"include_patterns={pattern}"])
        return inject_adapter(make_flux(), parse_network_args(config, FLUX_TARGETS), FLUX_TARGETS, seed=0)

    saved = network(r"transformer_blocks\.0\.attn\.to_[qk]$")
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(0.25)
    saved.save(tmp_path / "a.safetensors", "comfy", "fp32", {})
    onward = network(r"transformer_blocks\.0\.attn\.to_[kv]$")
    with pytest.raises(UserError, match=rf"not trained here: {KEPT}; not in the file: {MISSHAPEN}; choose"):
        onward.load_file(tmp_path / "a.safetensors")
    line = onward.load_file(tmp_path / "a.safetensors", allow_partial=True)
    assert line.endswith(f"1 modules matched; 1 without a place here ({KEPT}); 1 newly initialised ({MISSHAPEN})")
    for name, trained in onward.modules[GONE].trained().items():
        # a DoRA's lengths go through a file as a product and a quotient of fp32
        torch.testing.assert_close(trained, saved.modules[GONE].trained()[name], rtol=1e-5, atol=1e-6)


def test_allow_partial_without_a_file_is_refused() -> None:
    config = TrainConfig.model_validate(
        {
            "model": {"pretrained_model_name_or_path": "m"},
            "dataset": {"dataset_config": "d.toml"},
            "network": {"allow_partial": True},
        }
    )
    assert any(conflict.keys[0] == "allow_partial" for conflict in find_conflicts(config))
