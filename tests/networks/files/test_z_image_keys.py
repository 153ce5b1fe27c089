"""LoRAs of Z-Image: what is trained, the keys that programs know, and files that diffusers' pipeline loads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from diffusers import ZImagePipeline, ZImageTransformer2DModel
from diffusers.loaders.single_file_utils import convert_z_image_transformer_checkpoint_to_diffusers
from safetensors.torch import load_file, save_file
from torch import nn

import tools.merge_lora as merge_lora
from library.config.schema import NetworkConfig
from library.models.z_image.files import Z_IMAGE_TARGETS
from networks.files.adapters import load_lora, save_adapter
from networks.files.weights import LoraWeights
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.networks.files.read_back import assert_read_as_written
from tests.tiny_z_image import comfy_state_dict, run_z, tiny_z_transformer

BLOCKS = ("mod_dim=3", "refiner_dim=2", "refiner_mod_dim=2", "mlp_dim=6")
INPUTS = ("img_in_dim=2", "txt_in_dim=2", "time_in_dim=2")


def inject(model: nn.Module, *network_args: str) -> AdapterNetwork:
    """Inject a LoRA of rank 4 and alpha 3, and give it values."""
    config = NetworkConfig(network_dim=4, network_alpha=3, network_args=list(network_args))
    network = inject_adapter(model, parse_network_args(config, Z_IMAGE_TARGETS), Z_IMAGE_TARGETS, seed=0)
    random = torch.Generator().manual_seed(1)
    for layer in network.modules.values():
        layer.lora_B.weight.data.normal_(std=0.1, generator=random)
    return network


def reloaded(path: Path) -> ZImageTransformer2DModel:
    """Return the tiny transformer with the file loaded by diffusers' pipeline."""
    pipeline = ZImagePipeline(None, None, None, None, tiny_z_transformer())
    pipeline.load_lora_weights(str(path))
    return pipeline.transformer


def test_attention_and_mlp_of_the_main_layers_are_trained_by_default_and_the_rest_where_asked() -> None:
    network = inject(tiny_z_transformer())
    assert len(network.modules) == 2 * 7
    assert all(name.startswith("layers.") and "adaLN" not in name for name in network.modules)
    wide = inject(tiny_z_transformer(), *BLOCKS, *INPUTS)
    assert len(wide.modules) == 2 * 8 + 8 + 7 + 4  # main layers, noise and context refiner, inputs
    assert wide.modules["context_refiner.0.feed_forward.w2"].rank == 2
    assert len(inject(tiny_z_transformer(), "train_block_indices=0").modules) == 7


@pytest.mark.parametrize("save_format", ["diffusers", "kohya", "comfy"])
@pytest.mark.parametrize("network_args", [(), BLOCKS, (*BLOCKS, *INPUTS)], ids=["default", "blocks", "everything"])
def test_diffusers_computes_from_every_format_what_our_network_computes(
    save_format: str, network_args: tuple[str, ...], tmp_path: Path
) -> None:
    model = tiny_z_transformer()
    network = inject(model, *network_args)
    save_adapter(tmp_path / "lora.safetensors", network.weights(), Z_IMAGE_TARGETS, save_format)
    ours, theirs = run_z(model), run_z(reloaded(tmp_path / "lora.safetensors"))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)  # peft multiplies in another order
    assert (ours - run_z(tiny_z_transformer())).abs().max() > 0.01
    assert_read_as_written(tmp_path / "lora.safetensors", network, Z_IMAGE_TARGETS, save_format)


# ComfyUI's comfy/lora.py: for Z-Image diffusers' names below diffusion_model. and transformer., its own (stacked) ones
# below lora_unet_ and diffusion_model.; lora_unet_ with diffusers' names it does not know, and musubi-tuner no others.
KEYS = {
    "diffusers": ("transformer.layers.0.attention.to_q.lora_A.weight", "transformer.layers.0.attention.to_out.0"),
    "kohya": ("lora_unet_layers_0_attention_to_q.lora_down.weight", "lora_unet_layers_0_attention_to_out_0"),
    "comfy": (
        "diffusion_model.layers.0.attention.to_q.lora_down.weight",
        "diffusion_model.layers.0.attention.to_out.0",
    ),
}


@pytest.mark.parametrize("save_format", KEYS)
def test_files_have_the_keys_that_comfyui_or_musubi_tuner_know(save_format: str, tmp_path: Path) -> None:
    names = [f"layers.0.attention.{name}" for name in ("to_q", "to_out.0")]
    module = {name: LoraWeights(torch.ones(2, 64), torch.ones(64, 2), 1.0) for name in names}
    save_adapter(tmp_path / "a", module, Z_IMAGE_TARGETS, save_format)
    written = load_file(tmp_path / "a")
    first, second = KEYS[save_format]
    assert first in written
    assert any(key.startswith(f"{second}.lora_") for key in written)


@pytest.mark.parametrize(
    "stem",
    [
        "diffusion_model.layers.1.feed_forward.w2",  # AI toolkit
        "lora_unet_layers_1_feed_forward_w2",  # musubi-tuner
        "base_model.model.layers.1.feed_forward.w2",
        "layers.1.feed_forward.w2",
    ],
)
def test_published_layouts_are_read(stem: str, tmp_path: Path) -> None:
    tensors = {f"{stem}.lora_A.weight": torch.randn(4, 170), f"{stem}.lora_B.weight": torch.randn(64, 4)}
    save_file(tensors, tmp_path / "lora.safetensors")
    ((name, weights),) = load_lora(tmp_path / "lora.safetensors", Z_IMAGE_TARGETS).weights.items()
    assert name == "layers.1.feed_forward.w2"
    assert torch.equal(weights.down, tensors[f"{stem}.lora_A.weight"])


@pytest.mark.parametrize("part", ["attention_to_k", "attention_to_out_0"])
def test_musubi_tuners_split_names_are_read(part: str, tmp_path: Path) -> None:
    stem = f"lora_unet_layers_0_{part}"
    tensors = {f"{stem}.lora_down.weight": torch.randn(4, 64), f"{stem}.lora_up.weight": torch.randn(64, 4)}
    save_file(tensors | {f"{stem}.alpha": torch.tensor(2.0)}, tmp_path / "lora.safetensors")
    ((name, weights),) = load_lora(tmp_path / "lora.safetensors", Z_IMAGE_TARGETS).weights.items()
    assert name.replace(".", "_") == f"layers_0_{part}"
    assert weights.alpha == 2.0


def test_merging_into_comfyuis_file_gives_the_networks_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_z_transformer()
    base = {f"model.diffusion_model.{name}": tensor for name, tensor in comfy_state_dict(model.state_dict()).items()}
    save_file(base, tmp_path / "base.safetensors")
    network = inject(model, *BLOCKS, *INPUTS)
    save_adapter(tmp_path / "lora.safetensors", network.weights(), Z_IMAGE_TARGETS, "diffusers")
    flags = ["--model", "base.safetensors", "--lora", "lora.safetensors", "--save_to", "merged.safetensors"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["merge_lora.py", *flags, "--model_type", "z_image"])
    merge_lora.main()
    merged = load_file(tmp_path / "merged.safetensors")
    assert merged.keys() == base.keys()
    bare = {name.removeprefix("model.diffusion_model."): tensor for name, tensor in merged.items()}
    plain = tiny_z_transformer()
    plain.load_state_dict(convert_z_image_transformer_checkpoint_to_diffusers(bare))
    torch.testing.assert_close(run_z(plain), run_z(model), rtol=1e-4, atol=1e-5)
