"""LoRAs of Qwen-Image: what is trained, and files that diffusers' pipeline loads to the same output."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import nn

import tools.merge_lora as merge_lora
from library.config.schema import NetworkConfig
from library.errors import UserError
from library.models.flux.files import FLUX_TARGETS
from library.models.qwen_image.files import QWEN_TARGETS
from library.models.registry import lora_targets
from networks.files.adapters import load_lora, save_adapter
from networks.files.base import find_modules, fullest_targets, open_base
from networks.files.weights import LoraWeights
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.networks.files.read_back import assert_read_as_written
from tests.tiny_qwen import run_qwen, tiny_qwen_transformer

EVERYTHING = ("img_mod_dim=3", "txt_mod_dim=2", "img_in_dim=2", "txt_in_dim=2", "time_in_dim=2", "img_mlp_dim=6")


def inject(model: nn.Module, *network_args: str) -> AdapterNetwork:
    """Inject a LoRA of rank 4 and alpha 3, and give it values."""
    config = NetworkConfig(network_dim=4, network_alpha=3, network_args=list(network_args))
    network = inject_adapter(model, parse_network_args(config, QWEN_TARGETS), QWEN_TARGETS, seed=0)
    random = torch.Generator().manual_seed(1)
    for layer in network.modules.values():
        layer.lora_B.weight.data.normal_(std=0.1, generator=random)
    return network


def reloaded(path: Path) -> QwenImageTransformer2DModel:
    """Return the tiny transformer with the file loaded by diffusers' pipeline."""
    pipeline = QwenImagePipeline(None, None, None, None, tiny_qwen_transformer())
    pipeline.load_lora_weights(str(path))
    return pipeline.transformer


def test_attention_and_mlp_are_trained_by_default_and_modulation_where_asked() -> None:
    network = inject(tiny_qwen_transformer())
    kinds = {name: QWEN_TARGETS.group_of(name) for name in network.modules}
    assert {kind.name for kind in kinds.values() if kind} == {"img_attn", "txt_attn", "img_mlp", "txt_mlp"}
    assert len(network.modules) == 2 * 12 - 4
    wide = inject(tiny_qwen_transformer(), *EVERYTHING)
    assert len(wide.modules) == 2 * 14 - 4 + 4
    assert wide.modules["transformer_blocks.1.txt_mod.1"].rank == 2
    assert len(inject(tiny_qwen_transformer(), "train_block_indices=0").modules) == 12


@torch.enable_grad()
def test_exactly_the_layers_without_a_gradient_are_left_out() -> None:
    """The independent answer is autograd's: which of all linear layers in the blocks the loss reaches."""
    model = tiny_qwen_transformer(blocks=3)
    run_qwen(model).square().sum().backward()
    linears = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    reached = {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}
    dead = {name.removesuffix(".weight") for name in linears if name not in reached}
    assert len(dead) == 4
    assert all(name.startswith("transformer_blocks.2.") for name in dead)
    everything = {name for name in linears if not re.match(r"(proj_out|norm_out)", name)}
    injected = set(inject(tiny_qwen_transformer(blocks=3), *EVERYTHING).modules)
    assert injected == {name.removesuffix(".weight") for name in everything} - dead


@pytest.mark.parametrize("save_format", ["diffusers", "kohya", "comfy"])
@pytest.mark.parametrize("network_args", [(), EVERYTHING], ids=["default", "everything"])
def test_diffusers_computes_from_every_format_what_our_network_computes(
    save_format: str, network_args: tuple[str, ...], tmp_path: Path
) -> None:
    model = tiny_qwen_transformer()
    network = inject(model, *network_args)
    save_adapter(tmp_path / "lora.safetensors", network.weights(), QWEN_TARGETS, save_format)
    with torch.no_grad():
        ours, theirs = run_qwen(model), run_qwen(reloaded(tmp_path / "lora.safetensors"))
        plain = run_qwen(tiny_qwen_transformer())
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)  # peft multiplies in another order
    assert (ours - plain).abs().max() > 0.01
    assert_read_as_written(tmp_path / "lora.safetensors", network, QWEN_TARGETS, save_format)


def test_files_have_the_published_keys(tmp_path: Path) -> None:
    module = {"transformer_blocks.0.attn.to_out.0": LoraWeights(torch.ones(2, 64), torch.ones(64, 2), 1.0)}
    wanted = {
        "diffusers": "transformer.transformer_blocks.0.attn.to_out.0.lora_A.weight",
        "kohya": "lora_unet_transformer_blocks_0_attn_to_out_0.lora_down.weight",
        "comfy": "diffusion_model.transformer_blocks.0.attn.to_out.0.lora_down.weight",
    }
    for save_format, key in wanted.items():
        save_adapter(tmp_path / save_format, module, QWEN_TARGETS, save_format)
        assert key in load_file(tmp_path / save_format)


# as in lightx2v/Qwen-Image-Lightning, DiffSynth-Studio's LoRAs, AI toolkit's and musubi-tuner's
PUBLISHED = {
    "lightning": ("transformer_blocks.1.attn.add_k_proj{}.weight", ("lora_down", "lora_up")),
    "diffsynth": ("transformer_blocks.1.attn.add_k_proj{}.default.weight", ("lora_A", "lora_B")),
    "ai-toolkit": ("diffusion_model.transformer_blocks.1.attn.add_k_proj{}.weight", ("lora_A", "lora_B")),
    "musubi-tuner": ("lora_unet_transformer_blocks_1_attn_add_k_proj{}.weight", ("lora_down", "lora_up")),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_layouts_are_read(kind: str, tmp_path: Path) -> None:
    template, (down, up) = PUBLISHED[kind]
    random = torch.Generator().manual_seed(2)
    tensors = {
        template.format(f".{down}"): torch.randn(4, 64, generator=random),
        template.format(f".{up}"): torch.randn(64, 4, generator=random),
    }
    alpha = 2.0 if down == "lora_down" else 4.0
    if down == "lora_down":
        tensors[template.format("").removesuffix(".weight") + ".alpha"] = torch.tensor(alpha)
    save_file(tensors, tmp_path / "lora.safetensors")
    (weights,) = load_lora(tmp_path / "lora.safetensors", QWEN_TARGETS).weights.items()
    assert weights[0] == "transformer_blocks.1.attn.add_k_proj"
    assert torch.equal(weights[1].down, tensors[template.format(f".{down}")])
    assert weights[1].alpha == alpha


def test_training_goes_on_from_a_file_that_has_the_dead_layers_too(tmp_path: Path) -> None:
    """musubi-tuner trains them to nothing: their lora_up stays zero."""
    model = tiny_qwen_transformer()
    network = inject(model)
    weights = network.weights()
    dead = LoraWeights(torch.ones(4, 64), torch.zeros(64, 4), 3.0)
    save_adapter(tmp_path / "a", weights | {"transformer_blocks.1.attn.to_add_out": dead}, QWEN_TARGETS, "kohya")
    fresh = inject(tiny_qwen_transformer())
    fresh.load(load_lora(tmp_path / "a", QWEN_TARGETS).weights, "a")
    assert all(torch.equal(fresh.weights()[name].up, weights[name].up) for name in weights)


def test_merging_into_comfyuis_file_gives_the_networks_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_qwen_transformer()
    names = {f"model.diffusion_model.{name}": tensor for name, tensor in model.state_dict().items()}
    save_file(names, tmp_path / "base.safetensors")
    network = inject(model, *EVERYTHING)
    save_adapter(tmp_path / "lora.safetensors", network.weights(), QWEN_TARGETS, "kohya")
    flags = ["--model", "base.safetensors", "--lora", "lora.safetensors", "--save_to", "merged.safetensors"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["merge_lora.py", *flags, "--model_type", "qwen_image"])
    merge_lora.main()
    merged = load_file(tmp_path / "merged.safetensors")
    plain = tiny_qwen_transformer()
    plain.load_state_dict({name.removeprefix("model.diffusion_model."): tensor for name, tensor in merged.items()})
    with torch.no_grad():
        torch.testing.assert_close(run_qwen(plain), run_qwen(model), rtol=1e-4, atol=1e-5)


def test_edit_models_have_the_same_row() -> None:
    for family in ("qwen_image_edit", "qwen_image_edit_plus"):
        assert lora_targets()[family].family == family
        assert lora_targets()[family].layer_groups is QWEN_TARGETS.layer_groups
        assert lora_targets()[family].kohya_module == "networks.lora_qwen_image"


def test_a_lora_and_a_model_of_another_family_are_named(tmp_path: Path) -> None:
    layer = {"transformer_blocks.0.img_mlp.net.2": LoraWeights(torch.ones(1, 4), torch.ones(4, 1), 1.0)}
    save_adapter(tmp_path / "a.safetensors", layer, QWEN_TARGETS)
    with pytest.raises(UserError, match=r"a.safetensors: is a LoRA of qwen_image, not of flux; set --model_type qwen"):
        load_lora(tmp_path / "a.safetensors", FLUX_TARGETS)
    tiny_qwen_transformer(1).save_pretrained(tmp_path / "base")  # its attention has FLUX's names
    files = open_base(tmp_path / "base").weights
    with pytest.raises(UserError, match=r"is a model of qwen_image, not of flux; set --model_type qwen_image"):
        find_modules(files, FLUX_TARGETS.keys, "flux")
    assert [row.family for row in fullest_targets(files)] == ["qwen_image"]
