"""Quantised files of Krea 2 in the published names: every format that is written here, and GGUF."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tools.quantize_model as quantize_model
from library.models.family import Family
from library.models.family_by_name import model_family
from library.precision.linear import QuantizedLinear
from tests.precision.files.gguf_files import read_by_the_package, write_gguf
from tests.tiny_krea2 import save_krea2_split_files, tiny_krea2_inputs, tiny_krea2_pipeline
from tests.tiny_qwen import SplitFiles


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SplitFiles:
    folder = tmp_path_factory.mktemp("krea2")
    return save_krea2_split_files(tiny_krea2_pipeline(folder / "pipeline"), folder / "files")


def velocity(family: Family) -> tuple[Tensor, int]:
    """Return the velocity of the tiny inputs, and how many layers are quantised."""
    transformer, inputs = family.load_transformer(torch.float32), tiny_krea2_inputs()
    quantised = sum(isinstance(layer, QuantizedLinear) for layer in transformer.modules())
    with torch.no_grad():
        text = {"prompt_embeds": inputs["prompt_embeds"]}
        return family.predict_velocity(transformer, inputs["latents"], inputs["sigmas"], text), quantised


# What rounding may do to the velocity, from the bits of the mantissa: e4m3 has 4, int8 by rows about 7, e2m1 2.
FORMATS = {
    "plain": (["--layout", "plain"], 0.1),
    "comfy_scaled": (["--layout", "comfy_scaled"], 0.1),
    "comfy_quant": (["--layout", "comfy_quant"], 0.1),
    "rows": (["--layout", "rows"], 0.1),
    "musubi": (["--layout", "musubi"], 0.1),
    "int8": (["--scheme", "int8"], 0.05),
    "int8_row": (["--scheme", "int8_row"], 0.02),
    "nvfp4": (["--scheme", "nvfp4"], 0.3),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_file_is_near_the_plain_one(
    name: str, files: SplitFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, most = FORMATS[name]
    path = tmp_path / "quantised.safetensors"
    monkeypatch.setattr(sys, "argv", ["", "--model", str(files.transformer), "--save_to", str(path), *flags])
    quantize_model.main()
    exact, none = velocity(model_family(files.model_config()))
    found, quantised = velocity(model_family(files.model_config(pretrained_model_name_or_path=str(path))))
    # the eight layers of both blocks; the text's transformer stays high, as in musubi-tuner
    assert (none, quantised) == (0, 16)
    assert 0 < (found - exact).norm() / exact.norm() < most


def test_a_gguf_file_is_the_model_of_its_numbers(files: SplitFiles, tmp_path: Path) -> None:
    state = load_file(files.transformer)

    def kinds(name: str, tensor: Tensor) -> str:
        return "Q8_0" if name.startswith("blocks.") and tensor.ndim > 1 and tensor.shape[1] % 32 == 0 else "F32"

    path = write_gguf(tmp_path / "krea2.gguf", state, kinds, architecture="krea2")
    numbers = {name: tensor.view(state[name].shape) for name, tensor in read_by_the_package(path).items()}
    save_file(numbers, tmp_path / "plain.safetensors")
    ours, theirs = (
        velocity(model_family(files.model_config(pretrained_model_name_or_path=str(file))))
        for file in (path, tmp_path / "plain.safetensors")
    )
    assert (ours[1], theirs[1]) == (16, 0)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-5)
