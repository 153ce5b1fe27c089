"""LoRAs of FLUX.2: what is trained, the keys that programs know, and files that diffusers' pipeline loads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel
from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import nn

import tools.merge_lora as merge_lora
from library.config.schema import NetworkConfig
from library.models.flux2.files import FLUX2_TARGETS
from networks.files.adapters import load_lora, save_adapter
from networks.files.readers import READERS, readable
from networks.files.weights import LoraWeights
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.tiny_flux2 import bfl_flux2_state_dict, run_flux2, tiny_flux2_transformer

MODULATION = ("img_mod_dim=3", "txt_mod_dim=2", "single_mod_dim=2")
INPUTS = ("img_in_dim=2", "txt_in_dim=2", "time_in_dim=2")


def inject(model: nn.Module, *network_args: str, kind: str = "lora") -> AdapterNetwork:
    """Inject an adapter of rank 4 and alpha 3, and give it values."""
    config = NetworkConfig(network_type=kind, network_dim=4, network_alpha=3, network_args=list(network_args))  # type: ignore[arg-type]
    network = inject_adapter(model, parse_network_args(config, FLUX2_TARGETS), FLUX2_TARGETS, seed=0)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random) * 0.1)
    return network


def reloaded(path: Path) -> Flux2Transformer2DModel:
    """Return the tiny transformer with the file loaded by diffusers' pipeline."""
    pipeline = Flux2KleinPipeline(None, None, None, None, tiny_flux2_transformer())
    pipeline.load_lora_weights(str(path))
    return pipeline.transformer


def test_attention_and_mlp_of_all_blocks_are_trained_by_default_and_the_rest_where_asked() -> None:
    network = inject(tiny_flux2_transformer())
    assert len(network.modules) == 12 + 2 * 2
    assert all("transformer_blocks." in name for name in network.modules)
    wide = inject(tiny_flux2_transformer(), *MODULATION, *INPUTS)
    assert len(wide.modules) == 12 + 2 * 2 + 3 + 4
    assert wide.modules["double_stream_modulation_img.linear"].rank == 3
    single = inject(tiny_flux2_transformer(), "train_single_block_indices=1", "train_double_block_indices=none")
    assert set(single.modules) == {f"single_transformer_blocks.1.attn.{n}" for n in ("to_qkv_mlp_proj", "to_out")}


@pytest.mark.parametrize("save_format", ["diffusers", "kohya", "comfy"])
@pytest.mark.parametrize("network_args", [(), INPUTS, (*MODULATION, *INPUTS)], ids=["default", "inputs", "everything"])
def test_diffusers_computes_from_every_format_what_our_network_computes(
    save_format: str, network_args: tuple[str, ...], tmp_path: Path
) -> None:
    model = tiny_flux2_transformer()
    network = inject(model, *network_args)
    save_adapter(tmp_path / "lora.safetensors", network.weights(), FLUX2_TARGETS, save_format)
    loaded = reloaded(tmp_path / "lora.safetensors")
    found = {name for name, module in loaded.named_modules() if isinstance(module, BaseTunerLayer)}
    assert found == readable(READERS[0], network.modules, FLUX2_TARGETS, save_format)
    if save_format == "kohya" and network_args and MODULATION[0] in network_args:
        assert network.modules.keys() - found == {n for n in network.modules if "modulation" in n}  # a line in a log
        return
    ours, theirs = run_flux2(model), run_flux2(loaded)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)  # peft multiplies in another order
    assert (ours - run_flux2(tiny_flux2_transformer())).abs().max() > 0.01
    read = load_lora(tmp_path / "lora.safetensors", FLUX2_TARGETS)
    assert read.layout == save_format
    for name, weights in network.weights().items():
        delta = weights.up @ weights.down * weights.scale
        again = read.weights[name]
        torch.testing.assert_close(again.up @ again.down * again.scale, delta, rtol=1e-5, atol=1e-6)


def test_diffusers_reads_a_lokr_in_comfyuis_layout(tmp_path: Path) -> None:
    model = tiny_flux2_transformer()
    network = inject(model, kind="lokr")
    network.save(tmp_path / "lokr.safetensors", "comfy", "fp32", {})
    torch.testing.assert_close(
        run_flux2(reloaded(tmp_path / "lokr.safetensors")), run_flux2(model), rtol=1e-4, atol=1e-5
    )


# BFL's names below diffusion_model., as AI toolkit writes them; lora_unet_ and underscores, as musubi-tuner does.
KEYS = {
    "diffusers": ("transformer.transformer_blocks.0.attn.to_q.lora_A.weight", "attn.to_qkv_mlp_proj.lora_B.weight"),
    "kohya": ("lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight", "lora_unet_single_blocks_1_linear1.alpha"),
    "comfy": (
        "diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight",
        "diffusion_model.single_blocks.1.linear1.lora_B.weight",
    ),
}


@pytest.mark.parametrize("save_format", KEYS)
def test_files_have_the_keys_that_other_programs_know(save_format: str, tmp_path: Path) -> None:
    names = {f"transformer_blocks.0.attn.to_{x}": 64 for x in "qkv"}
    names["single_transformer_blocks.1.attn.to_qkv_mlp_proj"] = 576
    module = {name: LoraWeights(torch.ones(2, 64), torch.ones(out, 2), 1.0) for name, out in names.items()}
    save_adapter(tmp_path / "a", module, FLUX2_TARGETS, save_format)
    written = load_file(tmp_path / "a")
    first, second = KEYS[save_format]
    assert first in written
    assert any(key.endswith(second) for key in written)
    assert any(key.endswith(".alpha") for key in written) is (save_format == "kohya")


@pytest.mark.parametrize(
    "stem",
    [
        "diffusion_model.single_blocks.1.linear2",  # AI toolkit
        "lora_unet_single_blocks_1_linear2",  # musubi-tuner
        "lora_transformer_single_transformer_blocks_1_attn_to_out",  # OneTrainer
        "base_model.model.single_blocks.1.linear2",
        "transformer.single_transformer_blocks.1.attn.to_out",
        "single_transformer_blocks.1.attn.to_out",
    ],
)
def test_published_layouts_are_read(stem: str, tmp_path: Path) -> None:
    tensors = {f"{stem}.lora_A.weight": torch.randn(4, 256), f"{stem}.lora_B.weight": torch.randn(64, 4)}
    save_file(tensors, tmp_path / "lora.safetensors")
    ((name, weights),) = load_lora(tmp_path / "lora.safetensors", FLUX2_TARGETS).weights.items()
    assert name == "single_transformer_blocks.1.attn.to_out"
    assert torch.equal(weights.down, tensors[f"{stem}.lora_A.weight"])


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_merging_into_bfls_file_gives_the_networks_output(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_flux2_transformer()
    base = {f"{prefix}{name}": tensor for name, tensor in bfl_flux2_state_dict(model.state_dict()).items()}
    save_file(base, tmp_path / "base.safetensors")
    network = inject(model, *MODULATION, *INPUTS)
    save_adapter(tmp_path / "lora.safetensors", network.weights(), FLUX2_TARGETS, "diffusers")
    flags = ["--model", "base.safetensors", "--lora", "lora.safetensors", "--save_to", "merged.safetensors"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["merge_lora.py", *flags, "--model_type", "flux2_klein"])
    merge_lora.main()
    merged = load_file(tmp_path / "merged.safetensors")
    assert merged.keys() == base.keys()
    plain = tiny_flux2_transformer()
    bare = {name.removeprefix(prefix): tensor for name, tensor in merged.items()}
    plain.load_state_dict(convert_flux2_transformer_checkpoint_to_diffusers(bare))
    torch.testing.assert_close(run_flux2(plain), run_flux2(model), rtol=1e-4, atol=1e-5)


def test_the_tests_own_bfl_layout_is_the_one_that_diffusers_converts() -> None:
    state = tiny_flux2_transformer(2, 3, guidance=True).state_dict()
    converted = convert_flux2_transformer_checkpoint_to_diffusers(bfl_flux2_state_dict(state))
    assert converted.keys() == state.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in state.items())
