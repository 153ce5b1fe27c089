"""tools/generate.py with a picture to fill and with reference pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import load_file, save_file

from library.conditions import Conditions
from library.config.schema import ModelConfig
from library.errors import NotFiniteError, UserError
from library.models.family import SampleSettings
from library.models.family_by_name import model_family
from library.models.registry import lora_targets
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from tests.data.folders import make_image
from tests.tiny import tiny_flux_pipeline
from tools.generate import image, parser

SMALL = ["--w", "64", "--h", "48", "--s", "2", "--g", "3", "--d", "5"]


def drawn(*arguments: str) -> np.ndarray:
    (path,) = image(parser().parse_args(["image", *arguments]))
    return np.asarray(Image.open(path)).astype(int)


def latents_of(base: Path, pixels: torch.Tensor) -> torch.Tensor:
    """diffusers' VAE, its latents normalised with FLUX's published constants."""
    vae = AutoencoderKL.from_pretrained(base, subfolder="vae")
    with torch.no_grad():
        return (vae.encode(pixels[None]).latent_dist.mode() - 0.1159) * 0.3611


def painted(base: Path, model_type: str, conditions: Conditions) -> np.ndarray:
    family = model_family(ModelConfig(model_type=model_type, pretrained_model_name_or_path=str(base)))
    text = family.load_text_encoder(torch.float32).encode(["a door"])[0]
    transformer = family.load_transformer(torch.float32)
    encoder = family.load_image_encoder(torch.float32)
    sample = family.sample(
        transformer, encoder, text, SampleSettings(64, 48, steps=2, guidance=3.0, seed=5), conditions=conditions
    )
    return np.asarray(sample).astype(int)


def to_pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_image(64, 48, seed=1).save(tmp_path / "a.png")
    make_image(32, 32, seed=2).save(tmp_path / "b.png")
    mask = np.zeros((48, 64), dtype=np.uint8)
    mask[:20, 30:] = 255
    Image.fromarray(mask).save(tmp_path / "m.png")
    return tmp_path


def test_a_picture_is_filled_where_its_mask_is_white(folder: Path) -> None:
    base = tiny_flux_pipeline(folder / "base", model_type="flux_fill")
    flags = ["--model", str(base), "--model_type", "flux_fill", "--save_to", str(folder / "out"), *SMALL]
    pictures = ["--ci", str(folder / "a.png"), "--mi", str(folder / "m.png")]
    mask = torch.from_numpy(np.array(Image.open(folder / "m.png")) // 255).float()
    blanked = latents_of(base, to_pixels(make_image(64, 48, seed=1)) * (1 - mask))
    expected = painted(base, "flux_fill", Conditions(blanked, mask[None, None]))
    # the pictures may differ by one where fp32 convolutions of another batch layout round differently
    assert abs(drawn(*flags, "--prompt", "a door", *pictures) - expected).max() <= 1
    with pytest.raises(UserError, match="prompt 'a door': no mask; write --ci image.png --mi mask.png"):
        drawn(*flags, "--prompt", f"a door --ci {folder / 'a.png'}")


def test_the_region_is_blanked_as_the_lora_was_trained_unless_a_flag_says_otherwise(folder: Path) -> None:
    base = tiny_flux_pipeline(folder / "base", model_type="flux_fill")
    targets = lora_targets()["flux_fill"]
    nothing = {"transformer_blocks.0.attn.to_q": LoraWeights(torch.ones(2, 64), torch.zeros(64, 2), 2.0)}
    save_adapter(folder / "l.safetensors", nothing, targets, metadata={"tandem.inpaint_blank": "black grey"})
    flags = ["--model", str(base), "--model_type", "flux_fill", "--save_to", str(folder / "out"), *SMALL]
    flags += ["--prompt", f"a door --ci {folder / 'a.png'} --mi {folder / 'm.png'}"]
    mask = torch.from_numpy(np.array(Image.open(folder / "m.png")) // 255).float()
    pixels = to_pixels(make_image(64, 48, seed=1)) * (1 - mask)
    lora = ["--lora", str(folder / "l.safetensors")]
    for given, colour in ((lora, -1.0), ([*lora, "--inpaint_blank", "white"], 1.0), (["--inpaint_blank", "grey"], 0.0)):
        blanked = latents_of(base, pixels + colour * mask)
        expected = painted(base, "flux_fill", Conditions(blanked, mask[None, None]))
        assert abs(drawn(*flags, *given) - expected).max() <= 1


@pytest.mark.parametrize("name", ["new.png", "new.JPG", "list"])
def test_a_file_to_save_to_is_refused_before_any_work_is_done(tmp_path: Path, name: str) -> None:
    (tmp_path / "list").write_text("x")
    with pytest.raises(UserError, match=f"{name}: images get names of their own; give a folder"):
        drawn("--model", "nowhere", "--save_to", str(tmp_path / name), "--prompt", "a door")


def test_references_are_taken_at_the_size_asked_for(folder: Path) -> None:
    base = tiny_flux_pipeline(folder / "base", model_type="flux_kontext")
    flags = ["--model", str(base), "--model_type", "flux_kontext", "--save_to", str(folder / "out"), *SMALL]
    line = f"a door --ci {folder / 'a.png'} --ci {folder / 'b.png'}"
    references = tuple(
        latents_of(base, to_pixels(make_image(*size, seed=s))) for size, s in (((64, 48), 1), ((32, 32), 2))
    )
    expected = painted(base, "flux_kontext", Conditions(references=references))
    assert abs(drawn(*flags, "--prompt", line, "--no_resize_control") - expected).max() <= 1
    resized = drawn(*flags, "--prompt", line)  # to the picture's size
    assert abs(resized - expected).max() > 1


def test_a_picture_of_numbers_that_are_not_finite_is_not_written(folder: Path) -> None:
    base = tiny_flux_pipeline(folder / "base")
    file = base / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    weights["decoder.conv_out.bias"][1] = float("inf")
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(NotFiniteError, match=r"^image of seed 5: NaN or infinity instead of pixels; lower the LoRA"):
        drawn("--model", str(base), "--save_to", str(folder / "out"), *SMALL, "--prompt", "a door")
    assert not [path for path in folder.rglob("*") if path.name.startswith("out") and path.is_file()]
