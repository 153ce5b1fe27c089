"""Velocity, gradients, memory and a training step of families that differ in how diffusers' transformer is called.

The independent answer is diffusers' transformer, called as its pipeline calls it, with peft's LoRA in a training step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    ErnieImagePipeline,
    ErnieImageTransformer2DModel,
    Krea2Transformer2DModel,
    ZImageTransformer2DModel,
)
from peft import LoraConfig
from torch import Tensor, nn

from library.config.schema import FlowConfig, ModelConfig, NetworkConfig
from library.models.family import Family
from library.models.family_by_name import family_class, model_family
from library.models.vae import pack_latents, unpack_latents
from networks.network import inject_adapter
from networks.options import parse_network_args
from tests.models.claims import assert_same_gradients, assert_step_is_pefts, gradients_of, saved_bytes
from tests.tiny_ernie_image import tiny_ernie_inputs, tiny_ernie_pipeline, tiny_ernie_transformer
from tests.tiny_krea2 import (
    TEXT_LAYERS,
    TEXT_WIDTH,
    positions,
    tiny_krea2_inputs,
    tiny_krea2_pipeline,
    tiny_krea2_transformer,
)
from tests.tiny_z_image import tiny_z_inputs, tiny_z_pipeline, tiny_z_transformer

Text = Mapping[str, Tensor]


def captions_of(text: Text) -> list[Tensor]:
    """Return each caption's vectors without padding."""
    embeds = text["prompt_embeds"]
    mask = text.get("prompt_embeds_mask", torch.ones(embeds.shape[:2], dtype=torch.bool))
    return [each[real] for each, real in zip(embeds, mask, strict=True)]


def krea2(transformer: nn.Module, latents: Tensor, sigmas: Tensor, text: Text) -> Tensor:
    """Call a transformer as Krea2Pipeline does; return the velocity."""
    rows, columns = latents.shape[-2] // 2, latents.shape[-1] // 2
    output = transformer(
        hidden_states=pack_latents(latents),
        encoder_hidden_states=text["prompt_embeds"].unflatten(-1, (TEXT_LAYERS, TEXT_WIDTH)),
        timestep=sigmas,
        position_ids=positions(text["prompt_embeds"].shape[1], rows, columns),
        encoder_attention_mask=text.get("prompt_embeds_mask"),
        return_dict=False,
    )[0]
    return unpack_latents(output, *latents.shape[-2:])


def z_image(transformer: nn.Module, latents: Tensor, sigmas: Tensor, text: Text) -> Tensor:
    """Call a transformer as ZImagePipeline does; return the velocity."""
    timestep = (1000 - sigmas * 1000) / 1000
    output = transformer(list(latents.unsqueeze(2).unbind(0)), timestep, captions_of(text), return_dict=False)[0]
    return -torch.stack(output).squeeze(2)


def ernie_image(transformer: nn.Module, latents: Tensor, sigmas: Tensor, text: Text) -> Tensor:
    """Call a transformer as ErnieImagePipeline does; return the velocity."""
    captions = captions_of(text)
    given, lengths = ErnieImagePipeline._pad_text(captions, latents.device, latents.dtype, captions[0].shape[-1])
    patches = ErnieImagePipeline._patchify_latents(latents)
    output = transformer(
        hidden_states=patches, timestep=1000 * sigmas, text_bth=given, text_lens=lengths, return_dict=False
    )[0]
    return ErnieImagePipeline._unpatchify_latents(output)


@dataclass(frozen=True)
class Case:
    """A family's tiny model.

    Attributes:
        by_hand: calls a transformer as the pipeline does. published: diffusers' class.
        folder, inputs, transformer: the tiny pipeline, its inputs, and diffusers' transformer of random weights.
        flow: how noise levels are drawn. left: beginning of the linear layers that have no LoRA, if there are any.
        saves: less than this share of what diffusers saves for backward with peft's LoRA, where it is measured.
    """

    by_hand: Callable[[Any, Tensor, Tensor, Text], Tensor]
    published: Any
    folder: Callable[..., Path]
    inputs: Callable[..., dict[str, Tensor]]
    transformer: Callable[[], nn.Module]
    flow: FlowConfig
    left: str = ""
    saves: float = 0.5


CASES = {
    "krea2": Case(
        *(krea2, Krea2Transformer2DModel, tiny_krea2_pipeline, tiny_krea2_inputs, tiny_krea2_transformer),
        flow=FlowConfig(timestep_sampling="krea2_shift"),
    ),
    "z_image": Case(
        *(z_image, ZImageTransformer2DModel, tiny_z_pipeline, tiny_z_inputs, tiny_z_transformer),
        flow=FlowConfig(timestep_sampling="shift", discrete_flow_shift=2.0),
        left="all_final_layer",
        saves=0.7,
    ),
    "ernie_image": Case(
        *(ernie_image, ErnieImageTransformer2DModel, tiny_ernie_pipeline, tiny_ernie_inputs, tiny_ernie_transformer),
        flow=FlowConfig(timestep_sampling="shift", discrete_flow_shift=4.0),
    ),
}


@pytest.fixture(scope="module", params=CASES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = CASES[request.param].folder(tmp_path_factory.mktemp(request.param) / "pipeline")
    return model_family(ModelConfig(model_type=request.param, pretrained_model_name_or_path=str(folder)))


def diffusers_own(family: Family) -> Any:
    """Return diffusers' transformer of the same weights."""
    folder = family.config.pretrained_model_name_or_path
    return CASES[family.name].published.from_pretrained(folder, subfolder="transformer")


def text_of(inputs: Text, *lengths: int) -> dict[str, Tensor]:
    """Return the text of ``inputs``, captions cut to ``lengths`` by a mask; without lengths there is none."""
    embeds = inputs["prompt_embeds"]
    mask = torch.arange(embeds.shape[1]) < torch.tensor(lengths or (0,)).unsqueeze(1)
    return {"prompt_embeds": embeds} | ({"prompt_embeds_mask": mask} if lengths else {})


@pytest.mark.parametrize("lengths", [(), (40, 37), (40, 9)], ids=["same", "close", "two, checkpointing"])
def test_velocity_and_input_gradients_are_diffusers(family: Family, lengths: tuple[int, ...]) -> None:
    case = CASES[family.name]
    inputs = case.inputs(tokens=40)
    latents = inputs["latents"][..., :6]  # 8 x 6: a swapped axis would show
    text, transformer = text_of(inputs, *lengths), family.load_transformer(torch.float32)
    if 9 in lengths:
        transformer.enable_gradient_checkpointing()
        transformer.train()

    def called(velocity: Any) -> Any:
        return lambda x: velocity(x["latents"], inputs["sigmas"], text | {"prompt_embeds": x["prompt_embeds"]})

    theirs = diffusers_own(family)
    names, given = ("latents", "prompt_embeds"), {**inputs, "latents": latents}
    assert_same_gradients(
        gradients_of(called(lambda *given: family.predict_velocity(transformer, *given)), given, names),
        gradients_of(called(lambda *given: case.by_hand(theirs, *given)), given, names),
    )


def test_a_training_step_is_that_of_diffusers_and_peft(family: Family) -> None:
    case = CASES[family.name]
    inputs = case.inputs(3, tokens=40)
    text = text_of(inputs, 40, 5, 33)
    velocity = lambda *given: case.by_hand(*given, text)  # noqa: E731
    left = assert_step_is_pefts(family, family.targets, inputs, text, case.flow, diffusers_own(family), velocity)
    assert bool(left) == bool(case.left)
    assert all(name.startswith(case.left) for name in left)


@pytest.mark.parametrize("name", CASES)
def test_less_is_saved_for_backward_than_by_diffusers_with_peft(name: str) -> None:
    saved, case, kind = [], CASES[name], family_class(name)
    inputs, options = case.inputs(1, side=32), NetworkConfig(network_dim=4, network_alpha=4)
    for is_ours in (False, True):
        model: Any = case.transformer()
        if is_ours:
            inject_adapter(kind.optimise_forward(model), parse_network_args(options, kind.targets), kind.targets, 0)
        else:
            layers = "|".join(group.pattern for group in kind.targets.layer_groups if group.default)
            model.requires_grad_(False).add_adapter(LoraConfig(r=4, target_modules=layers))
        given = inputs["latents"], inputs["sigmas"], text_of(inputs)
        saved.append(saved_bytes(lambda model=model, given=given: case.by_hand(model, *given)))
    assert saved[1] < case.saves * saved[0], saved[1] / saved[0]
