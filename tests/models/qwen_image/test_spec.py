"""The Qwen-Image family against diffusers' QwenImagePipeline, and where its parts lie."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from safetensors.torch import load_file, save_file
from torch import nn

from library.config.model_types import MODEL_TYPES
from library.config.schema import ModelConfig
from library.errors import UserError
from library.models.family import SampleSettings
from library.models.family_by_name import model_family
from library.models.qwen_image.spec import QwenImageFamily
from library.models.qwen_image.text import image_processor, load_qwen_text
from library.models.qwen_image.vae import QwenImageEncoder
from library.precision.checkpoint import WeightFiles
from tests.models.claims import family_maker, quiet
from tests.tiny import tiny_flux_pipeline
from tests.tiny_qwen import SplitFiles, published_text_name, save_split_files, tiny_qwen_inputs, tiny_qwen_pipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen_pipeline(tmp_path_factory.mktemp("qwen") / "pipeline")


family_of = family_maker("qwen_image", QwenImageFamily)


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> QwenImagePipeline:
    return quiet(QwenImagePipeline.from_pretrained(folder))


def test_latents_are_the_normalised_mean_of_the_pipelines_vae_and_decode_back(
    folder: Path, pipeline: QwenImagePipeline
) -> None:
    encoder = family_of(folder).load_image_encoder(torch.float32)
    assert (encoder.latent_factor, encoder.pixel_multiple, encoder.latent_channels) == (8, 16, 16)
    assert MODEL_TYPES["qwen_image"].pixel_multiple == encoder.pixel_multiple
    pixels = torch.rand(2, 3, 64, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1
    vae = pipeline.vae
    with torch.no_grad():
        mean = vae.encode(pixels[:, :, None]).latent_dist.mean
        shift, scale = (
            torch.tensor(each).view(1, 16, 1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std)
        )
        theirs = (mean - shift) / scale
        decoded = vae.decode(mean).sample[:, :, 0]
    ours = encoder.encode(pixels)
    torch.testing.assert_close(ours, theirs[:, :, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(encoder.decode(ours), decoded, rtol=1e-4, atol=1e-5)


def test_sampling_refuses_one_step_and_odd_sizes(folder: Path) -> None:
    family = family_of(folder)
    transformer, encoder = nn.Identity(), family.load_image_encoder(torch.float32)
    text = {name: rows[0] for name, rows in tiny_qwen_inputs(1).items() if name.startswith("prompt")}
    with pytest.raises(UserError, match="sample of 1 step: Qwen-Image's schedule has at least two"):
        family.sample(transformer, encoder, text, SampleSettings(64, 64, steps=1, guidance=1.0, seed=1))
    with pytest.raises(UserError, match="60 x 64 pixels: both must be multiples of 16"):
        family.sample(transformer, encoder, text, SampleSettings(60, 64, steps=2, guidance=1.0, seed=1))


@pytest.fixture(scope="module")
def files(folder: Path) -> SplitFiles:
    return save_split_files(folder, folder.parent / "files")


def refuses(match: str, config: ModelConfig) -> None:
    with pytest.raises(UserError, match=match) as caught:
        model_family(config)
    assert "\n" not in str(caught.value)


def in_folder(path: Path, **options: object) -> ModelConfig:
    settings: dict[str, object] = {"model_type": "qwen_image", "pretrained_model_name_or_path": str(path)}
    return ModelConfig(**(settings | options))  # type: ignore[arg-type]


def test_a_folder_of_another_pipeline_says_which_model_type_it_is(folder: Path, tmp_path: Path) -> None:
    edit = Path(shutil.copytree(folder, tmp_path / "edit"))
    index = json.loads((edit / "model_index.json").read_text())
    (edit / "model_index.json").write_text(json.dumps(index | {"_class_name": "QwenImageEditPlusPipeline"}))
    refuses(
        r'is Qwen-Image \(qwen_image_edit_plus\), not qwen_image; set model_type = "qwen_image_edit_plus"',
        in_folder(edit),
    )
    flux = tiny_flux_pipeline(tmp_path / "flux")
    refuses("'FluxTransformer2DModel', not QwenImageTransformer2DModel; set model_type = \"flux\"", in_folder(flux))


def test_files_of_other_models_are_refused_by_what_they_are(files: SplitFiles, folder: Path, tmp_path: Path) -> None:
    flux = tiny_flux_pipeline(tmp_path / "flux") / "transformer" / "diffusion_pytorch_model.safetensors"
    wanted = "pretrained_model_name_or_path"
    refuses(
        'a FLUX.1 transformer .*, not Qwen-Image; set model_type = "flux"', files.model_config(**{wanted: str(flux)})
    )
    refuses("not Qwen-Image's VAE", files.model_config(vae=str(flux)))
    refuses("not Qwen2.5-VL", files.model_config(text_encoder=str(flux)))
    layered = load_file(files.transformer) | {"time_text_embed.addition_t_embedding.weight": torch.zeros(2, 64)}
    save_file(layered, tmp_path / "layered.safetensors")
    refuses(
        "Qwen-Image-Layered, not a model family", files.model_config(**{wanted: str(tmp_path / "layered.safetensors")})
    )
    vae = load_file(files.vae)
    vae["encoder.conv1.weight"] = torch.zeros(8, 4, 3, 3, 3)
    save_file(vae, tmp_path / "vae.safetensors")
    refuses(
        "an autoencoder of 4 channels, as Qwen-Image-Layered", files.model_config(vae=str(tmp_path / "vae.safetensors"))
    )


def test_comfyuis_marker_makes_a_file_edit_2511(files: SplitFiles, tmp_path: Path) -> None:
    weights = load_file(files.transformer)
    marked = {f"model.diffusion_model.{name}": tensor for name, tensor in weights.items()}
    marked["model.diffusion_model.__index_timestep_zero__"] = torch.tensor([])
    save_file(marked, tmp_path / "qwen_image_edit_2511.safetensors")
    path = {"pretrained_model_name_or_path": str(tmp_path / "qwen_image_edit_2511.safetensors")}
    family = model_family(files.model_config(**path, model_type="qwen_image_edit_plus"))
    assert family.modelspec_architecture == "Qwen-Image-Edit-2511"
    assert family.load_transformer(torch.float32).zero_cond_t  # type: ignore[attr-defined]
    refuses(r'\(qwen_image_edit_plus\), not .*; set model_type = "qwen_image_edit_plus"', files.model_config(**path))
    contradiction = files.model_config(**path, model_type="qwen_image_edit_plus", zero_cond_t=False)
    refuses("zero_cond_t: the model's files say it is Edit-2511", contradiction)


def test_a_vae_file_in_either_naming_gives_the_folders_config(files: SplitFiles, folder: Path) -> None:
    published = folder / "vae" / "diffusion_pytorch_model.safetensors"
    wanted = json.loads((folder / "vae" / "config.json").read_text())
    for path in (files.vae, published):
        config, _ = QwenImageEncoder.describe(WeightFiles(path))
        assert {name: wanted[name] for name in config} == config
        vae, theirs = QwenImageEncoder.load(path, torch.float32).state_dict(), load_file(published)
        assert vae.keys() == theirs.keys()
        assert all(torch.equal(vae[name], theirs[name]) for name in theirs)


def test_the_published_vaes_places_are_those_of_musubi_tuners_table() -> None:
    """Two residual blocks a level, as published; places taken from musubi-tuner's qwen_image_utils.py, its key_map."""
    from library.models.qwen_image.vae import _diffusers_name

    table = {
        "conv1": "quant_conv",
        "decoder.head.2": "decoder.conv_out",
        "decoder.middle.1.to_qkv": "decoder.mid_block.attentions.0.to_qkv",
        "decoder.upsamples.10.residual.3": "decoder.up_blocks.2.resnets.2.norm2",
        "decoder.upsamples.11.resample.1": "decoder.up_blocks.2.upsamplers.0.resample.1",
        "decoder.upsamples.3.time_conv": "decoder.up_blocks.0.upsamplers.0.time_conv",
        "decoder.upsamples.4.shortcut": "decoder.up_blocks.1.resnets.0.conv_shortcut",
        "decoder.upsamples.14.residual.6": "decoder.up_blocks.3.resnets.2.conv2",
        "encoder.downsamples.8.time_conv": "encoder.down_blocks.8.time_conv",
        "encoder.downsamples.6.shortcut": "encoder.down_blocks.6.conv_shortcut",
        "encoder.middle.2.residual.0": "encoder.mid_block.resnets.1.norm1",
    }
    for theirs, ours in table.items():
        assert _diffusers_name(f"{theirs}.weight", 4) == f"{ours}.weight"


def test_text_encoders_are_read_in_both_namings(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "text_encoder" / "model.safetensors")
    states = []
    for name, rename in (("old", published_text_name), ("new", _new_text_name)):
        save_file({rename(key): tensor for key, tensor in weights.items()}, tmp_path / f"{name}.safetensors")
        states.append(load_qwen_text(tmp_path / f"{name}.safetensors", torch.float32, image_token=5).state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert any(name.startswith("visual.") for name in states[0])
    assert not any("lm_head" in name for name in states[0])


def _new_text_name(name: str) -> str:
    if name.startswith("visual."):
        return f"model.{name}"
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def test_the_processors_settings_are_the_folders_or_the_published_ones(tmp_path: Path) -> None:
    assert image_processor(None).size == {"shortest_edge": 3136, "longest_edge": 12845056}
    (tmp_path / "preprocessor_config.json").write_text(
        '{"min_pixels": 784, "max_pixels": 50176, "processor_class": "X"}'
    )
    assert image_processor(tmp_path).size == {"shortest_edge": 784, "longest_edge": 50176}


def test_a_tokenizer_without_pictures_is_refused(folder: Path, tmp_path: Path) -> None:
    family = model_family(in_folder(folder))
    assert family.load_text_encoder(torch.float32)
    bare = Path(shutil.copytree(folder, tmp_path / "bare"))
    tokenizer = json.loads((bare / "tokenizer" / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] != "<|image_pad|>"]
    (bare / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (bare / "tokenizer" / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(UserError, match=r"qwen_tokenizer: .* has no <\|image_pad\|>; give the tokenizer of Qwen2.5-VL"):
        model_family(in_folder(bare)).load_text_encoder(torch.float32)
