"""Runs of every kind of adapter: they learn, their files give the trained model, resuming is exact."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file
from torch import Tensor

from library.models.flux.files import FLUX_TARGETS
from library.training.run import Run
from networks.merging.merge import LoraSource, merge_loras
from tests.networks.conftest import comfy_weight
from tests.runs import lora, losses_of, run, same, velocity, write_base, write_dataset

KINDS = ["dora", "lokr", "loha"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("kinds")
    return write_base(folder / "base"), write_dataset(folder / "data", images=4)


def train(files: tuple[Path, Path], output: Path, kind: str, **settings: object) -> Run:
    defaults = {"network_dim": 6, "network_alpha": 3, "learning_rate": 0.02, "save_format": "comfy"}
    return run(*files, output, network_type=kind, **(defaults | settings))


def trained_output(events: Run) -> Tensor:
    return velocity(events.task.transformer.eval())


@pytest.fixture(scope="module", params=KINDS)
def trained(
    request: pytest.FixtureRequest, files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Run]:
    """One whole run of each kind."""
    output = tmp_path_factory.mktemp(request.param)
    settings = {"max_train_steps": 12, "log_every_n_steps": 1, "gradient_checkpointing": True}
    return output, train(files, output, request.param, **settings)


def merged_output(base: Path, file: Path, folder: Path) -> Tensor:
    merge_loras(base, [LoraSource(file, 1.0)], folder, FLUX_TARGETS)
    return velocity(FluxTransformer2DModel.from_pretrained(folder / "transformer").eval())


def test_a_run_learns_and_its_merged_file_is_the_trained_model(
    files: tuple[Path, Path], trained: tuple[Path, Run], tmp_path: Path
) -> None:
    output, events = trained
    seen = losses_of(output)
    # random timesteps: single losses vary, means of a third of the run fall
    assert sum(seen[-4:]) < sum(seen[:4])
    plain = velocity(FluxTransformer2DModel.from_pretrained(files[0] / "transformer").eval())
    moved = (plain - trained_output(events)).abs().max()
    assert moved > 0.02
    merged = merged_output(files[0], output / "lora.safetensors", tmp_path / "merged")
    assert (merged - trained_output(events)).abs().max() < 1e-4 * max(1.0, moved)  # fp32 throughout


def test_comfyui_reads_the_file_as_the_trained_weights(trained: tuple[Path, Run]) -> None:
    output, events = trained
    stems: dict[str, dict[str, Tensor]] = {}
    for key, tensor in lora(output).items():
        stem, _, rest = key.partition(".")
        stems.setdefault(stem, {})[rest] = tensor
    modules = events.task.network.modules
    assert len(stems) == len(modules) > 20
    for name, layer in modules.items():
        # SimpleTuner's naming, which ComfyUI's model_lora_keys_unet maps to the rows of the original weight
        weight = comfy_weight(layer.base.weight, stems["lycoris_" + name.replace(".", "_")])
        x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = x.double() @ weight.t() + layer.bias.double()
            torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-4)  # fp32 layer


def test_diffusers_loads_a_dora(files: tuple[Path, Path], tmp_path: Path) -> None:
    events = train(files, tmp_path / "run", "dora", save_format="diffusers", max_train_steps=8)
    transformer = FluxTransformer2DModel.from_pretrained(files[0] / "transformer")
    transformer.load_lora_adapter(tmp_path / "run", weight_name="lora.safetensors", prefix="transformer")
    difference = (velocity(transformer.eval()) - trained_output(events)).abs().max()
    assert difference < 1e-4  # fp32
    merged = merged_output(files[0], tmp_path / "run" / "lora.safetensors", tmp_path / "merged")
    assert (merged - trained_output(events)).abs().max() < 1e-4


def test_a_start_from_the_weights_learns_and_is_saved_as_a_plain_lora(files: tuple[Path, Path], tmp_path: Path) -> None:
    settings = {"init_lora_weights": "pissa", "save_format": "diffusers", "learning_rate": 1e-3}
    events = train(files, tmp_path / "run", "lora", **settings, save_state=True, save_every_n_steps=2)
    tensors = lora(tmp_path / "run")
    assert {t.shape[0] for key, t in tensors.items() if "lora_A" in key} == {12}  # twice the rank
    transformer = FluxTransformer2DModel.from_pretrained(files[0] / "transformer")
    before = velocity(transformer.eval())
    transformer.load_lora_adapter(tmp_path / "run", weight_name="lora.safetensors", prefix="transformer")
    assert (velocity(transformer.eval()) - trained_output(events)).abs().max() < 1e-4  # fp32
    assert (before - trained_output(events)).abs().max() > 0.01
    events.task.network.set_multiplier(0.0)
    assert (before - trained_output(events)).abs().max() < 1e-5  # the base was never touched
    # the start itself is in the state: a decomposition may differ from one machine to another
    train(files, tmp_path / "rest", "lora", **settings, resume=tmp_path / "run" / "lora-step00000002-state")
    assert same(lora(tmp_path / "rest"), tensors)


def test_rslora_is_saved_with_the_alpha_that_every_program_understands(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    events = train(files, tmp_path / "run", "lora", use_rslora=True, save_format="kohya")
    assert events.task.network.modules["transformer_blocks.0.attn.to_out.0"].scale == 3 / math.sqrt(6)
    alpha = lora(tmp_path / "run")["lora_unet_double_blocks_0_img_attn_proj.alpha"]
    assert float(alpha) == pytest.approx(3 * math.sqrt(6), rel=1e-6)  # alpha / rank is the scale; stored in fp32
    merged = merged_output(files[0], tmp_path / "run" / "lora.safetensors", tmp_path / "merged")
    assert (merged - trained_output(events)).abs().max() < 1e-4


def test_text_encoders_are_adapted_too(files: tuple[Path, Path], tmp_path: Path) -> None:
    train(files, tmp_path / "run", "lokr", text_encoder_lr=0.01, max_train_steps=1)
    keys = load_file(tmp_path / "run" / "lora.safetensors")
    assert "lora_te1_text_model_encoder_layers_0_mlp_fc1.lokr_w1" in keys
    path = tmp_path / "run" / "lora.safetensors"
    report = merge_loras(files[0], [LoraSource(path, 1.0)], tmp_path / "merged", FLUX_TARGETS)
    assert report.changed == len({key.split(".")[0] for key in keys})
