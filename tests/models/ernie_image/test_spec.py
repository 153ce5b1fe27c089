"""ERNIE-Image alone: any shape, latents, Turbo, refusals. What it shares with others: the files of the folder above."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLFlux2, ErnieImagePipeline, ErnieImageTransformer2DModel

from library.models.ernie_image.model import optimise_forward
from library.models.ernie_image.spec import ErnieImageFamily
from library.models.flux.vae import Flux2ImageEncoder
from tests.models.claims import assert_refused, family_maker
from tests.tiny_ernie_image import save_ernie_split_files, tiny_ernie_pipeline, tiny_ernie_transformer
from tests.tiny_flux2 import tiny_dev_pipeline
from tests.tiny_z_image import tiny_z_pipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_ernie_pipeline(tmp_path_factory.mktemp("ernie") / "pipeline")


family_of = family_maker("ernie_image", ErnieImageFamily)


@pytest.mark.parametrize("seed", range(4))
def test_any_shape_gives_diffusers_numbers(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    batch, rows, columns, tokens = (int(torch.randint(1, most, (), generator=random)) for most in (4, 40, 40, 60))
    lengths = torch.randint(1, tokens + 1, (batch,), generator=random)
    leaves = [torch.randn(s, generator=random) for s in ((batch, 128, rows, columns), (batch, tokens, 72))]
    times, weight = 1000 * torch.rand(batch, generator=random), torch.randn(leaves[0].shape, generator=random)
    found = []
    for model in (tiny_ernie_transformer(3, 3, seed), optimise_forward(tiny_ernie_transformer(3, 3, seed))):
        image, text = (leaf.clone().requires_grad_() for leaf in leaves)
        output = model(image, times, text, lengths).sample
        found.append([output, *torch.autograd.grad((output * weight).sum(), (image, text))])
    for theirs, ours in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()  # diffusers' angles are fp32


def test_text_as_wide_as_the_transformer_needs_no_projection() -> None:
    config = tiny_ernie_transformer().config | {"text_in_dim": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        plain = ErnieImageTransformer2DModel.from_config(config).eval()
    given = torch.randn(2, 128, 3, 5), torch.tensor([10.0, 700.0]), torch.randn(2, 4, 64), torch.tensor([4, 4])
    torch.nn.init.normal_(plain.final_linear.weight)
    theirs = plain(*given).sample
    torch.testing.assert_close(optimise_forward(plain)(*given[:3]).sample, theirs, rtol=1e-5, atol=1e-5)


def test_latents_are_normalised_as_the_pipeline_does_and_cached_apart_from_flux2s(folder: Path) -> None:
    encoder = family_of(folder).load_image_encoder(torch.float32)
    vae = AutoencoderKLFlux2.from_pretrained(folder, subfolder="vae")
    vae.bn.running_var.mul_(1e-4)  # so that the epsilon counts
    encoder._vae = vae
    pixels = torch.rand(1, 3, 32, 48, generator=torch.Generator().manual_seed(1))
    patches = ErnieImagePipeline._patchify_latents(vae.encode(pixels).latent_dist.mode())
    mean, std = vae.bn.running_mean.view(1, -1, 1, 1), (vae.bn.running_var.view(1, -1, 1, 1) + 1e-5).sqrt()
    expected = ErnieImagePipeline._unpatchify_latents((patches - mean) / std)  # the inverse of the pipeline's decoding
    torch.testing.assert_close(encoder.encode(pixels), expected, rtol=1e-4, atol=1e-4)
    assert encoder.fingerprint != Flux2ImageEncoder(folder / "vae", torch.float32).fingerprint


@pytest.mark.parametrize("place", ["ERNIE-Image", "ERNIE-Image-Turbo", "models--baidu--ERNIE-Image-Turbo/snapshots/1a"])
def test_turbo_is_known_by_its_name_and_shifted_as_base(folder: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).symlink_to(folder)
    family = family_of(tmp_path / place)
    assert family.distilled is ("Turbo" in place)
    assert family.own_sampling() == {"timestep_sampling": "shift", "discrete_flow_shift": 4.0}


def test_other_models_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    files = save_ernie_split_files(folder, tmp_path / "files")
    z_image, dev = tiny_z_pipeline(tmp_path / "z"), tiny_dev_pipeline(tmp_path / "dev")
    wanted = {
        "not ErnieImageTransformer2DModel; set model_type = .z_image": {"pretrained_model_name_or_path": str(z_image)},
        r"not Ministral 3 \(no": {"text_encoder": str(z_image / "text_encoder/model.safetensors")},
        "'mistral', not ministral3; give ERNIE-Image's text encoder": {"text_encoder": str(dev)},
        "text 64 wide, the transformer takes 72; give Ministral 3": {
            "text_encoder": str(dev / "text_encoder/model.safetensors")
        },
        "'AutoencoderKL', not AutoencoderKLFlux2; give FLUX.2's VAE": {"vae": str(z_image)},
        "an image autoencoder.*, not ERNIE-Image": {"pretrained_model_name_or_path": str(files.vae)},
    }
    assert_refused(files.model_config, wanted)
