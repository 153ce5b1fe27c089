"""LoRAs of Qwen-Image-2.1: what is trained, the keys that programs know, and files that diffusers' pipeline loads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from diffusers import QwenImage21Pipeline, QwenImage21Transformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tools.merge_lora as merge_lora
from library.config.schema import NetworkConfig
from library.errors import UserError
from library.models.qwen_image_21.files import QWEN_21_TARGETS
from library.models.qwen_image_21.model import optimise_forward
from networks.files.adapters import load_lora, save_adapter
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.networks.files.read_back import assert_read_as_written
from tests.tiny_qwen import tiny_qwen_tokenizer
from tests.tiny_qwen_21 import TinyProcessor, comfy_21_state_dict, run_21, tiny_21_transformer

EVERYTHING = ("mod_dim=3", "mlp_dim=6", "img_in_dim=2", "txt_in_dim=2", "time_in_dim=2")


def inject(model: nn.Module, *network_args: str) -> AdapterNetwork:
    """Inject a LoRA of rank 4 and alpha 3, and give it values."""
    config = NetworkConfig(network_dim=4, network_alpha=3, network_args=list(network_args))
    network = inject_adapter(model, parse_network_args(config, QWEN_21_TARGETS), QWEN_21_TARGETS, seed=0)
    random = torch.Generator().manual_seed(1)
    for layer in network.modules.values():
        layer.lora_B.weight.data.normal_(std=0.1, generator=random)
    return network


def reloaded(path: Path) -> QwenImage21Transformer2DModel:
    """Return the tiny transformer with the file loaded by diffusers' pipeline."""
    processor = TinyProcessor(tiny_qwen_tokenizer())
    pipeline = QwenImage21Pipeline(None, None, None, processor, tiny_21_transformer())  # type: ignore[arg-type]
    pipeline.load_lora_weights(str(path))
    return pipeline.transformer


def by_comfyui(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of ComfyUI's model with a LoRA merged into them, by its rules (``comfy/lora.py``)."""
    weights = comfy_21_state_dict(tiny_21_transformer().state_dict())
    places: dict[str, tuple[str, slice]] = {}
    for key, weight in weights.items():
        name = key.removesuffix(".weight")
        places[f"diffusion_model.{name}"] = places[f"lora_unet_{name.replace('.', '_')}"] = key, slice(None)
        halves = {name: slice(None)}
        if name.endswith(".img_mlp.gate_up"):
            half = weight.shape[0] // 2
            halves = {
                name.replace("gate_up", "gate_layer"): slice(half),
                name.replace("gate_up", "proj"): slice(half, None),
            }
        for known, rows in halves.items():
            for prefix in ("", "transformer."):
                places[prefix + known] = key, rows
    for key, down in tensors.items():
        for a, b in (("lora_down", "lora_up"), ("lora_A", "lora_B")):
            stem = key.removesuffix(f".{a}.weight")
            if stem != key and stem in places:
                target, rows = places[stem]
                scale = float(tensors.get(f"{stem}.alpha", torch.tensor(len(down)))) / len(down)
                weights[target][rows] += scale * tensors[f"{stem}.{b}.weight"] @ down
    return weights


def test_attention_and_mlp_are_trained_by_default_and_the_rest_where_asked() -> None:
    network = inject(tiny_21_transformer())
    assert len(network.modules) == 2 * 7
    assert all(name.startswith("transformer_blocks.") for name in network.modules)
    wide = inject(tiny_21_transformer(), *EVERYTHING)
    assert len(wide.modules) == 2 * 7 + 1 + 1 + 2 + 2
    assert wide.modules["modulation.1"].rank == 3
    assert len(inject(tiny_21_transformer(), "train_block_indices=0").modules) == 7


def test_every_layer_of_a_lora_has_a_gradient() -> None:
    """Text goes through the last block's layers too, but these are the image's: DDP waits for no other gradient."""
    model = optimise_forward(tiny_21_transformer().requires_grad_(False))
    network = inject(model, *EVERYTHING)
    run_21(model).square().sum().backward()
    for name, layer in network.modules.items():
        for weight in (layer.lora_A.weight, layer.lora_B.weight):
            assert weight.grad is not None, name
            assert weight.grad.abs().max() > 0, name


@pytest.mark.parametrize("network_args", [(), EVERYTHING], ids=["default", "everything"])
def test_diffusers_computes_what_our_network_computes(network_args: tuple[str, ...], tmp_path: Path) -> None:
    model = optimise_forward(tiny_21_transformer())
    network = inject(model, *network_args)
    save_adapter(tmp_path / "lora.safetensors", network.weights(), QWEN_21_TARGETS, "diffusers")
    with torch.no_grad():
        ours, theirs = run_21(model), run_21(reloaded(tmp_path / "lora.safetensors"))
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)  # peft multiplies in another order
        assert (ours - run_21(tiny_21_transformer())).abs().max() > 0.01
    assert_read_as_written(tmp_path / "lora.safetensors", network, QWEN_21_TARGETS, "diffusers")


@pytest.mark.parametrize("save_format", ["diffusers", "comfy"])
@pytest.mark.parametrize("network_args", [(), EVERYTHING], ids=["default", "everything"])
def test_comfyui_computes_what_our_network_computes(
    save_format: str, network_args: tuple[str, ...], tmp_path: Path
) -> None:
    model = tiny_21_transformer()
    network = inject(model, *network_args)
    save_adapter(tmp_path / "lora.safetensors", network.weights(), QWEN_21_TARGETS, save_format)
    tensors = load_file(tmp_path / "lora.safetensors")
    if save_format == "comfy":
        gate_up = "diffusion_model.transformer_blocks.0.img_mlp.gate_up"
        assert f"{gate_up}.lora_down.weight" in tensors
        assert not any("gate_layer" in key or "img_mlp.proj" in key for key in tensors)
    theirs = tiny_21_transformer()
    merged = by_comfyui(tensors)
    for key in [key for key in merged if "gate_up" in key]:
        gate, factor = merged.pop(key).chunk(2)
        merged |= {key.replace("gate_up", "gate_layer"): gate, key.replace("gate_up", "proj"): factor}
    theirs.load_state_dict(merged)
    with torch.no_grad():
        torch.testing.assert_close(run_21(theirs), run_21(model), rtol=1e-4, atol=1e-5)
    assert_read_as_written(tmp_path / "lora.safetensors", network, QWEN_21_TARGETS, save_format)


def test_kohyas_files_have_diffusers_names_with_underscores(tmp_path: Path) -> None:
    """As musubi-tuner writes of every Linear in its model, which has diffusers' names."""
    network = inject(tiny_21_transformer(), *EVERYTHING)
    save_adapter(tmp_path / "lora.safetensors", network.weights(), QWEN_21_TARGETS, "kohya")
    stems = {key.split(".")[0] for key in load_file(tmp_path / "lora.safetensors")}
    linears = {name for name, module in tiny_21_transformer().named_modules() if isinstance(module, nn.Linear)}
    assert stems == {f"lora_unet_{name.replace('.', '_')}" for name in linears - {"proj_out", "norm_out.linear"}}
    assert_read_as_written(tmp_path / "lora.safetensors", network, QWEN_21_TARGETS, "kohya")


@pytest.mark.parametrize(
    "stem",
    [
        "diffusion_model.transformer_blocks.1.img_mlp.out",  # AI toolkit
        "lora_unet_transformer_blocks_1_img_mlp_out",
        "base_model.model.transformer_blocks.1.img_mlp.out",
        "transformer.transformer_blocks.1.img_mlp.out",
        "transformer_blocks.1.img_mlp.out",
    ],
)
def test_published_layouts_are_read(stem: str, tmp_path: Path) -> None:
    tensors = {f"{stem}.lora_A.weight": torch.randn(4, 192), f"{stem}.lora_B.weight": torch.randn(64, 4)}
    save_file(tensors, tmp_path / "lora.safetensors")
    ((name, weights),) = load_lora(tmp_path / "lora.safetensors", QWEN_21_TARGETS).weights.items()
    assert name == "transformer_blocks.1.img_mlp.out"
    assert torch.equal(weights.down, tensors[f"{stem}.lora_A.weight"])


def test_a_fused_lora_is_one_of_each_half_and_one_of_another_size_is_refused(tmp_path: Path) -> None:
    stem = "diffusion_model.transformer_blocks.0.img_mlp.gate_up"
    a, b = torch.randn(4, 64), torch.randn(2 * 192, 4)
    save_file({f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}, tmp_path / "lora.safetensors")
    weights = load_lora(tmp_path / "lora.safetensors", QWEN_21_TARGETS).weights
    assert weights.keys() == {f"transformer_blocks.0.img_mlp.{half}" for half in ("gate_layer", "proj")}
    assert torch.equal(weights["transformer_blocks.0.img_mlp.gate_layer"].up, b[:192])
    assert torch.equal(weights["transformer_blocks.0.img_mlp.proj"].up, b[192:])
    wrong = {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": torch.randn(300, 4)}
    save_file(wrong, tmp_path / "lora.safetensors")
    with pytest.raises(UserError, match="gate_up.*300"):
        load_lora(tmp_path / "lora.safetensors", QWEN_21_TARGETS)


@pytest.mark.parametrize("fused", [True, False])
def test_merging_into_comfyuis_file_gives_the_networks_output(
    fused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_21_transformer()
    state = comfy_21_state_dict(model.state_dict(), fused)
    base = {f"model.diffusion_model.{name}": tensor for name, tensor in state.items()}
    save_file(base, tmp_path / "base.safetensors")
    network = inject(model, *EVERYTHING)
    save_adapter(tmp_path / "lora.safetensors", network.weights(), QWEN_21_TARGETS, "diffusers")
    flags = ["--model", "base.safetensors", "--lora", "lora.safetensors", "--save_to", "merged.safetensors"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["merge_lora.py", *flags, "--model_type", "qwen_image_21"])
    merge_lora.main()
    merged = load_file(tmp_path / "merged.safetensors")
    assert merged.keys() == base.keys()
    bare = {name.removeprefix("model.diffusion_model."): tensor for name, tensor in merged.items()}
    for key in [key for key in bare if "gate_up" in key]:
        gate, factor = bare.pop(key).chunk(2)
        bare |= {key.replace("gate_up", "gate_layer"): gate, key.replace("gate_up", "proj"): factor}
    plain = tiny_21_transformer()
    plain.load_state_dict(bare)
    with torch.no_grad():
        torch.testing.assert_close(run_21(plain), run_21(model), rtol=1e-4, atol=1e-5)
