"""FLUX.2 dev against diffusers' Flux2Pipeline: velocity, text of Mistral Small 3, samples, ComfyUI's text encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2KleinPipeline, Flux2Pipeline
from safetensors.torch import load_file, save_file

from library.errors import UserError
from library.models.family import SampleSettings
from library.models.flux2.spec import DevFamily
from tests.models.claims import assert_sample_is_the_pipelines, family_maker, quiet
from tests.tiny_flux2 import bfl_flux2_state_dict, patched, tiny_dev_pipeline, tiny_flux2_inputs, tiny_flux2_pipeline

CAPTIONS = ["a red disc", "make the picture of a small plain disc blue, yellow and purple "]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_dev_pipeline(tmp_path_factory.mktemp("flux2") / "dev")


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Flux2Pipeline:
    return quiet(Flux2Pipeline.from_pretrained(folder))


family_of = family_maker("flux2_dev", DevFamily)


@torch.no_grad()
def test_the_velocity_is_diffusers_at_every_guidance(folder: Path, pipeline: Flux2Pipeline) -> None:
    inputs, family = tiny_flux2_inputs(), family_of(folder)
    patches, text = patched(inputs["latents"]), inputs["prompt_embeds"]
    transformer, found = family.load_transformer(torch.float32), []
    for guidance in (1.0, 4.0):
        theirs = pipeline.transformer(
            hidden_states=Flux2KleinPipeline._pack_latents(patches),
            timestep=inputs["sigmas"],
            guidance=torch.full((2,), guidance),
            encoder_hidden_states=text,
            txt_ids=pipeline._prepare_text_ids(text),
            img_ids=pipeline._prepare_latent_ids(patches),
            return_dict=False,
        )[0]
        theirs = pipeline._unpatchify_latents(theirs.transpose(1, 2).reshape(patches.shape))
        given = (inputs["latents"], inputs["sigmas"], {"prompt_embeds": text}, guidance)
        found.append(family.predict_velocity(transformer, *given))
        torch.testing.assert_close(found[-1], theirs, rtol=1e-5, atol=1e-5)
    assert (found[0] - found[1]).abs().max() > 1e-3


@pytest.mark.parametrize("captions", [CAPTIONS, [""], ["a {brace}, [IMG] and [INST]"], ["plain " * 600]])
def test_text_embeddings_are_those_of_the_pipeline(folder: Path, pipeline: Flux2Pipeline, captions: list[str]) -> None:
    encoder: Any = family_of(folder).load_text_encoder(torch.float32)
    with torch.no_grad():
        theirs, _ = pipeline.encode_prompt([*captions])
    for ours, embeds in zip(encoder.encode(captions), theirs, strict=True):
        torch.testing.assert_close(ours["prompt_embeds"], embeds, rtol=1e-5, atol=1e-5)
    assert len(encoder._model.layers) == 30
    assert theirs.std(dim=1).amax() > 0.1, "captions and places differ"


def test_samples_are_those_of_the_pipeline(folder: Path, pipeline: Flux2Pipeline) -> None:
    family = family_of(folder)
    assert_sample_is_the_pipelines(family, pipeline, 1.0, guidance_scale=3.5)
    text, settings = {"prompt_embeds": torch.zeros(512, 1)}, SampleSettings(64, 64, 3, 3.5, 7, cfg=2.0)
    loaded = family.load_transformer(torch.float32), family.load_image_encoder(torch.float32)
    with pytest.raises(UserError, match="flux2_dev knows no negative prompt; remove"):
        family.sample(*loaded, text, settings, negative_text=text)


def test_bfls_file_and_comfyuis_text_encoder_hold_the_same_model(folder: Path, tmp_path: Path) -> None:
    state = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    save_file(bfl_flux2_state_dict(state), tmp_path / "flux2-dev.safetensors")
    text = load_file(folder / "text_encoder" / "model.safetensors")
    # ComfyUI's file is the language model alone, with the tokenizer's file in a tensor of bytes
    mine = {name.partition("language_model.")[2]: tensor for name, tensor in text.items() if "language_model" in name}
    plain = {f"model.{name.removeprefix('model.')}": t for name, t in mine.items() if "lm_head" not in name}
    save_file(plain | {"tekken_model": torch.zeros(4, dtype=torch.uint8)}, tmp_path / "mistral.safetensors")
    parts = {"vae": str(folder), "text_encoder": str(tmp_path / "mistral.safetensors")}
    single = family_of(tmp_path / "flux2-dev.safetensors", **parts, mistral_tokenizer=str(folder / "tokenizer"))
    whole = family_of(folder)
    ours, theirs = (family.load_transformer(torch.float32).state_dict() for family in (single, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    texts = [family.load_text_encoder(torch.float32).encode(CAPTIONS) for family in (single, whole)]
    assert all(torch.equal(a["prompt_embeds"], b["prompt_embeds"]) for a, b in zip(*texts, strict=True))


def test_klein_and_its_parts_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    klein = tiny_flux2_pipeline(tmp_path / "klein")
    wanted = {
        r'is FLUX\.2 \(flux2_klein.*; set model_type = "flux2_klein': {
            "pretrained_model_name_or_path": str(klein), "text_encoder": str(folder),
        },
        "'qwen3', not mistral; give FLUX.2 dev's text encoder": {"text_encoder": str(klein)},
        r"not Mistral Small 3 \(no": {"text_encoder": str(klein / "text_encoder" / "model.safetensors")},
    }  # fmt: skip
    for message, changes in wanted.items():
        with pytest.raises(UserError, match=message) as caught:
            family_of(**({"folder": folder} | changes))  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    from library.models.flux2.text import MISTRAL

    with pytest.raises(UserError, match="has no .SYSTEM_PROMPT.; give the tokenizer of Mistral Small 3"):
        MISTRAL.tokenizer(klein / "tokenizer")
