"""LoRAs of Krea 2: what is trained, the keys that programs know, and files that diffusers' pipeline loads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from diffusers import Krea2Pipeline, Krea2Transformer2DModel
from diffusers.loaders.single_file_utils import convert_krea2_transformer_checkpoint_to_diffusers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tools.merge_lora as merge_lora
from library.config.schema import NetworkConfig
from library.models.krea2.files import KREA2_TARGETS
from networks.files.adapters import load_lora, save_adapter
from networks.network import AdapterNetwork, attach_lora, inject_adapter
from networks.options import parse_network_args
from tests.networks.files.read_back import assert_read_as_written
from tests.tiny_krea2 import published_name, published_state_dict, run_krea2, tiny_krea2_transformer


def inject(model: nn.Module, *network_args: str) -> AdapterNetwork:
    """Inject a LoRA of rank 4 and alpha 3, and give it values."""
    config = NetworkConfig(network_dim=4, network_alpha=3, network_args=list(network_args))
    network = inject_adapter(model, parse_network_args(config, KREA2_TARGETS), KREA2_TARGETS, seed=0)
    random = torch.Generator().manual_seed(1)
    for layer in network.modules.values():
        layer.lora_B.weight.data.normal_(std=0.1, generator=random)
    return network


def linears() -> dict[str, nn.Linear]:
    return {name: each for name, each in tiny_krea2_transformer().named_modules() if isinstance(each, nn.Linear)}


def reloaded(path: Path) -> Krea2Transformer2DModel:
    """Return the tiny transformer with the file loaded by diffusers' pipeline."""
    pipeline = Krea2Pipeline(None, None, None, None, tiny_krea2_transformer())
    pipeline.load_lora_weights(str(path))
    return pipeline.transformer


def test_every_linear_layer_is_trained_as_musubi_tuner_does_and_attention_alone_where_asked() -> None:
    # networks/lora_krea2.py: no list of modules, which stands for all
    assert inject(tiny_krea2_transformer()).modules.keys() == linears().keys()
    others = ("mlp", "txt_fusion", "projector", "img_in", "txt_in", "time_in", "final")
    attention = inject(tiny_krea2_transformer(), *(f"{name}_dim=0" for name in others))
    assert len(attention.modules) == 2 * 5  # docs/krea2.md: wq, wk, wv, wo and gate, 140 of 28 blocks
    assert all(name.startswith("transformer_blocks.") for name in attention.modules)
    one = inject(tiny_krea2_transformer(), "train_block_indices=0")
    assert not any(name.startswith("transformer_blocks.1.") for name in one.modules)


def test_diffusers_computes_from_its_own_format_what_our_network_computes(tmp_path: Path) -> None:
    model = tiny_krea2_transformer()
    network = inject(model)
    save_adapter(tmp_path / "lora.safetensors", network.weights(), KREA2_TARGETS, "diffusers")
    ours, theirs = run_krea2(model), run_krea2(reloaded(tmp_path / "lora.safetensors"))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)  # peft multiplies in another order
    assert (ours - run_krea2(tiny_krea2_transformer())).abs().max() > 0.01


@pytest.mark.parametrize("save_format", ["diffusers", "kohya", "comfy"])
def test_files_are_read_as_they_were_written_and_have_the_keys_that_programs_know(
    save_format: str, tmp_path: Path
) -> None:
    network = inject(tiny_krea2_transformer())
    save_adapter(tmp_path / "lora.safetensors", network.weights(), KREA2_TARGETS, save_format)
    assert_read_as_written(tmp_path / "lora.safetensors", network, KREA2_TARGETS, save_format)
    stems = {key.split(".lora_")[0] for key in load_file(tmp_path / "lora.safetensors") if ".lora_" in key}
    names = {  # peft's; musubi-tuner's lora.py: "lora_unet_" and the path of the Linear; ComfyUI's "diffusion_model."
        "diffusers": {f"transformer.{name}" for name in linears()},
        "kohya": {"lora_unet_" + published_name(name).replace(".", "_") for name in linears()},
        "comfy": {f"diffusion_model.{published_name(name)}" for name in linears()},
    }
    assert stems == names[save_format]


@pytest.mark.parametrize("prefix", ["diffusion_model.", "base_model.model.", "transformer."])
def test_files_of_other_trainers_are_read_as_diffusers_reads_them(prefix: str, tmp_path: Path) -> None:
    """Krea's own trainer and ComfyUI write the first prefix, ai-toolkit the second, diffusers' script the third."""
    random, tensors = torch.Generator().manual_seed(3), dict[str, Tensor]()
    for name, linear in linears().items():
        stem = prefix + (name if prefix == "transformer." else published_name(name))
        tensors[f"{stem}.lora_A.weight"] = torch.randn(4, linear.in_features, generator=random) * 0.2
        tensors[f"{stem}.lora_B.weight"] = torch.randn(linear.out_features, 4, generator=random) * 0.1
    save_file(tensors, tmp_path / "lora.safetensors")
    model = tiny_krea2_transformer()
    attach_lora(model, load_lora(tmp_path / "lora.safetensors", KREA2_TARGETS).weights, KREA2_TARGETS, "the LoRA")
    ours, theirs = run_krea2(model), run_krea2(reloaded(tmp_path / "lora.safetensors"))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert (ours - run_krea2(tiny_krea2_transformer())).abs().max() > 0.01


def test_musubi_tuners_files_are_read(tmp_path: Path) -> None:
    names = ("transformer_blocks.0.attn.to_out.0", "text_fusion.refiner_blocks.1.ff.down", "time_mod_proj")
    stems = ("lora_unet_blocks_0_attn_wo", "lora_unet_txtfusion_refiner_blocks_1_mlp_down", "lora_unet_tproj_1")
    tensors = {}
    for stem in stems:
        tensors |= {f"{stem}.lora_down.weight": torch.randn(4, 64), f"{stem}.lora_up.weight": torch.randn(64, 4)}
        tensors[f"{stem}.alpha"] = torch.tensor(2.0)
    save_file(tensors, tmp_path / "lora.safetensors")
    read = load_lora(tmp_path / "lora.safetensors", KREA2_TARGETS).weights
    assert read.keys() == set(names)
    assert {weights.alpha for weights in read.values()} == {2.0}
    assert torch.equal(read["time_mod_proj"].down, tensors["lora_unet_tproj_1.lora_down.weight"])


def test_merging_into_the_published_file_gives_the_networks_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_krea2_transformer()
    base = {f"model.diffusion_model.{n}": t.contiguous() for n, t in published_state_dict(model.state_dict()).items()}
    save_file(base, tmp_path / "base.safetensors")
    network = inject(model)
    save_adapter(tmp_path / "lora.safetensors", network.weights(), KREA2_TARGETS, "comfy")
    flags = ["--model", "base.safetensors", "--lora", "lora.safetensors", "--save_to", "merged.safetensors"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["merge_lora.py", *flags, "--model_type", "krea2"])
    merge_lora.main()
    merged = load_file(tmp_path / "merged.safetensors")
    assert merged.keys() == base.keys()
    plain = tiny_krea2_transformer()
    plain.load_state_dict(convert_krea2_transformer_checkpoint_to_diffusers(merged))
    torch.testing.assert_close(run_krea2(plain), run_krea2(model), rtol=1e-4, atol=1e-5)
