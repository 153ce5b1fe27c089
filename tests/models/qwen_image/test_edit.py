"""Qwen-Image-Edit and Edit Plus against diffusers' pipelines: text that sees pictures, velocity, samples.

diffusers 0.42's edit pipelines do not hand on which tokens are pictures, so that transformers 5 gives these the places
of text (https://github.com/huggingface/diffusers/issues/14194). The pipelines of these tests do what they did with
transformers 4: their text encoder is told.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image

from library.conditions import Conditions
from library.config.schema import FlowConfig, ModelConfig
from library.data.batches import Batch
from library.data.images import to_pixels
from library.errors import UserError
from library.models.family import SampleSettings
from library.models.family_by_name import model_family
from library.models.qwen_image.spec import QwenImageEditFamily
from library.models.qwen_image.text import TEMPLATES, reference_size
from library.training.tasks.image_step import FlowStep
from tests.models.claims import assert_same_picture, quiet
from tests.tiny_qwen import PIPELINES, Kind, TinyProcessor, save_split_files, tiny_qwen_inputs, tiny_qwen_pipeline

MODULES = {"qwen_image_edit": pipeline_qwenimage_edit, "qwen_image_edit_plus": pipeline_qwenimage_edit_plus}
CAPTIONS = ["make it blue", "plain, small"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("edit")
    return {
        "qwen_image_edit": tiny_qwen_pipeline(root / "edit", "qwen_image_edit"),
        "qwen_image_edit_plus": tiny_qwen_pipeline(root / "plus", "qwen_image_edit_plus"),
        "2511": tiny_qwen_pipeline(root / "2511", "qwen_image_edit_plus", zero_cond_t=True),
    }


def kind_of(name: str) -> Kind:
    return "qwen_image_edit_plus" if name == "2511" else name  # type: ignore[return-value]


def family_of(folders: dict[str, Path], name: str) -> QwenImageEditFamily:
    config = ModelConfig(model_type=kind_of(name), pretrained_model_name_or_path=str(folders[name]))
    family = model_family(config)
    assert isinstance(family, QwenImageEditFamily)
    return family


def pipeline_of(folders: dict[str, Path], name: str, told: bool = True) -> Any:
    pipeline = PIPELINES[kind_of(name)].from_pretrained(folders[name], processor=None)
    pipeline.processor = TinyProcessor(pipeline.tokenizer)
    if told:
        forward, token = pipeline.text_encoder.forward, pipeline.text_encoder.config.image_token_id
        pipeline.text_encoder.forward = lambda input_ids, **rest: forward(
            input_ids=input_ids, mm_token_type_ids=(input_ids == token).int(), **rest
        )
    return quiet(pipeline)


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return smooth noise: detail that survives resizing."""
    small = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@pytest.mark.parametrize("size", [(640, 480), (333, 1000), (64, 64)])
def test_pictures_are_resized_as_the_pipelines_do(size: tuple[int, int]) -> None:
    ratio = size[0] / size[1]
    assert TEMPLATES["qwen_image_edit_plus"].area == pipeline_qwenimage_edit_plus.CONDITION_IMAGE_SIZE
    assert reference_size(384 * 384, *size) == pipeline_qwenimage_edit_plus.calculate_dimensions(384 * 384, ratio)
    assert reference_size(1024 * 1024, *size) == pipeline_qwenimage_edit.calculate_dimensions(1024 * 1024, ratio)[:2]


@pytest.mark.parametrize("name", ["qwen_image_edit", "qwen_image_edit_plus"])
def test_embeddings_of_captions_with_pictures_are_those_of_the_pipeline(folders: dict[str, Path], name: str) -> None:
    pipeline, encoder = pipeline_of(folders, name), family_of(folders, name).load_text_encoder(torch.float32)
    assert encoder.sees_references
    counts = (1, 1) if name == "qwen_image_edit" else (2, 3)
    shown = [[picture(160 + 32 * i, 128, i + 5 * row) for i in range(count)] for row, count in enumerate(counts)]
    area = 256 * 256  # the published one, which the test above compares, takes seconds here
    encoder.template = replace(encoder.template, area=area)
    encoded = encoder.encode(CAPTIONS, shown)
    for caption, pictures, ours in zip(CAPTIONS, shown, encoded, strict=True):
        sizes = [reference_size(area, *one.size) for one in pictures]
        prepared = [
            pipeline.image_processor.resize(one, height, width)
            for one, (width, height) in zip(pictures, sizes, strict=True)
        ]
        with torch.no_grad():
            theirs, mask = pipeline.encode_prompt(
                caption, image=prepared if name == "qwen_image_edit_plus" else prepared[0]
            )
        assert mask is None
        assert ours["prompt_embeds"].shape == theirs[0].shape
        # batched with another caption: sums in another order, in two layers with weights four times the usual
        torch.testing.assert_close(ours["prompt_embeds"], theirs[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(encoded[0]["prompt_embeds"][5:20], encoded[1]["prompt_embeds"][5:20]), "pictures count"


def test_pictures_take_places_in_a_grid_which_the_pipeline_alone_forgets(folders: dict[str, Path]) -> None:
    name = "qwen_image_edit_plus"
    encoder, shown = family_of(folders, name).load_text_encoder(torch.float32), picture(384, 384)
    (ours,) = encoder.encode(["make it blue"], [[shown]])
    with torch.no_grad():
        told, _ = pipeline_of(folders, name).encode_prompt("make it blue", image=[shown])
        plain, _ = pipeline_of(folders, name, told=False).encode_prompt("make it blue", image=[shown])
    torch.testing.assert_close(ours["prompt_embeds"], told[0], rtol=1e-4, atol=1e-4)
    assert (plain - told).norm() > 0.05 * told.norm()


def test_a_caption_with_the_models_word_for_a_picture_is_refused_beside_pictures(folders: dict[str, Path]) -> None:
    encoder = family_of(folders, "qwen_image_edit_plus").load_text_encoder(torch.float32)
    with pytest.raises(UserError, match=r"caption 'two <\|image_pad\|>': .* the model's word for a picture; remove it"):
        encoder.encode(["one", "two <|image_pad|>"], [[picture(32, 32)]] * 2)


@pytest.mark.parametrize("name", ["qwen_image_edit", "qwen_image_edit_plus", "2511"])
def test_velocity_is_that_of_diffusers_called_by_hand(folders: dict[str, Path], name: str) -> None:
    family, inputs = family_of(folders, name), tiny_qwen_inputs()
    random = torch.Generator().manual_seed(3)
    sizes = [(4, 6)] if name == "qwen_image_edit" else [(4, 6), (8, 4)]
    references = tuple(torch.randn(2, 16, *size, generator=random) for size in sizes)
    text = {name: inputs[name] for name in ("prompt_embeds", "prompt_embeds_mask")}
    pipeline = pipeline_of(folders, name)
    packed = [pipeline._pack_latents(p, 2, 16, *p.shape[2:]) for p in (inputs["latents"], *references)]
    with torch.no_grad():
        transformer = family.load_transformer(torch.float32)
        assert transformer.zero_cond_t == (name == "2511")
        ours = family.predict_velocity(
            transformer, inputs["latents"], inputs["sigmas"], text, conditions=Conditions(references=references)
        )
        tokens = pipeline.transformer(
            hidden_states=torch.cat(packed, dim=1),
            timestep=inputs["sigmas"],
            encoder_hidden_states=inputs["prompt_embeds"],
            img_shapes=[[(1, 4, 4), *((1, h // 2, w // 2) for h, w in sizes)]] * 2,
            return_dict=False,
        )[0]
    theirs = pipeline._unpack_latents(tokens[:, :16], 64, 64, 8)[:, :, 0]
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen_image_edit", "qwen_image_edit_plus", "2511"])
def test_samples_are_those_of_the_pipeline(
    folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipelines resize references to a megapixel; here that is 128 x 128, so that the test is quick."""
    module, small = MODULES[kind_of(name)], 128 * 128
    original = module.calculate_dimensions
    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: original(small, ratio))
    family, pipeline = family_of(folders, name), pipeline_of(folders, name)
    pictures = [picture(160, 128), picture(96, 128, 1)][: 1 if name == "qwen_image_edit" else 2]
    encoder, text_encoder = family.load_image_encoder(torch.float32), family.load_text_encoder(torch.float32)
    text_encoder.template = replace(text_encoder.template, area=small)
    (text, negative) = text_encoder.encode(["make it blue", "large"], [pictures, pictures])
    resized = [one.resize(reference_size(small, *one.size), Image.Resampling.LANCZOS) for one in pictures]
    references = tuple(encoder.encode(to_pixels(one)[None]) for one in resized)
    image = family.sample(
        family.load_transformer(torch.float32),
        encoder,
        text,
        SampleSettings(64, 96, steps=3, guidance=1.0, seed=7, cfg=3.0),
        negative_text=negative,
        conditions=Conditions(references=references),
    )
    theirs = pipeline(
        image=pictures if name != "qwen_image_edit" else pictures[0],
        prompt="make it blue",
        negative_prompt="large",
        true_cfg_scale=3.0,
        width=64,
        height=96,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(7),
    ).images[0]
    # fp32 up to rounding, which the VAE of random weights may turn into two steps of 255
    assert_same_picture(image, theirs, 2)


def test_a_step_counts_the_painted_picture_alone_and_follows_the_reference(folders: dict[str, Path]) -> None:
    family, inputs = family_of(folders, "qwen_image_edit_plus"), tiny_qwen_inputs()
    transformer = family.load_transformer(torch.float32)
    text = {name: inputs[name] for name in ("prompt_embeds", "prompt_embeds_mask")}

    def batch(references: tuple[torch.Tensor, ...]) -> Batch:
        ids = [1, 2]
        return Batch(inputs["latents"], text, torch.ones(2), None, ids, conditions=Conditions(references=references))

    step = FlowStep(family, FlowConfig(timestep_sampling="qwen_shift"), seed=4)
    random = torch.Generator().manual_seed(3)
    shown = torch.randn(2, 16, 4, 6, generator=random)
    with torch.no_grad():
        one, other = step.loss(transformer, batch((shown,)), 0)[0], step.loss(transformer, batch((-shown,)), 0)[0]
        without = step.loss(transformer, batch(()), 0)[0]
    assert len({round(value.item(), 5) for value in (one, other, without)}) == 3
    edit = family_of(folders, "qwen_image_edit")
    with pytest.raises(UserError, match="takes one reference image a sample, found 2; use model_type"):
        FlowStep(edit, FlowConfig(), seed=4).loss(edit.load_transformer(torch.float32), batch((shown, shown)), 0)
    with pytest.raises(UserError, match="takes one reference image a sample, found 0; give control_directory"):
        FlowStep(edit, FlowConfig(), seed=4).loss(edit.load_transformer(torch.float32), batch(()), 0)


def test_split_files_of_2511_say_so_or_are_told(folders: dict[str, Path], tmp_path: Path) -> None:
    files = save_split_files(folders["2511"], tmp_path)
    told = model_family(files.model_config(model_type="qwen_image_edit_plus", zero_cond_t=True))
    assert told.load_transformer(torch.float32).zero_cond_t  # type: ignore[attr-defined]
    assert told.modelspec_architecture == "Qwen-Image-Edit-2511"
    plain = model_family(files.model_config(model_type="qwen_image_edit_plus"))
    assert not plain.load_transformer(torch.float32).zero_cond_t  # type: ignore[attr-defined]
    text = told.load_text_encoder(torch.float32).encode(["a"], [[picture(384, 384)]])
    whole = family_of(folders, "2511").load_text_encoder(torch.float32).encode(["a"], [[picture(384, 384)]])
    assert torch.equal(text[0]["prompt_embeds"], whole[0]["prompt_embeds"])
