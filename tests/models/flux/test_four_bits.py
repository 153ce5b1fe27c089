"""FLUX read from GGUF files and from bitsandbytes' nf4, as ComfyUI-GGUF, diffusers and lllyasviel write them."""

from __future__ import annotations

import json
from pathlib import Path

import bitsandbytes.functional as bnb
import pytest
import torch
from diffusers import BitsAndBytesConfig, FluxTransformer2DModel
from diffusers.quantizers.bitsandbytes.bnb_quantizer import BnB4BitDiffusersQuantizer
from safetensors.torch import load_file, save_file
from torch import Tensor

from library.models.flux.spec import FluxFamily
from library.precision.linear import QuantizedLinear
from library.precision.recipe import WeightLoader
from tests.precision.files.gguf_files import image_model_types, read_by_the_package, write_gguf
from tests.precision.files.nf4_files import nf4_of
from tests.tiny import SingleFiles, save_single_files, tiny_flux_inputs, tiny_flux_pipeline


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A FLUX of 256 numbers a token, the inputs of a block of a K-quant."""
    return tiny_flux_pipeline(tmp_path_factory.mktemp("flux") / "pipeline", dtype=torch.bfloat16, heads=4, head_dim=64)


@pytest.fixture(scope="module")
def files(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> SingleFiles:
    return save_single_files(pipeline, tmp_path_factory.mktemp("single"))


def velocity(family: FluxFamily, transformer: torch.nn.Module) -> Tensor:
    inputs = tiny_flux_inputs()
    text = {name: inputs[name] for name in ("prompt_embeds", "pooled_prompt_embeds")}
    with torch.no_grad():
        return family.predict_velocity(transformer, inputs["latents"], inputs["sigmas"], text, 3.5)


def loaded(files: SingleFiles, path: Path) -> tuple[FluxFamily, torch.nn.Module, WeightLoader]:
    family = FluxFamily(files.model_config(pretrained_model_name_or_path=str(path)))
    loading = WeightLoader()
    return family, family.load_transformer(torch.float32, fp8=loading), loading


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("quantised", ["Q8_0", "Q4_K", "Q5_0"])
def test_a_gguf_file_is_the_model_of_its_dequantised_weights(
    quantised: str, prefix: str, files: SingleFiles, tmp_path: Path
) -> None:
    state = {prefix + name: tensor for name, tensor in load_file(files.transformer).items()}
    path = write_gguf(tmp_path / "flux.gguf", state, image_model_types(quantised))
    family, model, loading = loaded(files, path)
    assert loading.read == sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 26
    save_file(read_by_the_package(path), tmp_path / "dequantised.safetensors")
    plain, reference, _ = loaded(files, tmp_path / "dequantised.safetensors")
    # the same numbers in fp32, multiplied in chunks of other sizes
    torch.testing.assert_close(velocity(family, model), velocity(plain, reference), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nested", [False, True])
def test_an_all_in_one_nf4_file_is_the_model_of_its_dequantised_weights(
    nested: bool, files: SingleFiles, tmp_path: Path
) -> None:
    stored, plain = nf4_of(load_file(files.transformer), "model.diffusion_model.", nested)
    save_file(stored | {"vae.encoder.conv_in.weight": torch.ones(2, 2, 3, 3)}, tmp_path / "nf4.safetensors")
    save_file(plain, tmp_path / "plain.safetensors")
    (family, model, loading), (other, reference, _) = (
        loaded(files, tmp_path / name) for name in ("nf4.safetensors", "plain.safetensors")
    )
    assert loading.read == 26
    torch.testing.assert_close(velocity(family, model), velocity(other, reference), rtol=1e-4, atol=1e-5)


def test_a_folder_that_diffusers_saves_in_nf4_is_the_model_that_it_loads(
    pipeline: Path, files: SingleFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # it asks for a GPU, and bitsandbytes quantises on the CPU as well
    monkeypatch.setattr(BnB4BitDiffusersQuantizer, "validate_environment", lambda *_, **__: None)
    for part in pipeline.iterdir():
        if part.name != "transformer":
            (tmp_path / part.name).symlink_to(part)
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["proj_out", "x_embedder"],
    )
    theirs = FluxTransformer2DModel.from_pretrained(
        pipeline / "transformer", quantization_config=how, torch_dtype=torch.float32, device_map="cpu"
    )
    theirs.save_pretrained(tmp_path / "transformer")
    config = json.loads((tmp_path / "transformer" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "bitsandbytes"
    _, model, loading = loaded(files, tmp_path)
    assert loading.read > 20
    for name, module in theirs.named_modules():
        if type(module).__name__ == "Linear4bit":
            own = model.get_submodule(name)
            assert isinstance(own, QuantizedLinear)
            expected = bnb.dequantize_4bit(module.weight.data, module.weight.quant_state).float()
            assert torch.equal(own.dequantized(torch.float32), expected), name
