"""The Z-Image family against diffusers' ZImagePipeline: velocity, gradients, text, samples, files, a peft step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImagePipeline, ZImageTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from library.config.schema import FlowConfig
from library.models.z_image.spec import ZImageFamily
from tests.models.claims import (
    assert_refused,
    assert_same_gradients,
    assert_step_is_pefts,
    family_maker,
    gradients_of,
    quiet,
)
from tests.targets import Z_IMAGE_TARGETS
from tests.tiny_qwen import tiny_qwen_pipeline
from tests.tiny_z_image import save_z_split_files, tiny_z_inputs, tiny_z_pipeline

FLOW = FlowConfig(timestep_sampling="shift", discrete_flow_shift=2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_z_pipeline(tmp_path_factory.mktemp("z") / "pipeline")


family_of = family_maker("z_image", ZImageFamily)


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> ZImagePipeline:
    return quiet(ZImagePipeline.from_pretrained(folder))


def text_of(inputs: dict[str, Tensor], *lengths: int) -> dict[str, Tensor]:
    """Return the text of ``inputs``, captions cut to ``lengths`` by the mask."""
    mask = inputs["prompt_embeds_mask"].clone()
    for row, length in zip(mask, lengths, strict=False):
        row[length:] = False
    return {"prompt_embeds": inputs["prompt_embeds"], "prompt_embeds_mask": mask}


def by_hand(transformer: nn.Module, latents: Tensor, sigmas: Tensor, text: dict[str, Tensor]) -> Tensor:
    """Call a transformer as ZImagePipeline does; return the velocity."""
    timestep = (1000 - sigmas * 1000) / 1000
    captions = [embeds[mask] for embeds, mask in zip(text["prompt_embeds"], text["prompt_embeds_mask"], strict=True)]
    output = transformer(list(latents.unsqueeze(2).unbind(0)), timestep, captions, return_dict=False)[0]
    return -torch.stack(output).squeeze(2)


@pytest.mark.parametrize("case", ["same lengths", "one length of padded captions", "two", "checkpointing"])
def test_velocity_and_input_gradients_are_diffusers(folder: Path, pipeline: ZImagePipeline, case: str) -> None:
    inputs = tiny_z_inputs(tokens=40)
    latents = inputs["latents"][..., :6]  # 8 x 6: a swapped axis would show; 12 tokens are filled up to 32
    lengths = {"one length of padded captions": (40, 37), "two": (40, 9)}.get(case, ())
    text = text_of(inputs, *lengths)
    family = family_of(folder)
    transformer = family.load_transformer(torch.float32)
    if case == "checkpointing":
        transformer.enable_gradient_checkpointing()

    def called(velocity: Any) -> Any:
        return lambda x: velocity(x["latents"], inputs["sigmas"], text | {"prompt_embeds": x["prompt_embeds"]})

    names, given = ("latents", "prompt_embeds"), {**inputs, "latents": latents}
    ours = gradients_of(called(lambda *given: family.predict_velocity(transformer, *given)), given, names)
    theirs = gradients_of(called(lambda *given: by_hand(pipeline.transformer, *given)), given, names)
    assert_same_gradients(ours, theirs)


def test_a_training_step_is_that_of_diffusers_and_peft(folder: Path) -> None:
    inputs = tiny_z_inputs(3, tokens=40)
    text = text_of(inputs, 40, 5, 33)
    theirs = ZImageTransformer2DModel.from_pretrained(folder, subfolder="transformer")
    velocity = lambda *given: by_hand(*given, text)  # noqa: E731
    left = assert_step_is_pefts(family_of(folder), Z_IMAGE_TARGETS, inputs, text, FLOW, theirs, velocity)
    assert left
    assert all(name.startswith("all_final_layer") for name in left)


def test_other_models_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    files = save_z_split_files(folder, tmp_path / "files")
    qwen = tiny_qwen_pipeline(tmp_path / "qwen")
    omni = tmp_path / "omni.safetensors"
    save_file({**load_file(files.transformer), "siglip_pad_token": torch.ones(1, 64)}, omni)
    wanted = {
        "not ZImageTransformer2DModel; set model_type = .qwen_image": {"pretrained_model_name_or_path": str(qwen)},
        r"not Qwen3 \(no model.layers.0": {"text_encoder": str(files.vae)},
        "'qwen2_5_vl', not qwen3": {"text_encoder": str(qwen)},
        "Z-Image-Omni, not a model family": {"pretrained_model_name_or_path": str(omni)},
        "an image autoencoder.*, not Z-Image": {"pretrained_model_name_or_path": str(files.vae)},
    }
    assert_refused(files.model_config, wanted)
