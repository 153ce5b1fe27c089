"""quantize_model.py --compensated: diffusers computes with what was written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file
from torch import Tensor

import tools.quantize_model as quantize_model
from tests.runs import ROOT, call, pipeline_forward

BASE = ROOT / "assets" / "tiny-flux"


def quantize(folder: Path, name: str, **flags: object) -> dict[str, Tensor]:
    """Run the tool into the plain layout, whose numbers need no scales; return the file's tensors."""
    words = [w for key, value in flags.items() for w in (f"--{key}", *([] if value is True else [str(value)]))]
    call(quantize_model, "--model", BASE, "--save_to", folder / name, "--layout", "plain", *words)
    return load_file(folder / name / "diffusion_pytorch_model.safetensors")


def velocity(tensors: dict[str, Tensor]) -> Tensor:
    """Return diffusers' output on inputs like those of sampling: noise, and a caption's embeddings stand-in."""
    model = FluxTransformer2DModel.from_pretrained(BASE / "transformer").eval()
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    random = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 16, 16, 16, generator=random)
    text = {"prompt_embeds": torch.zeros(2, 8, 64), "pooled_prompt_embeds": torch.zeros(2, 64)}
    with torch.no_grad():
        return pipeline_forward(model, latents, torch.tensor([0.9, 0.9]), text, 3.5)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("data") / "data"
    shutil.copytree(ROOT / "assets" / "demo_dataset", folder)
    return {"dataset_config": folder / "dataset.toml", "calibration_images": 3, "calibration_sigmas": 0.9}


def test_compensated_rounding_takes_error_off_at_the_same_size(calibration: dict[str, object], tmp_path: Path) -> None:
    reference = velocity(load_file(BASE / "transformer" / "diffusion_pytorch_model.safetensors"))
    files = {
        "nearest": quantize(tmp_path, "nearest"),
        "compensated": quantize(tmp_path, "compensated", compensated=True, **calibration),
    }
    error = {name: float((velocity(tensors) - reference).norm()) for name, tensors in files.items()}
    assert error["compensated"] < 0.8 * error["nearest"]
    sizes = {name: sum(t.numel() * t.element_size() for t in tensors.values()) for name, tensors in files.items()}
    assert sizes["compensated"] == sizes["nearest"]


@pytest.mark.parametrize(
    ("message", "flags"),
    [
        ("give both or neither", {"compensated": True}),
        ("give both or neither", {"dataset_config": "x.toml"}),
        ("choose one", {"compensated": True, "dataset_config": "x.toml", "rounding": "stochastic"}),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    message: str, flags: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        quantize(tmp_path, "out", **flags)
    assert message in capsys.readouterr().err
