"""LoRAs of FLUX.3: what is trained, the keys that programs know, and files that diffusers' pipeline loads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from diffusers import Flux3ModularPipeline, Flux3Transformer2DModel
from diffusers.loaders.single_file_utils import convert_flux3_transformer_checkpoint_to_diffusers
from diffusers.modular_pipelines.flux3.modular_blocks_flux3 import Flux3CoreDenoiseStep
from safetensors.torch import load_file, save_file
from torch import nn

import tools.merge_lora as merge_lora
from library.config.schema import NetworkConfig
from library.errors import UserError
from library.models.flux3.files import FLUX3_EDIT_TARGETS, FLUX3_TARGETS
from library.models.layer_names import LoraTargets
from networks.files.adapters import load_lora, save_adapter
from networks.files.readers import check_readers
from networks.network import AdapterNetwork, inject_adapter
from networks.options import parse_network_args
from tests.networks.files.read_back import assert_read_as_written
from tests.tiny_flux3 import bfl_name, run_flux3, run_flux3_edit, tiny_flux3_transformer

MODULATION = ("img_mod_dim=3", "txt_mod_dim=2")
INPUTS = ("img_in_dim=2", "txt_in_dim=2", "time_in_dim=2")
OF_REFERENCES = ("ref_mod_dim=2", "ref_in_dim=2")


def inject(model: nn.Module, *network_args: str, targets: LoraTargets = FLUX3_TARGETS) -> AdapterNetwork:
    """Inject a LoRA of rank 4 and alpha 3, and give it values."""
    config = NetworkConfig(network_dim=4, network_alpha=3, network_args=list(network_args))
    network = inject_adapter(model, parse_network_args(config, targets), targets, seed=0)
    random = torch.Generator().manual_seed(1)
    for layer in network.modules.values():
        layer.lora_B.weight.data.normal_(std=0.1, generator=random)
    return network


def reloaded(path: Path) -> Flux3Transformer2DModel:
    """Return the tiny transformer with the file loaded by diffusers' pipeline."""
    pipeline = Flux3ModularPipeline(blocks=Flux3CoreDenoiseStep())
    pipeline.update_components(transformer=tiny_flux3_transformer())
    pipeline.load_lora_weights(str(path))
    return pipeline.transformer


def test_blocks_are_trained_by_default_and_the_rest_where_asked() -> None:
    network = inject(tiny_flux3_transformer())
    assert len(network.modules) == 3 * 2 * 6  # image, text, joint: two blocks each
    assert not any("image_cond" in name or "modulation" in name for name in network.modules)
    edits = inject(tiny_flux3_transformer(), *MODULATION, *INPUTS, *OF_REFERENCES, targets=FLUX3_EDIT_TARGETS)
    assert len(edits.modules) == 4 * 2 * 6 + 6 + 2 + 1 + 2
    assert edits.modules["early_stream_modulations.image_cond.linear"].rank == 2
    assert len(inject(tiny_flux3_transformer(), "train_single_block_indices=0").modules) == (2 + 2 + 1) * 6
    assert len(inject(tiny_flux3_transformer(), "train_mode_block_indices=1").modules) == (1 + 1 + 2) * 6


@pytest.mark.parametrize("save_format", ["diffusers", "comfy"])
@pytest.mark.parametrize("targets", [FLUX3_TARGETS, FLUX3_EDIT_TARGETS], ids=["text", "edit"])
def test_diffusers_computes_from_both_formats_what_our_network_computes(
    save_format: str, targets: LoraTargets, tmp_path: Path
) -> None:
    model, run = tiny_flux3_transformer(), run_flux3 if targets is FLUX3_TARGETS else run_flux3_edit
    network = inject(model, targets=targets)
    save_adapter(tmp_path / "lora.safetensors", network.weights(), targets, save_format)
    ours, theirs = run(model), run(reloaded(tmp_path / "lora.safetensors"))
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)  # peft multiplies in another order
    assert (ours - run(tiny_flux3_transformer())).abs().max() > 0.01
    assert_read_as_written(tmp_path / "lora.safetensors", network, targets, save_format)
    check_readers(["diffusers"], list(network.modules), targets, save_format, "lora")


def test_modulation_and_inputs_load_from_diffusers_layout_alone(tmp_path: Path) -> None:
    model = tiny_flux3_transformer()
    network = inject(model, *MODULATION, *INPUTS, *OF_REFERENCES, targets=FLUX3_EDIT_TARGETS)
    for save_format in ("diffusers", "comfy"):
        save_adapter(tmp_path / f"{save_format}.safetensors", network.weights(), FLUX3_EDIT_TARGETS, save_format)
    theirs = run_flux3_edit(reloaded(tmp_path / "diffusers.safetensors"))
    torch.testing.assert_close(theirs, run_flux3_edit(model), rtol=1e-4, atol=1e-5)
    loaded = {name for name, _ in reloaded(tmp_path / "comfy.safetensors").named_parameters() if "lora_A" in name}
    assert {name.split(".lora_A")[0] for name in loaded} == {name for name in network.modules if "_blocks." in name}
    check_readers(["diffusers"], list(network.modules), FLUX3_EDIT_TARGETS, "diffusers", "lora")
    check_readers(["comfyui"], list(network.modules), FLUX3_EDIT_TARGETS, "comfy", "lora")
    with pytest.raises(UserError, match="diffusers reads no LoRA of .* set save_format = diffusers"):
        check_readers(["diffusers"], list(network.modules), FLUX3_EDIT_TARGETS, "comfy", "lora")


def test_diffusers_refuses_a_file_with_alphas(tmp_path: Path) -> None:
    """The reason for the comfy layout's form: kohya's spelling of the same names does not load."""
    network = inject(tiny_flux3_transformer())
    save_adapter(tmp_path / "lora.safetensors", network.weights(), FLUX3_TARGETS, "comfy")
    tensors = load_file(tmp_path / "lora.safetensors")
    stem = "diffusion_model.single_blocks.0.q_proj"
    save_file(tensors | {f"{stem}.alpha": torch.tensor(3.0)}, tmp_path / "alpha.safetensors")
    with pytest.raises(ValueError, match="Invalid LoRA checkpoint"):
        reloaded(tmp_path / "alpha.safetensors")
    with pytest.raises(UserError, match="diffusers reads no LoRA of .* set save_format = diffusers or comfy"):
        check_readers(["diffusers"], list(network.modules), FLUX3_TARGETS, "kohya", "lora")


# ComfyUI's comfy/lora.py, of every model: the file's own names below diffusion_model., with underscores below
# lora_unet_.
@pytest.mark.parametrize("save_format", ["kohya", "comfy"])
def test_files_have_the_keys_that_comfyui_knows(save_format: str, tmp_path: Path) -> None:
    network = inject(tiny_flux3_transformer(), *MODULATION, *INPUTS, *OF_REFERENCES, targets=FLUX3_EDIT_TARGETS)
    save_adapter(tmp_path / "lora.safetensors", network.weights(), FLUX3_EDIT_TARGETS, save_format)
    names = [bfl_name(f"{name}.weight").removesuffix(".weight") for name in network.modules]
    known = {f"diffusion_model.{name}" for name in names}
    known = known if save_format == "comfy" else {f"lora_unet_{name.replace('.', '_')}" for name in names}
    written = load_file(tmp_path / "lora.safetensors")
    assert {key.split(".lora_")[0].removesuffix(".alpha") for key in written} == known
    ends = {"comfy": ("A.weight", "B.weight"), "kohya": ("down.weight", "up.weight")}[save_format]
    assert all(f"{stem}.lora_{end}" in written for stem in known for end in ends)


@pytest.mark.parametrize(
    "stem",
    [
        "diffusion_model.content_mode_blocks.image.1.mlp_out",
        "lora_unet_content_mode_blocks_image_1_mlp_out",
        "transformer.mode_blocks.image.1.ff.linear_out",
        "base_model.model.mode_blocks.image.1.ff.linear_out",
        "mode_blocks.image.1.ff.linear_out",
    ],
)
def test_published_layouts_are_read(stem: str, tmp_path: Path) -> None:
    tensors = {f"{stem}.lora_A.weight": torch.randn(4, 192), f"{stem}.lora_B.weight": torch.randn(64, 4)}
    save_file(tensors, tmp_path / "lora.safetensors")
    ((name, weights),) = load_lora(tmp_path / "lora.safetensors", FLUX3_TARGETS).weights.items()
    assert name == "mode_blocks.image.1.ff.linear_out"
    assert torch.equal(weights.down, tensors[f"{stem}.lora_A.weight"])


def test_merging_into_bfls_file_gives_the_networks_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_flux3_transformer()
    base = {f"model.diffusion_model.{bfl_name(name)}": tensor for name, tensor in model.state_dict().items()}
    last = "model.diffusion_model.final_layer.image.adaLN_modulation.1.weight"
    base[last] = torch.cat(base[last].chunk(2)[::-1])
    save_file(base, tmp_path / "base.safetensors")
    network = inject(model, *MODULATION, *INPUTS, *OF_REFERENCES, targets=FLUX3_EDIT_TARGETS)
    save_adapter(tmp_path / "lora.safetensors", network.weights(), FLUX3_EDIT_TARGETS, "diffusers")
    flags = ["--model", "base.safetensors", "--lora", "lora.safetensors", "--save_to", "merged.safetensors"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["merge_lora.py", *flags, "--model_type", "flux3_klein_edit"])
    merge_lora.main()
    merged = load_file(tmp_path / "merged.safetensors")
    assert merged.keys() == base.keys()
    bare = {name.removeprefix("model.diffusion_model."): tensor for name, tensor in merged.items()}
    plain = tiny_flux3_transformer()
    plain.load_state_dict(convert_flux3_transformer_checkpoint_to_diffusers(bare))
    torch.testing.assert_close(run_flux3_edit(plain), run_flux3_edit(model), rtol=1e-4, atol=1e-5)
