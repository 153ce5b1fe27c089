"""Whole runs of models that fill a region or edit reference pictures, from the dataset TOML to the sheets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import (
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from PIL import Image, ImageDraw

from library.errors import UserError
from tests.runs import lora, run, write_dataset
from tests.tiny import tiny_flux_pipeline
from tests.tiny_qwen import Kind, tiny_qwen_inputs, tiny_qwen_pipeline

STEPS = 3


def write_pictures(folder: Path, images: int = 4) -> tuple[Path, Path]:
    """Write a dataset, a control picture for each image, a picture to fill and its mask; return TOML and prompts."""
    toml = write_dataset(folder, images, control_directory='"control"')
    (folder / "control").mkdir()
    for i in range(images):
        Image.new("RGB", (64, 64), (50 * i, 80, 120)).save(folder / "control" / f"{i}.png")
    mask = Image.new("L", (64, 64))
    ImageDraw.Draw(mask).rectangle((0, 0, 40, 40), fill=255)
    mask.save(folder / "mask.png")
    prompts = folder / "prompts.txt"
    prompts.write_text("a disc --ci images/1.png --w 64 --h 64 --s 2\n")
    return toml, prompts


def test_a_fill_model_trains_on_generated_masks_and_paints_into_its_prompts(tmp_path: Path) -> None:
    base = tiny_flux_pipeline(tmp_path / "base", model_type="flux_fill")
    toml, prompts = write_pictures(tmp_path / "data")
    toml.write_text(toml.read_text().replace('control_directory = "control"', 'inpaint_masks = ["halves", "strokes"]'))
    prompts.write_text(prompts.read_text().strip() + " --mi mask.png\n")
    keys = {
        "model_type": "flux_fill", "max_train_steps": STEPS, "masked_loss": True, "seam_loss_weight": 0.5,
        "sample_prompts": prompts, "sample_at_first": True,
    }  # fmt: skip
    events = run(base, toml, tmp_path / "run", **keys)
    assert events.task.step.flow.masked_loss
    assert any(tensor.abs().max() > 0 for name, tensor in lora(tmp_path / "run").items() if "lora_B" in name)
    assert len(list((tmp_path / "data" / "images" / ".tandem_cache" / "conditions").iterdir())) == 4 * 4
    with Image.open(tmp_path / "run" / "samples" / "before_after.png") as sheet:
        assert sheet.width == 3 * 264 + 24
        grey = sheet.convert("RGB").getpixel((12 + 40, 28 + 40))  # the region to fill, in the first column
    assert grey == (128, 128, 128)
    run(base, toml, tmp_path / "unweighed", **(keys | {"masked_loss": False, "seam_loss_weight": 0}))
    one, other = lora(tmp_path / "run"), lora(tmp_path / "unweighed")
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_an_edit_model_trains_on_references_that_its_text_encoder_sees(tmp_path: Path) -> None:
    base = tiny_qwen_pipeline(tmp_path / "base", "qwen_image_edit", blocks=1)
    toml, prompts = write_pictures(tmp_path / "data", images=2)
    for i in range(2):
        (tmp_path / "data" / "images" / f"{i}.txt").write_text("the same")
    run(base, toml, tmp_path / "run", model_type="qwen_image_edit", max_train_steps=1, sample_prompts=prompts)
    cache = tmp_path / "data" / "images" / ".tandem_cache"
    assert len(list((cache / "text").iterdir())) == 3  # one caption with two pictures, one prompt
    assert len(list((cache / "conditions").iterdir())) == 2
    assert [path.name for path in (tmp_path / "run" / "samples").iterdir()] == ["step000001_00.png"]


@pytest.mark.parametrize(
    ("model_type", "line", "message"),
    [
        ("flux_fill", "x --w 64 --h 64", "prompt 'x': no image to fill; write --ci"),
        ("flux_kontext", "x --w 64 --h 64", "prompt 'x': no image to edit; add --ci"),
        (
            "flux",
            "x --w 64 --h 64 --ci images/1.png",
            "prompt 'x': --ci is not taken: this model generates from text alone",
        ),
    ],
)
def test_prompts_that_do_not_suit_the_model_are_refused_before_anything_is_encoded(
    tmp_path: Path, model_type: str, line: str, message: str
) -> None:
    base = tiny_flux_pipeline(tmp_path / "base", model_type=model_type)
    toml, prompts = write_pictures(tmp_path / "data")
    prompts.write_text(line)
    if model_type != "flux_kontext":  # the only one of these that takes control images
        toml.write_text(toml.read_text().replace('control_directory = "control"', ""))
    with pytest.raises(UserError, match=message):
        run(base, toml, tmp_path / "run", model_type=model_type, sample_prompts=prompts)
    assert not (tmp_path / "data" / "images" / ".tandem_cache").exists()


@pytest.mark.parametrize(
    ("model_type", "pipeline"),
    [("qwen_image_edit", QwenImageEditPipeline), ("qwen_image_edit_plus", QwenImageEditPlusPipeline)],
)
def test_the_edit_pipelines_load_what_was_trained(
    model_type: Kind, pipeline: type[QwenImageEditPipeline], tmp_path: Path
) -> None:
    base = tiny_qwen_pipeline(tmp_path / "base", model_type, blocks=1)
    toml, _ = write_pictures(tmp_path / "data", images=2)
    keys = {"model_type": model_type, "max_train_steps": 2, "learning_rate": 1e-2, "network_alpha": 3}
    events = run(base, toml, tmp_path / "run", **keys)
    theirs = QwenImageTransformer2DModel.from_pretrained(base, subfolder="transformer").eval()
    inputs = tiny_qwen_inputs(1)
    batch = {
        "hidden_states": QwenImagePipeline._pack_latents(inputs["latents"], 1, 16, *inputs["latents"].shape[2:]),
        "timestep": inputs["sigmas"],
        "encoder_hidden_states": inputs["prompt_embeds"],
        "img_shapes": [[(1, 4, 4)]],
        "return_dict": False,
    }
    with torch.no_grad():
        plain = theirs(**batch)[0]
        pipeline(None, None, None, None, None, theirs).load_lora_weights(tmp_path / "run" / "lora.safetensors")
        loaded, ours = theirs(**batch)[0], events.task.transformer.eval()(**batch)[0]
    torch.testing.assert_close(loaded, ours, rtol=1e-4, atol=1e-5)  # fp32 sums in another order
    assert (loaded - plain).abs().max() > 1e-3
