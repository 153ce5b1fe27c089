"""The Qwen-Image-2.1 family against diffusers' QwenImage21Pipeline: velocity, text, latents, samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImage21Pipeline
from PIL import Image
from safetensors.torch import load_file, save_file

from library.config.model_types import MODEL_TYPES
from library.config.schema import ModelConfig
from library.errors import UserError
from library.models.family_by_name import model_family
from library.models.family_files import files_of
from library.models.files import file_arguments, transformer_arguments
from library.models.qwen_image_21.spec import QwenImage21Family
from library.precision.checkpoint import WeightFiles
from library.precision.linear import QuantizedLinear
from library.precision.recipe import WeightLoader
from tests.models.claims import assert_same_model, assert_sample_is_the_pipelines, family_maker
from tests.precision.files.comfy import by_kitchen, comfy_tensors
from tests.tiny_qwen_21 import (
    CHANNELS,
    run_21,
    save_21_split_files,
    tiny_21_loaded,
    tiny_21_pipeline,
    tiny_21_transformer,
)

CAPTIONS = ["a red disc", "make the picture of a small plain disc blue, yellow and purple"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_21_pipeline(tmp_path_factory.mktemp("qwen21") / "pipeline")


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> QwenImage21Pipeline:
    return tiny_21_loaded(folder)


family_of = family_maker("qwen_image_21", QwenImage21Family)


def on_white(image: Image.Image) -> np.ndarray:
    """Return an RGBA image as it looks on white, as integers."""
    assert image.mode == "RGBA"
    numbers = np.asarray(image, dtype=float) / 255
    opacity = numbers[..., 3:]
    return np.round((numbers[..., :3] * opacity + 1 - opacity) * 255).astype(int)


def test_latents_are_the_normalised_mean_of_opaque_images_and_decode_back_on_white(
    folder: Path, pipeline: QwenImage21Pipeline
) -> None:
    encoder = family_of(folder).load_image_encoder(torch.float32)
    assert (encoder.latent_factor, encoder.pixel_multiple, encoder.latent_channels) == (16, 32, CHANNELS)
    assert MODEL_TYPES["qwen_image_21"].pixel_multiple == encoder.pixel_multiple
    image = Image.fromarray(np.random.default_rng(1).integers(0, 255, (96, 64, 3), dtype=np.uint8))
    vae = pipeline.vae
    with torch.no_grad():  # what the pipeline makes of a reference image without opacity
        pixels = pipeline.image_processor.preprocess(image.convert("RGBA"), width=64, height=96).unsqueeze(2)
        theirs = pipeline._encode_vae_image(pixels, None)
        mean = vae.encode(pixels).latent_dist.mode()
        decoded = vae.decode(mean).sample[:, :, 0]
    ours = encoder.encode(torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 127.5 - 1)
    torch.testing.assert_close(ours, theirs[:, :, 0], rtol=1e-4, atol=1e-5)
    (shown,) = pipeline.image_processor.postprocess(decoded, output_type="pil")
    back = ((encoder.decode(ours)[0].permute(1, 2, 0) + 1) * 127.5).round().int().numpy()
    assert np.abs(back - on_white(shown)).max() <= 2  # colour and opacity are rounded to integers there
    with pytest.raises(UserError, match="64 x 80 pixels: sides must be multiples of 32"):
        encoder.encode(torch.zeros(1, 3, 80, 64))


@pytest.mark.parametrize("cfg", [1.0, 4.0])
@pytest.mark.parametrize("turbo", [False, True])
def test_samples_are_those_of_the_pipeline(folder: Path, tmp_path: Path, cfg: float, turbo: bool) -> None:
    """Turbo's folder has noise levels of its own, for as many steps."""
    levels = [1.0, 0.845148, 0.414568] if turbo else None  # of the eight in Qwen/Qwen-Image-2.1-Turbo
    root = tiny_21_pipeline(tmp_path / "turbo", sample_sigmas=levels) if turbo else folder
    family, pipeline = family_of(root), tiny_21_loaded(root, sample_sigmas=levels)
    # colour and opacity are rounded to integers there
    assert_sample_is_the_pipelines(family, pipeline, cfg, on_white, most=2, true_cfg_scale=cfg)
    assert len(family.sampling_sigmas(4, 24)) == 5, "other numbers of steps are even ones"


@pytest.mark.parametrize(("prefix", "fused"), [("", True), ("model.diffusion_model.", True), ("", False)])
def test_split_files_hold_the_same_model(folder: Path, tmp_path: Path, prefix: str, fused: bool) -> None:
    files = save_21_split_files(folder, tmp_path, prefix, fused)
    single, whole = model_family(files.model_config()), family_of(folder)
    config = single.files.transformer_config
    assert {"num_layers": 2, "mlp_ratio": 3, "context_in_dim": 128, "in_channels": CHANNELS}.items() <= config.items()
    assert_same_model(single, whole, CAPTIONS)
    assert transformer_arguments(files.transformer, "qwen_image_21") == config
    assert file_arguments(WeightFiles(files.transformer), files_of("qwen_image_21"))[0] == prefix


def test_a_file_that_lacks_a_layer_or_is_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    files = save_21_split_files(folder, tmp_path)
    weights = load_file(files.transformer)
    weights.pop("transformer_blocks.1.img_mlp.gate_up.weight")
    save_file(weights, files.transformer)
    with pytest.raises(UserError, match=r"'transformer_blocks.1.img_mlp.gate_up.weight'.* missing"):
        model_family(files.model_config()).load_transformer(torch.float32)
    with pytest.raises(
        UserError, match='a Qwen-Image-2.1 transformer, not Qwen-Image; set model_type = "qwen_image_21"'
    ):
        model_family(files.model_config(model_type="qwen_image"))
    with pytest.raises(UserError, match=r"not Qwen-Image-2.1's VAE"):
        model_family(files.model_config(vae=str(files.text_encoder)))
    with pytest.raises(UserError, match="'QwenImage21Transformer2DModel', not ZImageTransformer2DModel"):
        model_family(ModelConfig(model_type="z_image", pretrained_model_name_or_path=str(folder)))


def test_comfyuis_int8_file_with_the_fused_layer_is_read_as_it_is(folder: Path, tmp_path: Path) -> None:
    """As ``qwen_image_2.1_int8_convrot.safetensors``: comfy-kitchen's own numbers, gate and factor in one matrix."""
    files, options = save_21_split_files(folder, tmp_path), {"convrot": True, "convrot_groupsize": 64}
    plain = load_file(files.transformer)
    written, expected = dict(plain), dict(plain)
    for key in [key for key in plain if "transformer_blocks" in key and "norm" not in key]:
        quantised = by_kitchen(plain[key], "int8_tensorwise", per_channel=True, **options)
        layer, config = key.removesuffix(".weight"), {"format": "int8_tensorwise", **options}
        del written[key]
        written |= comfy_tensors(layer, quantised, config)
        expected[key] = quantised.dequantize()
    save_file(written, files.transformer)
    family = model_family(files.model_config())
    loading = WeightLoader(compute="dequant")
    transformer = family.load_transformer(torch.float32, fp8=loading)
    assert sum(isinstance(module, QuantizedLinear) for module in transformer.modules()) == 2 * 7
    reference = tiny_21_transformer()
    for key in [key for key in expected if "gate_up" in key]:
        gate, factor = expected.pop(key).chunk(2)
        expected |= {key.replace("gate_up", "gate_layer"): gate, key.replace("gate_up", "proj"): factor}
    reference.load_state_dict(expected)
    with torch.no_grad():
        ours, theirs, high = run_21(transformer), run_21(reference), run_21(tiny_21_transformer())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert (theirs - high).norm() > 1e-3 * high.norm()
