"""Z-Image from a GGUF file: quantised weights, tokens of one row as vectors."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from library.config.schema import ModelConfig
from library.models.z_image.spec import ZImageFamily
from library.precision.linear import QuantizedLinear
from tests.precision.files.gguf_files import read_by_the_package, write_gguf
from tests.tiny_z_image import tiny_z_pipeline


def test_a_file_that_llama_quantize_wrote_is_the_model_of_its_numbers(tmp_path: Path) -> None:
    pipeline = tiny_z_pipeline(tmp_path / "pipeline")
    state = load_file(pipeline / "transformer" / "diffusion_pytorch_model.safetensors")
    assert state["x_pad_token"].shape[0] == 1
    vectors = {name: tensor[0] if name.endswith("pad_token") else tensor for name, tensor in state.items()}

    def kinds(name: str, tensor: Tensor) -> str:
        return "Q8_0" if name.startswith("layers.") and tensor.ndim > 1 and tensor.shape[1] % 32 == 0 else "F16"

    path = write_gguf(tmp_path / "z.gguf", vectors, kinds, architecture="lumina2")
    numbers = {name: tensor.view(state[name].shape) for name, tensor in read_by_the_package(path).items()}
    save_file(numbers, tmp_path / "plain.safetensors")
    models = []
    for file in (path, tmp_path / "plain.safetensors"):
        parts = {"vae": pipeline / "vae", "text_encoder": pipeline / "text_encoder"}
        config = ModelConfig(
            model_type="z_image",
            pretrained_model_name_or_path=str(file),
            **{name: str(part) for name, part in parts.items()},  # type: ignore[arg-type]
        )
        models.append(ZImageFamily(config).load_transformer(torch.float32))
    own, plain = models
    assert torch.equal(own.x_pad_token, plain.x_pad_token)
    quantised = {name: layer for name, layer in own.named_modules() if isinstance(layer, QuantizedLinear)}
    assert quantised
    for name, layer in quantised.items():
        assert torch.equal(layer.dequantized(torch.float32), plain.get_submodule(name).weight), name
