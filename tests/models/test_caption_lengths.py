"""What a caption gives does not depend on how far it is filled up under a mask: beside longer captions of its batch, or
to one of the few sizes of steps that are captured. One claim, of every family whose captions differ in length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from library.conditions import Conditions
from library.config.model_types import IMAGE_MODELS
from library.config.schema import ModelConfig
from library.data.batches import Batch, Item, collate
from library.models.family import Family
from library.models.family_by_name import family_class, model_family
from library.models.text import CAPTION_MULTIPLE
from tests.models.claims import inject_every_layer
from tests.parity.peft_lora import fill_up
from tests.tiny_ernie_image import tiny_ernie_inputs, tiny_ernie_pipeline
from tests.tiny_flux3 import tiny_flux3_inputs, tiny_flux3_pipeline
from tests.tiny_krea2 import tiny_krea2_inputs, tiny_krea2_pipeline
from tests.tiny_qwen import tiny_qwen_inputs, tiny_qwen_pipeline
from tests.tiny_qwen_21 import tiny_21_inputs, tiny_21_pipeline
from tests.tiny_z_image import tiny_z_inputs, tiny_z_pipeline

plus = partial(tiny_qwen_pipeline, kind="qwen_image_edit_plus", zero_cond_t=True)
MODELS: dict[str, tuple[Callable[..., Path], Callable[..., dict[str, Tensor]]]] = {
    "qwen_image": (tiny_qwen_pipeline, tiny_qwen_inputs),
    "qwen_image_edit": (partial(tiny_qwen_pipeline, kind="qwen_image_edit"), tiny_qwen_inputs),
    "qwen_image_edit_plus": (plus, tiny_qwen_inputs),
    "qwen_image_21": (tiny_21_pipeline, tiny_21_inputs),
    "qwen_image_21_edit": (tiny_21_pipeline, tiny_21_inputs),
    "z_image": (tiny_z_pipeline, tiny_z_inputs),
    "flux3_klein": (tiny_flux3_pipeline, tiny_flux3_inputs),
    "flux3_klein_edit": (tiny_flux3_pipeline, tiny_flux3_inputs),
    "krea2": (tiny_krea2_pipeline, tiny_krea2_inputs),
    "ernie_image": (tiny_ernie_pipeline, tiny_ernie_inputs),
}


def test_every_family_whose_captions_differ_in_length_is_here() -> None:
    assert {name for name in IMAGE_MODELS if family_class(name).captions_differ} == set(MODELS)


class Trained:
    """A tiny model with a LoRA in every layer that can have one, and three samples' inputs."""

    def __init__(self, family: Family, inputs: dict[str, Tensor]) -> None:
        self.family, self.inputs, self.random = family, inputs, torch.Generator().manual_seed(3)
        self.transformer = family.load_transformer(torch.float32)
        self.network = fill_up(inject_every_layer(self.transformer, family.targets))
        self.weights = torch.randn(inputs["latents"].shape, generator=self.random)
        sides = ((4, 6), (6, 2))[: family.most_references or 2] if family.conditioning == "references" else ()
        channels = inputs["latents"].shape[1]
        self.references = [torch.randn(3, channels, *side, generator=self.random) for side in sides]
        width = inputs["prompt_embeds"].shape[-1]
        before = sides if family.name == "qwen_image_21_edit" else ()  # text that stands before each reference
        self.before = {f"before_image_{i}": torch.randn(3, 5 + i, width) for i in range(len(before))}

    def items(self, lengths: Sequence[int]) -> list[Item]:
        """Return samples whose captions are cut to ``lengths``."""
        items = []
        for i, length in enumerate(lengths):
            mask = torch.ones(length, dtype=torch.bool)
            text = {"prompt_embeds": self.inputs["prompt_embeds"][i, :length], "prompt_embeds_mask": mask}
            text |= {name: part[i] for name, part in self.before.items()}
            shown = Conditions(references=tuple(each[i] for each in self.references))
            items.append(Item(self.inputs["latents"][i], text, 1.0, None, i, conditions=shown))
        return items

    def run(self, batch: Batch) -> tuple[Tensor, list[Tensor]]:
        """Return velocities, and the LoRA's gradients of a weighted sum of them."""
        ids, parameters = batch.sample_ids, list(self.network.parameters())
        given = self.transformer, batch.latents, self.inputs["sigmas"][ids], batch.text
        velocity = self.family.predict_velocity(*given, conditions=batch.conditions)
        gradients = torch.autograd.grad((velocity * self.weights[ids]).sum(), parameters, materialize_grads=True)
        return velocity.detach(), list(gradients)


@pytest.fixture(scope="module", params=MODELS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    write, draw = MODELS[request.param]
    settings: dict[str, Any] = {"zero_cond_t": True} if request.param == "qwen_image_edit_plus" else {}
    folder = str(write(tmp_path_factory.mktemp(request.param) / "pipeline"))
    config = ModelConfig(model_type=request.param, pretrained_model_name_or_path=folder, **settings)
    return Trained(model_family(config), draw(3, tokens=CAPTION_MULTIPLE + 1))


def rounded(trained: Trained, batch: Batch) -> Batch:
    """Return the batch with rounded captions, and large numbers where they are filled up."""
    text = trained.family.rounded_text(batch.text)
    noise = 1e4 * torch.randn(text["prompt_embeds"].shape, generator=torch.Generator().manual_seed(7))
    embeds = torch.where(text["prompt_embeds_mask"].unsqueeze(-1), text["prompt_embeds"], noise)
    return replace(batch, text=text | {"prompt_embeds": embeds})


SIZE = CAPTION_MULTIPLE


@pytest.mark.parametrize("lengths", [(1,), (SIZE,), (SIZE - 1, SIZE + 1, 1), (7, SIZE - 1, 33)])
def test_velocities_and_gradients_are_those_of_captions_without_padding(
    trained: Trained, lengths: tuple[int, ...]
) -> None:
    items = trained.items(lengths)
    alone = [trained.run(collate([item])) for item in items]
    velocity, gradients = torch.cat([each for each, _ in alone]), [sum(each) for each in zip(*(g for _, g in alone))]
    batch = collate(items)
    filled = rounded(trained, batch)
    assert filled.text["prompt_embeds"].shape[1] == SIZE * (1 + (max(lengths) > SIZE))
    assert filled.text["prompt_embeds_mask"].sum(dim=1).tolist() == list(lengths)
    largest = max(each.abs().max() for each in gradients)
    for given in (batch, filled):
        found, own = trained.run(given)
        # fp32, sums over keys and samples in another order
        torch.testing.assert_close(found, velocity, rtol=1e-5, atol=1e-5 * velocity.abs().max().item())
        for one, other in zip(own, gradients, strict=True):
            assert (one - other).abs().max() <= 1e-5 * other.abs().max() + 1e-7 * largest
    if max(lengths) % SIZE:
        mask = torch.ones_like(filled.text["prompt_embeds_mask"])
        seen = trained.run(replace(filled, text=filled.text | {"prompt_embeds_mask": mask}))[0]
        assert (seen - velocity).abs().max() > 1e-3 * velocity.abs().max(), "what fills up would count"
