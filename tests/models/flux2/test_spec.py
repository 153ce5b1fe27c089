"""FLUX.2 klein against diffusers' Flux2KleinPipeline: velocity, gradients, text, samples, files, a peft step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from library.conditions import NO_CONDITIONS, Conditions
from library.config.schema import FlowConfig, NetworkConfig
from library.data.images import to_pixels
from library.models.family import SampleSettings
from library.models.flux2.model import optimise_forward
from library.models.flux2.spec import KleinFamily
from networks.network import inject_adapter
from networks.options import parse_network_args
from tests.models.claims import (
    assert_refused,
    assert_same_gradients,
    assert_same_picture,
    assert_step_is_pefts,
    family_maker,
    gradients_of,
    quiet,
    saved_bytes,
)
from tests.targets import FLUX2_TARGETS
from tests.tiny_flux2 import (
    patched,
    save_flux2_files,
    tiny_flux2_inputs,
    tiny_flux2_pipeline,
    tiny_flux2_text_encoder,
    tiny_flux2_transformer,
)
from tests.tiny_z_image import tiny_z_pipeline

FLOW = FlowConfig(timestep_sampling="flux2_shift")
PACK, LATENT_IDS = Flux2KleinPipeline._pack_latents, Flux2KleinPipeline._prepare_latent_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux2_pipeline(tmp_path_factory.mktemp("flux2") / "pipeline")


family_of = family_maker("flux2_klein", KleinFamily)


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Flux2KleinPipeline:
    return quiet(Flux2KleinPipeline.from_pretrained(folder))


def text_of(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"prompt_embeds": inputs["prompt_embeds"]}


def by_hand(
    transformer: nn.Module, latents: Tensor, sigmas: Tensor, embeds: Tensor, references: tuple[Tensor, ...] = ()
) -> Tensor:
    """Call a transformer as Flux2KleinPipeline does; return the velocity."""
    patches = patched(latents)
    tokens, ids = PACK(patches), LATENT_IDS(patches)
    if references:
        tokens = torch.cat([tokens, *(PACK(patched(each)) for each in references)], dim=1)
        places = Flux2KleinPipeline._prepare_image_ids([patched(each[:1]) for each in references])
        ids = torch.cat([ids, places.expand(len(latents), -1, -1)], dim=1)
    output = transformer(
        hidden_states=tokens,
        timestep=sigmas,
        guidance=None,
        encoder_hidden_states=embeds,
        txt_ids=Flux2KleinPipeline._prepare_text_ids(embeds),
        img_ids=ids,
        return_dict=False,
    )[0]
    own = output[:, : patches.shape[-2] * patches.shape[-1]]
    grids = own.transpose(1, 2).reshape(len(latents), -1, *patches.shape[-2:])
    return Flux2KleinPipeline._unpatchify_latents(grids)


@pytest.mark.parametrize("case", ["plain", "references", "checkpointing"])
def test_velocity_and_input_gradients_are_diffusers(folder: Path, pipeline: Flux2KleinPipeline, case: str) -> None:
    inputs = tiny_flux2_inputs(tokens=21)
    latents = inputs["latents"][..., :6]  # 8 x 6: a swapped axis would show
    random = torch.Generator().manual_seed(4)
    sizes = [(4, 6), (10, 2)] if case == "references" else []
    references = tuple(torch.randn(2, 32, *size, generator=random) for size in sizes)
    family = family_of(folder)
    transformer = family.load_transformer(torch.float32)
    if case == "checkpointing":
        transformer.enable_gradient_checkpointing()

    def our_velocity(x: dict[str, Tensor]) -> Tensor:
        conditions = Conditions(references=references)
        return family.predict_velocity(transformer, x["latents"], x["sigmas"], text_of(x), conditions=conditions)

    def their_velocity(x: dict[str, Tensor]) -> Tensor:
        return by_hand(pipeline.transformer, x["latents"], x["sigmas"], x["prompt_embeds"], references)

    names, given = ("latents", "prompt_embeds"), {**inputs, "latents": latents}
    assert_same_gradients(*(gradients_of(each, given, names) for each in (our_velocity, their_velocity)))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("guidance", [True, False])
def test_any_shape_has_diffusers_output(heads: int, guidance: bool) -> None:
    random = torch.Generator().manual_seed(heads)
    given = {
        "hidden_states": torch.randn(3, 11, 128, generator=random),
        "encoder_hidden_states": torch.randn(3, 5, 192, generator=random),
        "timestep": torch.rand(3, generator=random),
        "guidance": torch.rand(3, generator=random) * 5 if guidance else None,
        "img_ids": torch.randint(0, 9, (11, 4), generator=random),
        "txt_ids": torch.randint(0, 9, (5, 4), generator=random),
    }
    plain = tiny_flux2_transformer(2, 1, guidance, heads)
    theirs = plain(**given).sample.detach()
    torch.testing.assert_close(optimise_forward(plain)(**given).sample, theirs, rtol=1e-5, atol=1e-5)


def test_less_is_saved_for_backward_than_by_diffusers() -> None:
    inputs, options = tiny_flux2_inputs(side=24), parse_network_args(NetworkConfig(network_dim=2), FLUX2_TARGETS)

    def saved(model: nn.Module) -> int:
        inject_adapter(model, options, FLUX2_TARGETS, seed=0)
        return saved_bytes(lambda: by_hand(model, inputs["latents"], inputs["sigmas"], inputs["prompt_embeds"]))

    theirs, ours = saved(tiny_flux2_transformer(2, 4)), saved(optimise_forward(tiny_flux2_transformer(2, 4)))
    assert ours < 0.6 * theirs  # measured: 0.54


def test_a_training_step_is_that_of_diffusers_and_peft(folder: Path) -> None:
    inputs = tiny_flux2_inputs(3)
    theirs = Flux2Transformer2DModel.from_pretrained(folder, subfolder="transformer")
    velocity = lambda *given: by_hand(*given, inputs["prompt_embeds"])  # noqa: E731
    left = assert_step_is_pefts(family_of(folder), FLUX2_TARGETS, inputs, text_of(inputs), FLOW, theirs, velocity)
    assert left == {"norm_out.linear", "proj_out"}


@pytest.mark.parametrize("steps", [4, 50])
@pytest.mark.parametrize("tokens", [256, 4096, 4600])
def test_noise_levels_are_those_of_the_pipeline(
    folder: Path, pipeline: Flux2KleinPipeline, steps: int, tokens: int
) -> None:
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu, retrieve_timesteps

    even = np.linspace(1.0, 1 / steps, steps)
    retrieve_timesteps(pipeline.scheduler, steps, sigmas=even, mu=compute_empirical_mu(tokens, steps))
    family = family_of(folder)
    assert family.sampling_sigmas(steps, tokens) == pytest.approx(pipeline.scheduler.sigmas.tolist())
    assert family.sampling_sigmas(steps, tokens, shift=3.0) == pytest.approx(
        [*(3 * s / (1 + 2 * s) for s in even), 0.0]
    )


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_sample_with_references_is_what_the_pipeline_draws(
    folder: Path, pipeline: Flux2KleinPipeline, count: int
) -> None:
    family = family_of(folder, model_type="flux2_klein_edit")
    random = np.random.default_rng(3)
    pictures = [
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for height, width in [(80, 64), (64, 112)][:count]
    ]
    encoder = family.load_image_encoder(torch.float32)
    latents = tuple(encoder.encode(to_pixels(picture).unsqueeze(0)) for picture in pictures)
    conditions = Conditions(references=latents) if count else NO_CONDITIONS
    text = family.load_text_encoder(torch.float32).encode(["a red disc"])[0]
    transformer = family.load_transformer(torch.float32)
    ours = family.sample(
        transformer, encoder, text, SampleSettings(64, 96, steps=3, guidance=1.0, seed=7), conditions=conditions
    )
    theirs = pipeline(
        image=pictures or None,
        prompt="a red disc",
        width=64,
        height=96,
        num_inference_steps=3,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(7),
    ).images[0]
    assert_same_picture(ours, theirs)
    assert not transformer._forward_pre_hooks, "nothing is left behind"


def test_other_models_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    files = save_flux2_files(folder, tmp_path / "files")
    z_image = tiny_z_pipeline(tmp_path / "z")
    dev, wide, sees = (tmp_path / f"{name}.safetensors" for name in ("dev", "wide", "sees"))
    save_file(tiny_flux2_transformer(guidance=True).state_dict(), dev)
    text = tiny_flux2_text_encoder(50).state_dict()
    text = {name: tensor for name, tensor in text.items() if name != "lm_head.weight"}
    save_file(text | {"model.embed_tokens.weight": torch.zeros(50, 40)}, wide)
    # Qwen3-VL of the same shapes: its vision tower, below visual. or model.visual., tells
    save_file(text | {"visual.deepstack_merger_list.0.norm.weight": torch.ones(4)}, sees)
    wanted = {
        "not Flux2Transformer2DModel; set model_type = .z_image": {"pretrained_model_name_or_path": str(z_image)},
        r'is FLUX\.2 \(flux2_dev\), not flux2_klein; set model_type = "flux2_dev"': {
            "pretrained_model_name_or_path": str(dev)
        },
        'not flux2_klein_edit; set model_type = "flux2_dev_edit"': {
            "pretrained_model_name_or_path": str(dev),
            "model_type": "flux2_klein_edit",
        },
        "text 40 wide, the transformer takes 64; give Qwen3-4B": {"text_encoder": str(wide)},
        r"not Qwen3 \(no model.layers.0": {"text_encoder": str(files.vae)},
        "sees.safetensors: Qwen3-VL, not Qwen3; give Qwen3 as text_encoder": {"text_encoder": str(sees)},
        "image autoencoder.*, not FLUX.2": {"pretrained_model_name_or_path": str(files.vae)},
    }
    assert_refused(files.model_config, wanted)
