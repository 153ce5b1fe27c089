"""FLUX.2 from quantised files in BFL's names: stacked q, k, v of double blocks, fused layers of single blocks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tools.quantize_model as quantize_model
from library.models.family_by_name import model_family
from library.precision.linear import QuantizedLinear
from tests.precision.files.gguf_files import read_by_the_package, write_gguf
from tests.tiny_flux2 import save_flux2_files, tiny_flux2_inputs, tiny_flux2_pipeline
from tests.tiny_qwen import SplitFiles


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SplitFiles:
    folder = tmp_path_factory.mktemp("flux2")
    return save_flux2_files(tiny_flux2_pipeline(folder / "pipeline", single_blocks=1, heads=8), folder / "files")


def loaded(files: SplitFiles, path: Path) -> tuple[Any, Tensor, int]:
    """Return the transformer in ``path``, its velocity, and how many layers are quantised in memory."""
    family = model_family(files.model_config(pretrained_model_name_or_path=str(path)))
    transformer = family.load_transformer(torch.float32)
    inputs = tiny_flux2_inputs()
    with torch.no_grad():
        text = {"prompt_embeds": inputs["prompt_embeds"]}
        velocity = family.predict_velocity(transformer, inputs["latents"], inputs["sigmas"], text)
    return transformer, velocity, sum(isinstance(module, QuantizedLinear) for module in transformer.modules())


def test_a_gguf_file_is_the_model_of_its_numbers(files: SplitFiles, tmp_path: Path) -> None:
    state = load_file(files.transformer)

    def kinds(name: str, tensor: Tensor) -> str:
        return "Q8_0" if "_blocks." in name and tensor.ndim > 1 else "F16"

    path = write_gguf(tmp_path / "flux2.gguf", state, kinds, architecture="flux")
    numbers = {name: tensor.view(state[name].shape) for name, tensor in read_by_the_package(path).items()}
    save_file(numbers, tmp_path / "plain.safetensors")
    own, _, count = loaded(files, path)
    plain, _, _ = loaded(files, tmp_path / "plain.safetensors")
    assert count == 12 + 2
    for name, layer in own.named_modules():
        if isinstance(layer, QuantizedLinear):
            assert torch.equal(layer.dequantized(torch.float32), plain.get_submodule(name).weight), name


# of the velocity; a weight in e4m3 is off by 2.6 % (rms), in int8 by row 0.6, in nvfp4 by about 9
FORMATS = {
    ("comfy_scaled", "tensor"): 0.1,
    ("comfy_quant", "tensor"): 0.1,
    ("musubi", "block64"): 0.1,
    ("comfy_quant", "int8_convrot"): 0.03,
    ("comfy_quant", "nvfp4"): 0.3,
}


@pytest.mark.parametrize(("layout", "scheme"), FORMATS)
def test_a_quantised_file_trains_as_the_model_it_was_made_of(
    files: SplitFiles, layout: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "small.safetensors"
    words = ["--model", str(files.transformer), "--save_to", str(path), "--layout", layout, "--scheme", scheme]
    monkeypatch.setattr(sys, "argv", ["quantize_model.py", *words])
    quantize_model.main()
    _, exact, _ = loaded(files, files.transformer)
    _, velocity, count = loaded(files, path)
    # 12 of the double block, 2 of the single one, the three modulations; inputs and the end stay high
    assert count == 12 + 2 + 3
    error = (velocity - exact).norm() / exact.norm()
    assert 0 < error < FORMATS[layout, scheme]
