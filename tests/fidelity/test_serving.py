"""What variants load and run, on tiny random models: against the cache, diffusers and transformers."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file, save_file

from library.config.schema import ModelConfig
from library.console import Console
from library.errors import UserError
from library.fidelity import deployed_parts
from library.fidelity.calibration import CalibrationOptions
from library.fidelity.conditioning import give
from library.fidelity.deployed import parse_deployment
from library.fidelity.deployed_parts import complete
from library.fidelity.findings import CAUSES, REMEDIES
from library.fidelity.runs import EvalSet, conditions_of, prepare_eval_set, run_variant
from library.fidelity.serving import REFERENCE, Models, Served, Variant
from networks.files.weights import LoraWeights
from tests.networks.conftest import random_pair
from tests.runs import write_dataset
from tests.tiny import tiny_flux_pipeline

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux_pipeline(tmp_path_factory.mktemp("serving") / "base", model_type="flux_fill")


@pytest.fixture(scope="module")
def models(base: Path) -> Models:
    return of(base)


@pytest.fixture(scope="module")
def eval_set(models: Models, tmp_path_factory: pytest.TempPathFactory) -> EvalSet:
    folder = tmp_path_factory.mktemp("data")
    dataset = write_dataset(folder, images=2, inpaint_masks='["rectangles"]', flip_aug=True)
    options = CalibrationOptions(str(dataset), images=2, sigmas=(0.5,), guidance_scale=3.5)
    return prepare_eval_set(models, models.plan(options).prepare(QUIET), REFERENCE, 2)


def of(base: Path, deploy: str = "cast", merged: bool = False, loras: Any = None) -> Models:
    config = ModelConfig(model_type="flux_fill", pretrained_model_name_or_path=str(base))
    return Models(config, parse_deployment(deploy, merged), loras or {}, torch.float32, torch.device("cpu"))


def velocity(models: Models, variant: Variant, eval_set: EvalSet) -> torch.Tensor:
    return run_variant(models, variant, replace(eval_set, steps=0), QUIET, "x").velocities[0.5][0]


def test_every_field_of_a_variant_is_a_cause_with_a_remedy() -> None:
    for field in fields(Variant):
        assert field.name in CAUSES
        assert field.name in REMEDIES


def test_conditions_without_a_change_are_the_caches(models: Models, eval_set: EvalSet) -> None:
    encoder = models.image_encoder(REFERENCE)
    for batch, pixels in zip(eval_set.batches, eval_set.pixels, strict=True):
        made = conditions_of(give(pixels, "fill", REFERENCE), "fill", REFERENCE, encoder, models)
        assert torch.equal(made.masked_latents, batch.conditions.masked_latents)  # type: ignore[arg-type]
        assert torch.equal(made.mask, batch.conditions.mask)  # type: ignore[arg-type]
        assert torch.equal(encoder.encode(pixels.image[None]), batch.latents)


def test_an_ignored_guidance_is_left_out_of_the_modulation(models: Models, eval_set: EvalSet) -> None:
    """As if the guidance's embedder gave zeros."""
    found = velocity(models, Variant(guidance="ignored"), eval_set)
    with models.transformer(REFERENCE) as network:
        for layer in (network.time_text_embed.guidance_embedder.linear_2,):  # type: ignore[union-attr]
            layer.weight.zero_()  # type: ignore[union-attr,operator]
            layer.bias.zero_()  # type: ignore[union-attr,operator]
        outcome = run_variant(models, REFERENCE, replace(eval_set, steps=0), QUIET, "x", network)
    assert torch.allclose(found, outcome.velocities[0.5][0], atol=1e-6)
    other = velocity(models, Variant(guidance=30.0), eval_set)
    assert torch.equal(other, velocity(models, REFERENCE, replace(eval_set, guidance=30.0)))
    assert not torch.allclose(other, found, atol=1e-4)


def test_a_static_shift_is_diffusers_own(models: Models) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=2.5)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / 5, 5).tolist())
    assert models.sigmas(Variant(shift=2.5), 5, 64) == pytest.approx(scheduler.sigmas.tolist())
    assert models.sigmas(REFERENCE, 5, 64) == models.family.sampling_sigmas(5, 64)


def test_attention_in_fp8_rounds_what_attention_sees(models: Models, eval_set: EvalSet) -> None:
    plain, rounded = velocity(models, REFERENCE, eval_set), velocity(models, Variant(attention="fp8"), eval_set)
    error = float((plain - rounded).norm() / plain.norm())
    assert 1e-4 < error < 0.1
    assert torch.equal(plain, velocity(models, REFERENCE, eval_set))  # nothing stays behind


def test_a_vae_in_half_precision_rounds_its_activations_too(models: Models, eval_set: EvalSet) -> None:
    encoder, half = models.image_encoder(REFERENCE), models.image_encoder(Variant(vae=Served(dtype="bf16")))
    latents = eval_set.batches[0].latents
    assert models.image_encoder(REFERENCE) is encoder  # loaded once
    rounded_weights = copy.deepcopy(encoder)
    rounded_weights.vae.bfloat16().float()
    plain, found = encoder.decode(latents), half.decode(latents)
    assert half.vae.dtype == torch.bfloat16
    assert float((found - plain).norm()) > 1.2 * float((rounded_weights.decode(latents) - plain).norm()) > 0


def test_pasted_pixels_are_the_pictures_own_and_pasted_latents_its_latents(models: Models, eval_set: EvalSet) -> None:
    pixels = run_variant(models, Variant(paste="pixels"), eval_set, QUIET, "x")
    latents = run_variant(models, Variant(paste="latents"), eval_set, QUIET, "x")
    for number, sample in enumerate(eval_set.pixels):
        known = (sample.mask == 0)[0]  # type: ignore[index]
        assert torch.equal(pixels.images[number][:, known], sample.image[:, known])
        cells = torch.nn.functional.avg_pool2d(sample.mask, 8)[0] == 0  # type: ignore[arg-type]
        wanted = eval_set.batches[number].latents[0][:, cells]
        assert torch.allclose(latents.latents[number][:, cells], wanted, atol=1e-5)


def lora(models: Models) -> dict[str, dict[str, LoraWeights]]:
    random = torch.Generator().manual_seed(3)
    clip = models.family.load_text_encoder(torch.float32).load_modules(["text_encoder"]).text_encoder
    layer = next(n for n, m in clip.named_modules() if n.endswith("layers.0.self_attn.q_proj"))  # type: ignore[union-attr,operator]
    shape = clip.get_submodule(layer).weight.shape  # type: ignore[union-attr,operator]
    network = models.base(deployed=False)
    name = "single_transformer_blocks.0.attn.to_q"
    of_image = network.get_submodule(name).weight.shape
    pairs = [random_pair(each, 2, 2.0, random, up=each[1] ** -0.5) for each in (of_image, shape)]
    return {"transformer": {name: pairs[0]}, "text_encoder": {f"text_encoder.{layer}": pairs[1]}}


def test_the_loras_text_part_is_on_both_sides_and_can_be_dropped(base: Path, models: Models, eval_set: EvalSet) -> None:
    with_lora = of(base, loras=lora(models))
    (encoded, _) = with_lora.texts(REFERENCE, eval_set.jobs) or []
    cached = eval_set.batches[0].text
    assert not torch.allclose(encoded["pooled_prompt_embeds"], cached["pooled_prompt_embeds"][0], atol=1e-4)
    assert torch.equal(encoded["prompt_embeds"], cached["prompt_embeds"][0])
    dropped = Variant(lora_without=("^text_encoder",))
    assert with_lora.texts(dropped, eval_set.jobs) is None  # the cache has it
    nothing = with_lora.texts(Variant(strength=0.0), eval_set.jobs)
    assert torch.allclose(nothing[0]["pooled_prompt_embeds"], cached["pooled_prompt_embeds"][0], atol=1e-6)  # type: ignore[index]
    assert with_lora.texts(REFERENCE, eval_set.jobs) is with_lora.texts(REFERENCE, eval_set.jobs)
    with pytest.raises(UserError, match=r"--deploy_lora_without dubble: found in no layer"):
        with_lora.served_lora(Variant(lora_without=("dubble",)))
    assert "transformer" not in with_lora.served_lora(Variant(lora_without=("single_transformer",)))
    missing = complete(of(base, str(base), merged=True, loras=with_lora.loras), Variant(weights=True))
    assert missing.lora_without == ("^text_encoder",)


def test_a_plain_cast_t5_is_the_published_files(base: Path, models: Models, eval_set: EvalSet, tmp_path: Path) -> None:
    """As t5xxl_fp8_e4m3fn.safetensors: matrices cast, without scales."""
    state = load_file(base / "text_encoder_2" / "model.safetensors")
    tables = ("relative", "shared", "embed")  # and vectors: stay as they are
    kept = {name for name, tensor in state.items() if tensor.ndim == 1 or any(word in name for word in tables)}
    cast = {name: tensor if name in kept else tensor.to(torch.float8_e4m3fn) for name, tensor in state.items()}
    save_file(cast, tmp_path / "t5.safetensors")
    file = Served((("t5xxl", str(tmp_path / "t5.safetensors")),))
    by_file, by_dtype = (models.texts(Variant(text=each), eval_set.jobs) for each in (file, Served(dtype="fp8")))
    assert torch.equal(by_file[0]["prompt_embeds"], by_dtype[0]["prompt_embeds"])  # type: ignore[index]
    assert not torch.equal(by_file[0]["prompt_embeds"], eval_set.batches[0].text["prompt_embeds"][0])  # type: ignore[index]


def test_a_deployed_folder_brings_what_differs_and_nothing_else(base: Path, tmp_path: Path) -> None:
    same = of(base, str(base))
    assert complete(same, Variant(weights=True)) == Variant(weights=True)
    other = tmp_path / "other"
    shutil.copytree(base, other)
    for folder, name, changes in (
        ("scheduler", "scheduler_config.json", {"use_dynamic_shifting": False, "shift": 1.5}),
        ("vae", "config.json", {"shift_factor": 0.2}),
        ("transformer", "config.json", {"guidance_embeds": False}),
    ):
        path = other / folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    path = other / "text_encoder_2" / "model.safetensors"
    save_file({name: tensor.half().float() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    served = of(base, str(other))
    named = served.config.model_copy(update={"ae": str(base / "vae")})  # the reference's own is not the folder's
    assert Models(named, served.deployed, {}, torch.float32, served.device).folder.files.vae == other / "vae"  # type: ignore[union-attr]
    variant = complete(served, Variant(weights=True))
    assert set(variant.changes()) == {"weights", "vae", "shift", "text", "guidance"}
    assert deployed_parts.fields(served, variant, "vae") == ["VAE shift_factor 0.2 instead of 0.1159"]
    assert "scheduler shift 1.5 instead of 3.0" in deployed_parts.fields(served, variant, "shift")
    assert variant.text == Served((("t5xxl", str(other / "text_encoder_2")),))
    assert "guidance_embeds False instead of True" in deployed_parts.words(served, variant, "guidance")
    with served.transformer(variant) as network:
        assert not served.runner(variant, network).guidance_input
    with served.transformer(Variant(weights=True)) as network:
        assert served.runner(Variant(weights=True), network).guidance_input
    assert served.sigmas(variant, 4, 64) == served.deployed_family.sampling_sigmas(4, 64)
    assert served.image_encoder(variant).shift == 0.2  # type: ignore[attr-defined]
    assert served.image_encoder(REFERENCE).shift == 0.1159  # type: ignore[attr-defined]


def test_high_precision_weights_are_a_deployment(base: Path, eval_set: EvalSet, tmp_path: Path) -> None:
    """Dequantised weights give what the fp8 file gives."""
    folder = tmp_path / "dequantised"
    shutil.copytree(base, folder)
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    by_recipe = of(base, "cast+all")
    state = load_file(path)
    for name, layer in by_recipe.base(deployed=True).named_modules():
        if hasattr(layer, "dequantized"):
            state[f"{name}.weight"] = layer.dequantized(torch.float32)
    save_file(state, path, {"format": "pt"})
    both = (velocity(of(base, deploy), Variant(weights=True), eval_set) for deploy in ("cast+all", str(folder)))
    assert torch.allclose(*both, atol=1e-6)


@pytest.mark.parametrize(
    ("variant", "steps", "message"),
    [
        (Variant(paste="pixels"), 0, "--paste: nothing is sampled"),
        (Variant(shift=2.0), 0, "--deploy_shift: nothing is sampled"),
        (Variant(text=Served((("t5xxl", "/nowhere.safetensors"),))), 2, "'/nowhere.safetensors' does not exist"),
        (Variant(activations="static"), 2, "has no input scales"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    variant: Variant, steps: int, message: str, models: Models
) -> None:
    with pytest.raises(UserError, match=message):
        models.check(variant, steps, has_masks=False)


def test_masks_and_guidance_are_refused_where_there_are_none(tmp_path: Path) -> None:
    base = tiny_flux_pipeline(tmp_path / "schnell", guidance=False)
    config = ModelConfig(model_type="flux", pretrained_model_name_or_path=str(base))
    models = Models(config, parse_deployment("cast"), {}, torch.float32, torch.device("cpu"))
    for variant, message in (
        (Variant(guidance=2.0), "--deploy_guidance: flux takes no guidance"),
        (Variant(mask_grow=4), "--mask_grow: flux is given no picture and no mask"),
        (Variant(paste="pixels"), "--paste: the dataset has no masks"),
    ):
        with pytest.raises(UserError, match=message):
            models.check(variant, 4, has_masks=False)
