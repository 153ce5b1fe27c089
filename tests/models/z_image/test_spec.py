"""The Z-Image family against diffusers' ZImagePipeline: velocity, gradients, text, samples, files, a peft step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ZImagePipeline, ZImageTransformer2DModel
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from library.config.schema import FlowConfig, ModelConfig, NetworkConfig
from library.data.batches import Batch, Item, collate
from library.errors import UserError
from library.models.family import model_family
from library.models.z_image.files import Z_IMAGE_TARGETS
from library.models.z_image.model import optimise_forward
from library.models.z_image.spec import ZImageFamily
from library.precision.files.fp8 import Fp8Scheme
from library.precision.recipe import Recipe, WeightLoader
from library.training.flow import noise_for, sample_sigmas
from library.training.tasks.image_step import FlowStep
from networks.network import inject_adapter
from networks.options import parse_network_args
from tests.models.sampled import assert_sample_is_the_pipelines
from tests.parity.peft_lora import assert_gradients_are_pefts, copy_to_peft, fill_up
from tests.tiny_qwen import tiny_qwen_pipeline
from tests.tiny_z_image import save_z_split_files, tiny_z_inputs, tiny_z_pipeline, tiny_z_transformer

CAPTIONS = ["a red disc", "make the picture of a small plain disc blue, yellow and purple " * 3]
FLOW = FlowConfig(timestep_sampling="shift", discrete_flow_shift=2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_z_pipeline(tmp_path_factory.mktemp("z") / "pipeline")


def family_of(folder: Path, **changes: object) -> ZImageFamily:
    settings: dict[str, object] = {"model_type": "z_image", "pretrained_model_name_or_path": str(folder)}
    family = model_family(ModelConfig(**(settings | changes)))  # type: ignore[arg-type]
    assert isinstance(family, ZImageFamily)
    return family


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> ZImagePipeline:
    loaded = ZImagePipeline.from_pretrained(folder)
    loaded.set_progress_bar_config(disable=True)
    return loaded


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
    weight = torch.randn(latents.shape, generator=torch.Generator().manual_seed(2))

    def gradients(forward: Any) -> tuple[Tensor, list[Tensor]]:
        leaves = [latents.clone().requires_grad_(), text["prompt_embeds"].clone().requires_grad_()]
        velocity = forward(leaves[0], inputs["sigmas"], text | {"prompt_embeds": leaves[1]})
        (velocity * weight).sum().backward()
        return velocity.detach(), [leaf.grad for leaf in leaves if leaf.grad is not None]

    family = family_of(folder)
    transformer = family.load_transformer(torch.float32)
    if case == "checkpointing":
        transformer.enable_gradient_checkpointing()
    ours, our_gradients = gradients(lambda *given: family.predict_velocity(transformer, *given))
    theirs, their_gradients = gradients(lambda *given: by_hand(pipeline.transformer, *given))
    # fp32 and the same operations; sums over tokens may be split differently
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert len(our_gradients) == len(their_gradients) == 2
    for one, other in zip(our_gradients, their_gradients, strict=True):
        assert other.abs().max() > 1e-3  # every input matters
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_captions_of_different_lengths_have_the_losses_and_gradients_they_have_alone(folder: Path) -> None:
    family, inputs = family_of(folder), tiny_z_inputs(3, tokens=40)
    transformer = family.load_transformer(torch.float32)
    step = FlowStep(family, FLOW, seed=4)
    items = []
    for i, length in enumerate((40, 3, 33)):
        mask = torch.ones(length, dtype=torch.bool)
        text = {"prompt_embeds": inputs["prompt_embeds"][i, :length], "prompt_embeds_mask": mask}
        items.append(Item(inputs["latents"][i], text, 1.0, None, 20 + i))
    together = step.validation_losses(transformer, collate(items), [0.2, 0.9]).view(2, 3)
    alone = torch.stack([step.validation_losses(transformer, collate([item]), [0.2, 0.9]) for item in items], dim=1)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=0)  # fp32: sums over keys in another order
    assert (alone.amax() - alone.amin()) > 1e-2, "the samples differ"

    weight = transformer.cap_embedder[1].weight.requires_grad_()
    step.loss(transformer, collate(items), 5)[0].backward()
    assert weight.grad is not None
    gradient, weight.grad = weight.grad, None
    for item in items:
        (step.loss(transformer, collate([item]), 5)[0] / 3).backward()
    torch.testing.assert_close(gradient, weight.grad, rtol=1e-4, atol=1e-5 * gradient.abs().max().item())


def test_a_training_step_is_that_of_diffusers_and_peft(folder: Path) -> None:
    inputs, step = tiny_z_inputs(3, tokens=40), 11
    text, ids = text_of(inputs, 40, 5, 33), [5, 6, 7]
    batch = Batch(inputs["latents"], text, torch.ones(3), None, ids)
    family = family_of(folder)
    transformer = family.load_transformer(torch.float32)
    kinds = [f"{kind.name}_dim=2" for kind in Z_IMAGE_TARGETS.layer_groups if not kind.default]
    options = parse_network_args(NetworkConfig(network_dim=4, network_alpha=3, network_args=kinds), Z_IMAGE_TARGETS)
    network = inject_adapter(transformer, options, Z_IMAGE_TARGETS, seed=0, dtype=torch.float32)
    fill_up(network)
    loss, _ = FlowStep(family, FLOW, seed=9).loss(transformer.train(), batch, step)
    loss.backward()

    theirs = ZImageTransformer2DModel.from_pretrained(folder, subfolder="transformer").requires_grad_(False)
    ranks = {name: layer.rank for name, layer in network.modules.items()}
    alphas = dict.fromkeys(ranks, 3.0)
    theirs.add_adapter(LoraConfig(r=4, target_modules=list(ranks), rank_pattern=ranks, alpha_pattern=alphas))
    named = dict(theirs.named_parameters())
    copy_to_peft(network, named)
    noise = noise_for(batch.latents, ids, 9, step)
    sigmas = sample_sigmas(FLOW, ids, 16, 9, step)
    noisy = torch.lerp(batch.latents, noise, sigmas.view(-1, 1, 1, 1))
    velocity = by_hand(theirs.train(), noisy, sigmas, text)
    their_loss = torch.nn.functional.mse_loss(velocity, noise - batch.latents)
    their_loss.backward()

    linears = {name for name, module in tiny_z_transformer().named_modules() if isinstance(module, nn.Linear)}
    assert linears - set(network.modules) == {n for n in linears if n.startswith("all_final_layer")}
    # fp32, the same operations with the down-projections of q, k, v stacked: rounding of sums, 1e-5 of the largest
    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=0)
    assert_gradients_are_pefts(network, named, 1e-5)


@pytest.mark.parametrize("captions", [CAPTIONS, [""], ["a {brace} and <|im_end|>"], ["plain " * 600]])
def test_text_embeddings_are_those_of_the_pipeline(folder: Path, pipeline: ZImagePipeline, captions: list[str]) -> None:
    encoder = family_of(folder).load_text_encoder(torch.float32)
    with torch.no_grad():
        theirs, _ = pipeline.encode_prompt([*captions], do_classifier_free_guidance=False)
    for ours, embeds in zip(encoder.encode(captions), theirs, strict=True):
        assert ours["prompt_embeds_mask"].tolist() == [True] * len(embeds)
        torch.testing.assert_close(ours["prompt_embeds"], embeds, rtol=1e-5, atol=1e-5)


def test_the_last_layer_of_the_text_encoder_is_not_loaded_and_an_fp8_one_is_near(folder: Path) -> None:
    family = family_of(folder)
    plain = family.load_text_encoder(torch.bfloat16)
    small = family.load_text_encoder(torch.bfloat16, recipe=Recipe(Fp8Scheme("block64"), exclude=()))
    assert plain.fingerprint != small.fingerprint
    (expected,), (found,) = plain.encode(CAPTIONS[:1]), small.encode(CAPTIONS[:1])
    error = (found["prompt_embeds"] - expected["prompt_embeds"]).float().norm() / expected["prompt_embeds"].norm()
    assert 0 < error < 0.15  # e4m3 rounds a weight by 2.6 % (rms); 14 matrices one after the other
    assert plain._model is not None
    assert len(plain._model.layers) == 2
    plain.release()
    assert plain._model is None
    with pytest.raises(UserError, match="text_encoder_lr: Qwen3"):
        plain.load_modules(["text_encoder"])


@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_samples_are_those_of_the_pipeline(folder: Path, pipeline: ZImagePipeline, cfg: float) -> None:
    # the pipeline counts from 0
    assert_sample_is_the_pipelines(family_of(folder), pipeline, cfg, guidance_scale=cfg - 1)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_split_files_hold_the_same_model(folder: Path, tmp_path: Path, prefix: str) -> None:
    files = save_z_split_files(folder, tmp_path, prefix)
    single, whole = model_family(files.model_config()), family_of(folder)
    assert isinstance(single, ZImageFamily)
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
    save_file(state, tmp_path / "z.safetensors")
    parts = {"vae": str(folder), "text_encoder": str(folder), "qwen_tokenizer": str(folder / "tokenizer")}
    loaded = family_of(tmp_path / "z.safetensors", **parts).load_transformer(torch.float32).state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)


@pytest.mark.parametrize("keep", [("embedders", "final"), ()])
def test_fp8_base_stays_near_and_keeps_its_inputs_high(folder: Path, keep: tuple[str, ...]) -> None:
    family, inputs = family_of(folder), tiny_z_inputs()
    loading = WeightLoader(Recipe(Fp8Scheme("block64"), exclude=keep), compute="dequant")
    velocities = []
    for fp8 in (None, loading):
        transformer = family.load_transformer(torch.float32, fp8=fp8)
        with torch.no_grad():
            velocities.append(
                family.predict_velocity(transformer, inputs["latents"], inputs["sigmas"], text_of(inputs))
            )
    # 7 in each of four blocks, modulation in three; outside them picture, text, two of the timestep, two of the end
    assert (loading.quantized, loading.excluded) == ((31, 6) if keep else (37, 0))
    error = (velocities[1] - velocities[0]).norm() / velocities[0].norm()
    assert 0 < error < 0.1


def test_bf16_weights_with_and_without_autocast_are_near(folder: Path) -> None:
    family, inputs = family_of(folder), tiny_z_inputs()
    arguments = (inputs["latents"], inputs["sigmas"], text_of(inputs))
    with torch.no_grad():
        exact = family.predict_velocity(family.load_transformer(torch.float32), *arguments)
        transformer = family.load_transformer(torch.bfloat16)
        plain = family.predict_velocity(transformer, *arguments)
        with torch.autocast("cpu", torch.bfloat16):
            cast = family.predict_velocity(transformer, *arguments)
    for velocity in (plain, cast):
        assert velocity.dtype == torch.float32
        assert (velocity - exact).norm() / exact.norm() < 0.03  # four blocks of bf16, 8 bits


def test_timesteps_that_bf16_cannot_tell_apart_are_told_apart(folder: Path) -> None:
    family, inputs = family_of(folder), tiny_z_inputs(1)
    transformer = family.load_transformer(torch.bfloat16)
    sigmas = torch.tensor([0.7127, 0.7124])
    assert len(set((1 - sigmas).bfloat16().tolist())) == 1
    with torch.no_grad():
        embedded = transformer.t_embedder((1 - sigmas) * 1000)
        one, other = (
            family.predict_velocity(transformer, inputs["latents"], sigma[None], text_of(inputs)) for sigma in sigmas
        )
    assert not torch.equal(embedded[0], embedded[1])
    assert not torch.equal(one, other)


def test_other_models_and_missing_parts_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    files = save_z_split_files(folder, tmp_path / "files")
    qwen = tiny_qwen_pipeline(tmp_path / "qwen")
    lora = tmp_path / "lora.safetensors"
    save_file({"diffusion_model.layers.0.attention.to_q.lora_A.weight": torch.ones(1)}, lora)
    omni = tmp_path / "omni.safetensors"
    save_file({**load_file(files.transformer), "siglip_pad_token": torch.ones(1, 64)}, omni)
    wanted = {
        "does not exist; give a local file or folder": {"pretrained_model_name_or_path": "nowhere"},
        "not ZImageTransformer2DModel; set model_type = .qwen_image": {"pretrained_model_name_or_path": str(qwen)},
        "needs vae beside it; set vae to ae.safetensors": {"vae": None},
        "needs text_encoder beside it; set text_encoder to qwen_3_4b": {"text_encoder": None},
        "vae 'nowhere' does not exist": {"vae": "nowhere"},
        r"not Qwen3 \(no model.layers.0": {"text_encoder": str(files.vae)},
        "'qwen2_5_vl', not qwen3": {"text_encoder": str(qwen)},
        "a LoRA, not a base model": {"pretrained_model_name_or_path": str(lora)},
        "Z-Image-Omni, not a model family": {"pretrained_model_name_or_path": str(omni)},
        "an image autoencoder.*, not Z-Image": {"pretrained_model_name_or_path": str(files.vae)},
    }
    for message, changes in wanted.items():
        with pytest.raises(UserError, match=message) as caught:
            model_family(files.model_config(**changes))
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match='a Z-Image transformer, not FLUX.1; set model_type = "z_image"'):
        model_family(ModelConfig(pretrained_model_name_or_path=str(files.transformer)))


def test_swapping_twice_changes_nothing() -> None:
    transformer = optimise_forward(optimise_forward(tiny_z_transformer()))
    assert transformer.state_dict().keys() == tiny_z_transformer().state_dict().keys()
