"""FLUX.2 klein against diffusers' Flux2KleinPipeline: velocity, gradients, text, samples, files, a peft step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel
from peft import LoraConfig
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from library.conditions import NO_CONDITIONS, Conditions
from library.config.schema import FlowConfig, ModelConfig, NetworkConfig
from library.data.batches import Batch
from library.data.images import to_pixels
from library.errors import UserError
from library.models.family import model_family
from library.models.flux2.files import FLUX2_TARGETS
from library.models.flux2.model import optimise_forward
from library.models.flux2.spec import KleinFamily
from library.precision.files.fp8 import Fp8Scheme
from library.precision.recipe import Recipe, WeightLoader
from library.training.flow import noise_for, sample_sigmas
from library.training.tasks.image_step import FlowStep
from networks.network import inject_adapter
from networks.options import parse_network_args
from tests.models.sampled import assert_sample_is_the_pipelines
from tests.parity.peft_lora import assert_gradients_are_pefts, copy_to_peft, fill_up
from tests.tiny_flux2 import (
    patched,
    save_flux2_files,
    tiny_flux2_inputs,
    tiny_flux2_pipeline,
    tiny_flux2_text_encoder,
    tiny_flux2_transformer,
)
from tests.tiny_z_image import tiny_z_pipeline

CAPTIONS = ["a red disc", "make the picture of a small plain disc blue, yellow and purple " * 3]
FLOW = FlowConfig(timestep_sampling="flux2_shift")
PACK, LATENT_IDS = Flux2KleinPipeline._pack_latents, Flux2KleinPipeline._prepare_latent_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux2_pipeline(tmp_path_factory.mktemp("flux2") / "pipeline")


def family_of(folder: Path, **changes: object) -> KleinFamily:
    settings: dict[str, object] = {"model_type": "flux2_klein", "pretrained_model_name_or_path": str(folder)}
    family = model_family(ModelConfig(**(settings | changes)))  # type: ignore[arg-type]
    assert isinstance(family, KleinFamily)
    return family


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Flux2KleinPipeline:
    loaded = Flux2KleinPipeline.from_pretrained(folder)
    loaded.set_progress_bar_config(disable=True)
    return loaded


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
    weight = torch.randn(latents.shape, generator=random)

    def gradients(forward: Any) -> tuple[Tensor, list[Tensor]]:
        leaves = [latents.clone().requires_grad_(), inputs["prompt_embeds"].clone().requires_grad_()]
        velocity = forward(leaves[0], inputs["sigmas"], leaves[1])
        (velocity * weight).sum().backward()
        return velocity.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]

    family = family_of(folder)
    transformer = family.load_transformer(torch.float32)
    if case == "checkpointing":
        transformer.enable_gradient_checkpointing()
    conditions = Conditions(references=references)
    ours, our_gradients = gradients(
        lambda x, s, text: family.predict_velocity(transformer, x, s, {"prompt_embeds": text}, conditions=conditions)
    )
    theirs, their_gradients = gradients(lambda *given: by_hand(pipeline.transformer, *given, references))
    # fp32 and the same operations; sums may be split differently
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert len(our_gradients) == len(their_gradients) == 2
    for one, other in zip(our_gradients, their_gradients, strict=True):
        assert other.abs().max() > 1e-3  # every input matters
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


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
    def saved(model: nn.Module) -> int:
        storages: dict[int, tuple[Tensor, int]] = {}  # the tensors too, or another one might have the same address

        def pack(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = tensor, storage.nbytes()
            return tensor

        options = parse_network_args(NetworkConfig(network_dim=2), FLUX2_TARGETS)
        inject_adapter(model, options, FLUX2_TARGETS, seed=0)
        inputs = tiny_flux2_inputs(side=24)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            by_hand(model, inputs["latents"], inputs["sigmas"], inputs["prompt_embeds"])
        return sum(size for _, size in storages.values())

    theirs, ours = saved(tiny_flux2_transformer(2, 4)), saved(optimise_forward(tiny_flux2_transformer(2, 4)))
    assert ours < 0.6 * theirs  # measured: 0.54


def test_a_training_step_is_that_of_diffusers_and_peft(folder: Path) -> None:
    inputs, step, ids = tiny_flux2_inputs(3), 11, [5, 6, 7]
    text = {"prompt_embeds": inputs["prompt_embeds"]}
    batch = Batch(inputs["latents"], text, torch.ones(3), None, ids)
    family = family_of(folder)
    transformer = family.load_transformer(torch.float32)
    kinds = [f"{kind.name}_dim=2" for kind in FLUX2_TARGETS.layer_groups if not kind.default]
    options = parse_network_args(NetworkConfig(network_dim=4, network_alpha=3, network_args=kinds), FLUX2_TARGETS)
    network = inject_adapter(transformer, options, FLUX2_TARGETS, seed=0, dtype=torch.float32)
    fill_up(network)
    loss, _ = FlowStep(family, FLOW, seed=9).loss(transformer.train(), batch, step)
    loss.backward()

    theirs = Flux2Transformer2DModel.from_pretrained(folder, subfolder="transformer").requires_grad_(False)
    ranks = {name: layer.rank for name, layer in network.modules.items()}
    alphas = dict.fromkeys(ranks, 3.0)
    theirs.add_adapter(LoraConfig(r=4, target_modules=list(ranks), rank_pattern=ranks, alpha_pattern=alphas))
    named = dict(theirs.named_parameters())
    copy_to_peft(network, named)
    noise = noise_for(batch.latents, ids, 9, step)
    sigmas = sample_sigmas(FLOW, ids, 16, 9, step)
    noisy = torch.lerp(batch.latents, noise, sigmas.view(-1, 1, 1, 1))
    velocity = by_hand(theirs.train(), noisy, sigmas, inputs["prompt_embeds"])
    their_loss = torch.nn.functional.mse_loss(velocity, noise - batch.latents)
    their_loss.backward()

    linears = {name for name, module in tiny_flux2_transformer().named_modules() if isinstance(module, nn.Linear)}
    assert linears - set(network.modules) == {"norm_out.linear", "proj_out"}
    # fp32, the same operations with the down-projections of q, k, v stacked: rounding of sums, 1e-5 of the largest
    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=0)
    assert_gradients_are_pefts(network, named, 1e-5)


@pytest.mark.parametrize("captions", [CAPTIONS, [""], ["a {brace} and <|im_end|>"], ["plain " * 600]])
def test_text_embeddings_are_those_of_the_pipeline(
    folder: Path, pipeline: Flux2KleinPipeline, captions: list[str]
) -> None:
    encoder = family_of(folder).load_text_encoder(torch.float32)
    with torch.no_grad():
        theirs, _ = pipeline.encode_prompt([*captions])
    for ours, embeds in zip(encoder.encode(captions), theirs, strict=True):
        assert ours.keys() == {"prompt_embeds"}
        torch.testing.assert_close(ours["prompt_embeds"], embeds, rtol=1e-5, atol=1e-5)
    assert theirs.std(dim=1).amax() > 0.1, "captions and places differ"


def test_layers_behind_the_last_one_that_is_read_are_not_loaded(folder: Path) -> None:
    encoder: Any = family_of(folder).load_text_encoder(torch.bfloat16)
    assert encoder.encode(CAPTIONS[:1])[0]["prompt_embeds"].shape == (512, 192)
    assert len(encoder._model.layers) == 27
    encoder.release()
    assert encoder._model is None
    with pytest.raises(UserError, match="text_encoder_lr: Qwen3"):
        encoder.load_modules(["text_encoder"])


@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_samples_are_those_of_the_pipeline(folder: Path, pipeline: Flux2KleinPipeline, cfg: float) -> None:
    with torch.no_grad():
        negative, _ = pipeline.encode_prompt("blurry, large")
    own = {"negative_prompt_embeds": negative} if cfg > 1 else {}
    assert_sample_is_the_pipelines(family_of(folder), pipeline, cfg, guidance_scale=cfg, **own)


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
    ours = family.sample(transformer, encoder, text, 64, 96, 3, 1.0, seed=7, conditions=conditions)
    theirs = pipeline(
        image=pictures or None,
        prompt="a red disc",
        width=64,
        height=96,
        num_inference_steps=3,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(7),
    ).images[0]
    difference = np.abs(np.asarray(ours, dtype=int) - np.asarray(theirs, dtype=int))
    assert difference.max() <= 1  # a level: the rounding of a pixel that lies between two
    assert np.asarray(ours).std() > 5
    assert not transformer._forward_pre_hooks, "nothing is left behind"


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_split_files_hold_the_same_model(folder: Path, tmp_path: Path, prefix: str) -> None:
    files = save_flux2_files(folder, tmp_path, prefix)
    single, whole = model_family(files.model_config()), family_of(folder)
    ours, theirs = (family.load_transformer(torch.float32) for family in (single, whole))
    settings = [
        {k: v for k, v in json.loads(model.to_json_string()).items() if k[0] != "_"} for model in (ours, theirs)
    ]
    assert settings[0] == settings[1]
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())
    pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    encoders = [family.load_image_encoder(torch.float32) for family in (single, whole)]
    assert torch.equal(*(encoder.encode(pixels) for encoder in encoders))
    texts = [family.load_text_encoder(torch.float32).encode(CAPTIONS) for family in (single, whole)]
    assert all(torch.equal(a["prompt_embeds"], b["prompt_embeds"]) for a, b in zip(*texts, strict=True))
    schedules = [{k: v for k, v in f.scheduler().config.items() if k[0] != "_"} for f in (single, whole)]
    assert schedules[0] == schedules[1]


def test_a_lone_file_in_diffusers_names_is_read(folder: Path, tmp_path: Path) -> None:
    state = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    save_file(state, tmp_path / "klein.safetensors")
    parts = {"vae": str(folder), "text_encoder": str(folder), "qwen_tokenizer": str(folder / "tokenizer")}
    loaded = family_of(tmp_path / "klein.safetensors", **parts).load_transformer(torch.float32).state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)


@pytest.mark.parametrize("exclude", [("embedders", "final", "modulation"), ("embedders", "final"), ()])
def test_fp8_base_stays_near_and_keeps_its_inputs_high(folder: Path, exclude: tuple[str, ...]) -> None:
    family, inputs = family_of(folder), tiny_flux2_inputs()
    loading = WeightLoader(Recipe(Fp8Scheme("block64"), exclude=exclude), compute="dequant")
    velocities = []
    for fp8 in (None, loading):
        transformer = family.load_transformer(torch.float32, fp8=fp8)
        with torch.no_grad():
            velocities.append(
                family.predict_velocity(
                    transformer, inputs["latents"], inputs["sigmas"], {"prompt_embeds": inputs["prompt_embeds"]}
                )
            )
    # 12 of the double block, two of each single one; 3 modulations; picture, text, two of the timestep, two of the end
    kept = {3: 9, 2: 6, 0: 0}[len(exclude)]
    assert (loading.quantized, loading.excluded) == (25 - kept, kept)
    error = (velocities[1] - velocities[0]).norm() / velocities[0].norm()
    assert 0 < error < 0.1
    assert transformer.dtype == torch.float32, "in which the pipeline gives it latents"


def test_bf16_weights_with_and_without_autocast_are_near(folder: Path) -> None:
    family, inputs = family_of(folder), tiny_flux2_inputs()
    arguments = (inputs["latents"], inputs["sigmas"], {"prompt_embeds": inputs["prompt_embeds"]})
    with torch.no_grad():
        exact = family.predict_velocity(family.load_transformer(torch.float32), *arguments)
        transformer = family.load_transformer(torch.bfloat16)
        plain = family.predict_velocity(transformer, *arguments)
        with torch.autocast("cpu", torch.bfloat16):
            cast = family.predict_velocity(transformer, *arguments)
    for velocity in (plain, cast):
        assert velocity.dtype == torch.float32
        assert (velocity - exact).norm() / exact.norm() < 0.03  # three blocks of bf16, 8 bits


def test_timesteps_that_bf16_cannot_tell_apart_are_told_apart(folder: Path) -> None:
    family, inputs = family_of(folder), tiny_flux2_inputs(1)
    transformer = family.load_transformer(torch.bfloat16)
    sigmas = torch.tensor([0.7127, 0.7124])
    assert len(set(sigmas.bfloat16().tolist())) == 1
    with torch.no_grad():
        one, other = (
            family.predict_velocity(transformer, inputs["latents"], s[None], {"prompt_embeds": inputs["prompt_embeds"]})
            for s in sigmas
        )
    assert not torch.equal(one, other)


def test_other_models_and_missing_parts_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    files = save_flux2_files(folder, tmp_path / "files")
    z_image = tiny_z_pipeline(tmp_path / "z")
    lora, dev, wide, sees = (tmp_path / f"{name}.safetensors" for name in ("lora", "dev", "wide", "sees"))
    save_file({"diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight": torch.ones(1)}, lora)
    save_file(tiny_flux2_transformer(guidance=True).state_dict(), dev)
    text = tiny_flux2_text_encoder(50).state_dict()
    text = {name: tensor for name, tensor in text.items() if name != "lm_head.weight"}
    save_file(text | {"model.embed_tokens.weight": torch.zeros(50, 40)}, wide)
    # Qwen3-VL of the same shapes: its vision tower, below visual. or model.visual., tells
    save_file(text | {"visual.deepstack_merger_list.0.norm.weight": torch.ones(4)}, sees)
    wanted = {
        "does not exist; give a local file or folder": {"pretrained_model_name_or_path": "nowhere"},
        "not Flux2Transformer2DModel; set model_type = .z_image": {"pretrained_model_name_or_path": str(z_image)},
        "needs vae beside it; set vae to flux2-vae.safetensors": {"vae": None},
        "needs text_encoder beside it; set text_encoder to qwen_3_4b": {"text_encoder": None},
        "a guidance input, which is FLUX.2 dev; set model_type = .flux2_dev.$": {
            "pretrained_model_name_or_path": str(dev)
        },
        "a guidance input, which is FLUX.2 dev; set model_type = .flux2_dev_edit": {
            "pretrained_model_name_or_path": str(dev),
            "model_type": "flux2_klein_edit",
        },
        "three layers of 40 numbers, the transformer takes 192; give qwen_3_4b": {"text_encoder": str(wide)},
        r"not Qwen3 \(no model.layers.0": {"text_encoder": str(files.vae)},
        "sees.safetensors: Qwen3-VL, not Qwen3; give Qwen3 as text_encoder": {"text_encoder": str(sees)},
        "a LoRA, not a base model": {"pretrained_model_name_or_path": str(lora)},
        "image autoencoder.*, not FLUX.2": {"pretrained_model_name_or_path": str(files.vae)},
    }
    for message, changes in wanted.items():
        with pytest.raises(UserError, match=message) as caught:
            model_family(files.model_config(**changes))
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match='a FLUX.2 transformer .*, not FLUX.1; set model_type = "flux2_klein"'):
        model_family(ModelConfig(pretrained_model_name_or_path=str(files.transformer)))


def test_swapping_twice_changes_nothing() -> None:
    transformer = optimise_forward(optimise_forward(tiny_flux2_transformer()))
    assert transformer.state_dict().keys() == tiny_flux2_transformer().state_dict().keys()
