"""Published fp8 files of Qwen-Image are read as they are: the plain cast transformer, the scaled text encoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from library.errors import UserError
from library.models.family_by_name import model_family
from library.precision.files.fp8 import Fp8Scheme
from library.precision.linear import QuantizedLinear
from library.precision.recipe import Recipe, WeightLoader
from tests.tiny_qwen import SplitFiles, save_split_files, tiny_qwen_inputs, tiny_qwen_pipeline

FP8 = torch.float8_e4m3fn
CAPTION = "a red disc, plain"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SplitFiles:
    root = tmp_path_factory.mktemp("qwen")
    return save_split_files(tiny_qwen_pipeline(root / "pipeline"), root / "files")


def velocity(files: SplitFiles, path: Path) -> Tensor:
    family, inputs = model_family(files.model_config(pretrained_model_name_or_path=str(path))), tiny_qwen_inputs()
    transformer = family.load_transformer(torch.float32, fp8=WeightLoader(compute="dequant"))
    text = {name: inputs[name] for name in ("prompt_embeds", "prompt_embeds_mask")}
    with torch.no_grad():
        return family.predict_velocity(transformer, inputs["latents"], inputs["sigmas"], text, 1.0)  # type: ignore[call-arg]


def test_a_plain_cast_transformer_computes_what_its_numbers_say(files: SplitFiles, tmp_path: Path) -> None:
    """As qwen_image_fp8_e4m3fn.safetensors: every tensor is fp8, biases and norms too."""
    cast = {name: tensor.to(FP8) for name, tensor in load_file(files.transformer).items()}
    save_file(cast, tmp_path / "fp8.safetensors")
    save_file({name: tensor.float() for name, tensor in cast.items()}, tmp_path / "same.safetensors")
    family = model_family(files.model_config(pretrained_model_name_or_path=str(tmp_path / "fp8.safetensors")))
    assert family.quantized_file() is not None
    loading = WeightLoader(compute="dequant")
    transformer = family.load_transformer(torch.float32, fp8=loading)
    assert loading.read == 2 * 14 + 6
    assert isinstance(transformer.get_submodule("transformer_blocks.0.img_mod.1"), QuantizedLinear)
    # fp32 products with the very same numbers
    torch.testing.assert_close(
        velocity(files, tmp_path / "fp8.safetensors"),
        velocity(files, tmp_path / "same.safetensors"),
        rtol=1e-5,
        atol=1e-5,
    )


def test_a_scaled_text_encoder_is_used_as_it_is(files: SplitFiles, tmp_path: Path) -> None:
    """As qwen_2.5_vl_7b_fp8_scaled.safetensors: linear weights of the language model with a scale each."""
    scaled: dict[str, Tensor] = {"scaled_fp8": torch.zeros(0, dtype=FP8)}
    same: dict[str, Tensor] = {}
    for name, tensor in load_file(files.text_encoder).items():
        scaled[name] = same[name] = tensor
        if name.startswith("model.layers.") and tensor.ndim == 2:
            scale = tensor.abs().max() / 448
            scaled[name] = (tensor / scale).to(FP8)
            scaled[name.replace(".weight", ".scale_weight")] = scale
            same[name] = scaled[name].float() * scale
    embeddings = []
    for kind, tensors in (("scaled", scaled), ("same", same)):
        save_file(tensors, tmp_path / f"{kind}.safetensors")
        config = files.model_config(text_encoder=str(tmp_path / f"{kind}.safetensors"))
        encoder = model_family(config).load_text_encoder(torch.float32)
        embeddings.append(encoder.encode([CAPTION])[0]["prompt_embeds"])
    torch.testing.assert_close(*embeddings, rtol=1e-4, atol=1e-4)  # fp32, two layers of the same numbers
    config = files.model_config(text_encoder=str(tmp_path / "scaled.safetensors"))
    with pytest.raises(UserError, match="fp8_text_encoder: .* is in fp8 already and is used as it is"):
        model_family(config).load_text_encoder(torch.float32, recipe=Recipe(Fp8Scheme("block64")))
