"""Qwen-Image-2.1 with reference images against diffusers' pipeline: text that sees pictures, velocity, samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import QwenImage21Pipeline
from safetensors.torch import load_file, save_file

from library.conditions import Conditions
from library.config.schema import ModelConfig
from library.data.images import to_pixels
from library.errors import UserError
from library.models.family import SampleSettings
from library.models.family_by_name import model_family
from library.models.qwen_image_21.spec import QwenImage21EditFamily
from tests.models.claims import assert_same_picture, family_maker
from tests.models.qwen_image.test_edit import picture
from tests.models.qwen_image_21.test_spec import on_white
from tests.tiny_qwen_21 import (
    CHANNELS,
    TEXT_WIDTH,
    save_21_split_files,
    theirs_called,
    tiny_21_inputs,
    tiny_21_loaded,
    tiny_21_pipeline,
)

RESOLUTION = 128  # of references, the published 1024 takes seconds here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_21_pipeline(tmp_path_factory.mktemp("qwen21") / "pipeline")


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> QwenImage21Pipeline:
    return tiny_21_loaded(folder)


family_of = family_maker("qwen_image_21_edit", QwenImage21EditFamily)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_embeddings_of_captions_with_pictures_are_those_of_the_pipeline(
    folder: Path, pipeline: QwenImage21Pipeline, count: int
) -> None:
    """What the pipeline has at the pictures' places is not kept: latents take these."""
    encoder = family_of(folder).load_text_encoder(torch.float32)
    assert encoder.sees_references
    captions = ["make it blue", "plain, small"]
    shown = [[picture(96 + 32 * i, 128, i + 5 * row) for i in range(count)] for row in range(2)]
    encoded = encoder.encode(captions, shown)
    for caption, pictures, ours in zip(captions, shown, encoded, strict=True):
        with torch.no_grad():
            theirs, mask, places = pipeline.encode_prompt(caption, image=pictures)
        assert mask is None
        parts = [ours[f"before_image_{i}"] for i in range(count)] + [ours["prompt_embeds"]]
        assert len(ours) == count + 2
        words = (~places[0]).tolist()
        ends = [i for i in range(1, len(words)) if words[i - 1] and not words[i]] + [len(words)]
        begins = [i for i in range(len(words)) if words[i] and not (i and words[i - 1])]
        for part, begin, end in zip(parts, begins, ends, strict=True):
            # batched with another caption: sums in another order, in layers with weights four times the usual
            torch.testing.assert_close(part, theirs[0, begin:end], rtol=1e-3, atol=1e-3)
        assert int(places.sum()) == sum(one.width * one.height for one in pictures) // 32**2
    different = (encoded[0]["prompt_embeds"][:1] - encoded[1]["prompt_embeds"][:1]).norm()
    assert different > 0.01 * encoded[0]["prompt_embeds"][:1].norm(), "pictures count: what follows them is one word"


@pytest.mark.parametrize("sizes", [(), ((4, 6),), ((2, 4), (4, 2))])
def test_velocity_is_that_of_diffusers_called_by_hand(
    folder: Path, pipeline: QwenImage21Pipeline, sizes: tuple[tuple[int, int], ...]
) -> None:
    family, inputs, random = family_of(folder), tiny_21_inputs(), torch.Generator().manual_seed(3)
    references = tuple(torch.randn(2, CHANNELS, *size, generator=random) for size in sizes)
    before = [torch.randn(2, 3 + i, TEXT_WIDTH, generator=random) for i in range(len(sizes))]
    text = {f"before_image_{i}": part for i, part in enumerate(before)} | {"prompt_embeds": inputs["prompt_embeds"]}
    with torch.no_grad():
        given = (family.load_transformer(torch.float32), inputs["latents"], inputs["sigmas"], text)
        ours = family.predict_velocity(*given, conditions=Conditions(references=references))
        images, words = [*references, inputs["latents"]], [*before, inputs["prompt_embeds"]]
        tokens = theirs_called(pipeline.transformer, images, inputs["sigmas"], words)
    theirs = QwenImage21Pipeline._unpack_latents(tokens, 8 * 16, 8 * 16, 16)[:, :, 0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_samples_are_those_of_the_pipeline(folder: Path, pipeline: QwenImage21Pipeline) -> None:
    family, pictures = family_of(folder), [picture(128, 128), picture(96, 160, 1)]
    encoder, text_encoder = family.load_image_encoder(torch.float32), family.load_text_encoder(torch.float32)
    (text, negative) = text_encoder.encode(["make it blue", "large"], [pictures, pictures])
    references = tuple(encoder.encode(to_pixels(one)[None]) for one in pictures)
    image = family.sample(
        family.load_transformer(torch.float32),
        encoder,
        text,
        SampleSettings(64, 96, steps=3, guidance=1.0, seed=7, cfg=3.0),
        negative_text=negative,
        conditions=Conditions(references=references),
    )
    theirs = pipeline(
        image=pictures,  # of sizes that the pipeline leaves as they are
        prompt="make it blue",
        negative_prompt="large",
        true_cfg_scale=3.0,
        width=64,
        height=96,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(7),
        output_resolution=RESOLUTION,
    ).images[0]
    # fp32 up to rounding; colour and opacity are rounded to integers there
    assert_same_picture(image, on_white(theirs), 2)


def test_split_files_see_the_same_and_an_encoder_that_cannot_see_is_refused(folder: Path, tmp_path: Path) -> None:
    files = save_21_split_files(folder, tmp_path)
    single = model_family(files.model_config(model_type="qwen_image_21_edit"))
    texts = [
        family.load_text_encoder(torch.float32).encode(["a"], [[picture(128, 96)]])[0]
        for family in (single, family_of(folder))
    ]
    assert texts[0].keys() == texts[1].keys()
    assert all(torch.equal(texts[0][name], texts[1][name]) for name in texts[0])
    weights = {k: v for k, v in load_file(files.text_encoder).items() if not k.startswith("visual.")}
    save_file(weights, files.text_encoder)
    with pytest.raises(UserError, match="no Qwen3-VL with its vision tower"):
        model_family(files.model_config(model_type="qwen_image_21_edit"))
    assert model_family(files.model_config()).load_text_encoder(torch.float32).encode(["a"])  # captions need none


def test_a_caption_without_references_is_read_too(folder: Path) -> None:
    (text,) = family_of(folder).load_text_encoder(torch.float32).encode(["a"])
    plain = ModelConfig(model_type="qwen_image_21", pretrained_model_name_or_path=str(folder))
    (other,) = model_family(plain).load_text_encoder(torch.float32).encode(["a"])
    assert text.keys() == other.keys()
    torch.testing.assert_close(text["prompt_embeds"], other["prompt_embeds"], rtol=1e-4, atol=1e-4)
