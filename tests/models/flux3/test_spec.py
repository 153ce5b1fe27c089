"""The FLUX.3 family against diffusers' modular pipeline: velocity, gradients, text, samples, files, a peft step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import Flux3ModularPipeline, Flux3Transformer2DModel
from diffusers.loaders.single_file_utils import convert_flux3_transformer_checkpoint_to_diffusers
from diffusers.modular_pipelines.flux3.encoders import Flux3VaeEncoderStep
from diffusers.quantizers.bfl.utils import dequantize_fp8r, quantize_fp8r
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from library.conditions import NO_CONDITIONS, Conditions
from library.config.kinds import model_type_of
from library.config.published_models import MODEL
from library.config.schema import FlowConfig, ModelConfig, NetworkConfig
from library.errors import UserError
from library.models.family import SampleSettings
from library.models.family_by_name import model_family
from library.models.flux3.model import optimise_forward, step_from
from library.models.flux3.spec import Flux3KleinFamily
from library.nn.checkpointing import ActivationCheckpointing, neighbours
from library.precision.recipe import WeightLoader
from networks.network import inject_adapter
from networks.options import parse_network_args
from tests.models.claims import (
    assert_refused,
    assert_same_gradients,
    assert_same_picture,
    assert_sample_is_the_pipelines,
    assert_step_is_pefts,
    family_maker,
    gradients_of,
    saved_bytes,
)
from tests.targets import FLUX3_EDIT_TARGETS, FLUX3_TARGETS
from tests.tiny_flux3 import (
    CalledAsOthers,
    call_by_hand,
    flux3_reference,
    save_flux3_split_files,
    tiny_flux3_inputs,
    tiny_flux3_pipeline,
    tiny_flux3_transformer,
)
from tests.tiny_z_image import tiny_z_pipeline

FLOW = FlowConfig(timestep_sampling="shift", discrete_flow_shift=2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux3_pipeline(tmp_path_factory.mktemp("flux3") / "model")


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_flux3_pipeline(tmp_path_factory.mktemp("flux3") / "distilled", flow_map=True)


family_of = family_maker("flux3_klein", Flux3KleinFamily)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Flux3ModularPipeline:
    return flux3_reference(folder)


def text_of(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"prompt_embeds": inputs["prompt_embeds"]}


def conditions_of(inputs: dict[str, Tensor]) -> Conditions:
    return Conditions(references=(inputs["first"], inputs["second"]))


CASES = ["plain", "one block of each kind", "checkpointing", "pairs in one checkpoint"]


@pytest.mark.parametrize("edits", [False, True], ids=["text", "references"])
@pytest.mark.parametrize("case", CASES)
def test_velocity_and_input_gradients_are_diffusers(tmp_path: Path, case: str, edits: bool) -> None:
    folder = tiny_flux3_pipeline(tmp_path / "model", blocks={"plain": 2, "one block of each kind": 1}.get(case, 4))
    theirs = Flux3Transformer2DModel.from_pretrained(folder, subfolder="transformer")
    family = family_of(folder, model_type="flux3_klein_edit" if edits else "flux3_klein")
    transformer = family.load_transformer(torch.float32)
    inputs = tiny_flux3_inputs(3)
    if case == "checkpointing":
        transformer.enable_gradient_checkpointing()
    elif case == "pairs in one checkpoint":
        blocks = family.blocks(transformer)
        pairs = neighbours(blocks, alone=0)
        assert len(pairs) == (8 if edits else 6), "two of each stack, none across"
        checkpointing = ActivationCheckpointing(len(blocks), pairs=pairs, chained_args=family.chained_args)
        transformer.enable_gradient_checkpointing(checkpointing)

    def our_velocity(given: dict[str, Tensor]) -> Tensor:
        arguments = (transformer, given["latents"], given["sigmas"], text_of(given))
        return family.predict_velocity(*arguments, conditions=conditions_of(given) if edits else NO_CONDITIONS)

    def their_velocity(given: dict[str, Tensor]) -> Tensor:
        references = (given["first"], given["second"]) if edits else ()
        return call_by_hand(theirs, given["latents"], given["sigmas"], given["prompt_embeds"], references)

    names = ("latents", "prompt_embeds", *(("first", "second") if edits else ()))
    assert_same_gradients(*(gradients_of(each, inputs, names) for each in (our_velocity, their_velocity)))


def test_it_saves_less_for_backward_than_diffusers() -> None:
    x, options = tiny_flux3_inputs(1, height=32, width=32, tokens=80), NetworkConfig(network_dim=4)

    def saved(model: nn.Module) -> int:
        model.requires_grad_(False)
        inject_adapter(model, parse_network_args(options, FLUX3_TARGETS), FLUX3_TARGETS, seed=0)
        return saved_bytes(lambda: call_by_hand(model, x["latents"], x["sigmas"], x["prompt_embeds"]))

    assert saved(optimise_forward(tiny_flux3_transformer())) < 0.6 * saved(tiny_flux3_transformer())


@pytest.mark.parametrize("edits", [False, True], ids=["text", "references"])
def test_a_training_step_is_that_of_diffusers_and_peft(folder: Path, edits: bool) -> None:
    inputs, targets = tiny_flux3_inputs(3, tokens=40), FLUX3_EDIT_TARGETS if edits else FLUX3_TARGETS
    conditions = conditions_of(inputs) if edits else NO_CONDITIONS
    family = family_of(folder, model_type=targets.family)
    theirs = Flux3Transformer2DModel.from_pretrained(folder, subfolder="transformer")
    velocity = lambda *given: call_by_hand(*given, inputs["prompt_embeds"], conditions.references)  # noqa: E731
    left = assert_step_is_pefts(family, targets, inputs, text_of(inputs), FLOW, theirs, velocity, conditions)
    assert {name for name in left if "image_cond" not in name} == {"norm_out.linear", "proj_out"}
    assert any("image_cond" in name for name in left) is not edits


def test_samples_of_the_distilled_model_are_those_of_its_pipeline(distilled: Path) -> None:
    family = family_of(distilled)
    assert_sample_is_the_pipelines(family, CalledAsOthers(flux3_reference(distilled)), 1.0)
    text = {"prompt_embeds": tiny_flux3_inputs(1)["prompt_embeds"]}
    with pytest.raises(UserError, match="knows no negative prompt; remove --n"):
        family.sample(
            family.load_transformer(torch.float32),
            family.load_image_encoder(torch.float32),
            text,
            SampleSettings(64, 64, steps=2, guidance=1.0, seed=0, cfg=2.0),
            negative_text=text,
        )


def test_outside_of_sampling_the_distilled_model_jumps_as_on_its_schedule(distilled: Path) -> None:
    family, inputs = family_of(distilled), tiny_flux3_inputs(1)
    levels = family.sampling_sigmas(16, 16)
    torch.testing.assert_close(step_from(torch.tensor(levels[:-1])), torch.tensor(levels[1:]), rtol=1e-5, atol=1e-6)
    transformer = family.load_transformer(torch.float32)
    theirs = Flux3Transformer2DModel.from_pretrained(distilled, subfolder="transformer")
    text, at = {"prompt_embeds": inputs["prompt_embeds"]}, torch.tensor([levels[5]])
    # the base's family is asked about the distilled transformer too, by the report that compares the two
    with torch.no_grad():
        ours = family.predict_velocity(transformer, inputs["latents"], at, text)
        jump = lambda **given: theirs(**given, target_timestep=torch.tensor([levels[6]]))  # noqa: E731
        wanted = call_by_hand(jump, inputs["latents"], at, inputs["prompt_embeds"])  # type: ignore[arg-type]
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_latents_are_those_of_the_pipelines_encoder(folder: Path, reference: Flux3ModularPipeline) -> None:
    pixels = torch.rand(1, 3, 48, 80, generator=torch.Generator().manual_seed(1)) * 2 - 1
    ours = family_of(folder).load_image_encoder(torch.float32).encode(pixels)
    vae = reference.vae
    with torch.no_grad():
        mean = vae.encode(pixels).latent_dist.mode()
    packed = Flux3VaeEncoderStep._patchify_latents(mean)
    deviation = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
    expected = (packed - vae.bn.running_mean.view(1, -1, 1, 1)) / deviation.view(1, -1, 1, 1)
    torch.testing.assert_close(torch.nn.functional.pixel_unshuffle(ours, 2), expected, rtol=1e-5, atol=1e-5)


def test_bfls_names_are_those_that_diffusers_converts(distilled: Path, tmp_path: Path) -> None:
    files = save_flux3_split_files(distilled, tmp_path)
    converted = convert_flux3_transformer_checkpoint_to_diffusers(load_file(files.transformer))
    state = load_file(distilled / "transformer" / "diffusion_pytorch_model.safetensors")
    assert converted.keys() == state.keys()
    assert all(torch.equal(converted[name], state[name]) for name in state)
    loaded = family_of(files.transformer, **_parts(distilled)).load_transformer(torch.float32)
    assert loaded.config.flow_map
    own = {name for name in state if "image_cond" not in name}
    assert loaded.state_dict().keys() == own, "without the blocks of reference images, which text to image never runs"
    assert all(torch.equal(loaded.state_dict()[name], state[name]) for name in own)


def _parts(folder: Path) -> dict[str, object]:
    return {"vae": str(folder), "text_encoder": str(folder), "qwen_tokenizer": str(folder / "tokenizer")}


def test_bfls_fp8r_file_is_read_as_diffusers_dequantises_it(folder: Path, tmp_path: Path) -> None:
    files = save_flux3_split_files(folder, tmp_path)
    tensors, expected = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(files.transformer).items():
        if name.split(".")[0] in ("single_blocks", "content_mode_blocks", "txt_mode_blocks") and tensor.ndim == 2:
            tensors[name], tensors[f"{name}_scale"] = quantize_fp8r(tensor)
            expected[name] = dequantize_fp8r(tensors[name], tensors[f"{name}_scale"])
        else:
            tensors[name] = expected[name] = tensor
    save_file(tensors, files.transformer)
    family = model_family(files.model_config())
    loaded = family.load_transformer(torch.float32, fp8=WeightLoader(compute="dequant"))
    plain = tiny_flux3_transformer()
    plain.load_state_dict(convert_flux3_transformer_checkpoint_to_diffusers(expected))
    inputs = tiny_flux3_inputs()
    with torch.no_grad():
        ours = family.predict_velocity(
            loaded, inputs["latents"], inputs["sigmas"], {"prompt_embeds": inputs["prompt_embeds"]}
        )
        theirs = call_by_hand(plain, inputs["latents"], inputs["sigmas"], inputs["prompt_embeds"])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_queries_and_keys_are_rounded_once(folder: Path) -> None:
    """bf16 attention of ours is diffusers' to the last bit, which norms and turns in fp32."""
    ours = family_of(folder).load_transformer(torch.bfloat16)
    theirs = Flux3Transformer2DModel.from_pretrained(folder, subfolder="transformer", torch_dtype=torch.bfloat16)
    states = torch.randn(2, 30, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    ids = torch.rand(30, 4, generator=torch.Generator().manual_seed(4)) * 20
    attn = ours.single_transformer_blocks[0].attn
    qkv = [layer(states) for layer in (attn.to_q, attn.to_k, attn.to_v)]
    mixed = attn.to_out[0](attn.processor.attend(attn, qkv, None, ours.pos_embed(ids)))
    expected = theirs.single_transformer_blocks[0].attn(states, image_rotary_emb=theirs.pos_embed(ids))
    assert torch.equal(mixed, expected)


def test_the_distilled_model_is_sampled_but_not_trained(distilled: Path, folder: Path) -> None:
    for model in (folder, save_flux3_split_files(folder, folder.parent / "base").transformer):
        assert model_type_of({MODEL: str(model)})[0] == "flux3_klein"
    for model in (distilled, save_flux3_split_files(distilled, distilled.parent / "few").transformer):
        with pytest.raises(UserError, match="cannot be trained; train ") as caught:
            model_type_of({MODEL: str(model)})
        assert "\n" not in str(caught.value)
        family_of(distilled)


def test_other_models_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    files = save_flux3_split_files(folder, tmp_path / "files")
    z_image = tiny_z_pipeline(tmp_path / "z")
    wanted = {
        "not Flux3Transformer2DModel; set model_type = .z_image": {"pretrained_model_name_or_path": str(z_image)},
        r"not Qwen3-VL \(no model.layers.0": {"text_encoder": str(files.vae)},
        "Qwen3, not Qwen3-VL; give Qwen3-VL as text_encoder": {"text_encoder": str(z_image)},
        "text 64 wide, the transformer takes 32; give Qwen3-VL-4B": {
            "text_encoder": str(z_image / "text_encoder/model.safetensors")
        },
    }
    assert_refused(files.model_config, wanted)


ONE, TWO = [(96, 64)], [(64, 48), (32, 80)]  # references


@pytest.mark.parametrize(
    ("flow_map", "cfg", "sizes"),
    [(False, 1.0, TWO), (False, 3.0, ONE), (True, 1.0, TWO)],
    ids=["plain, two", "cfg, one", "jumps, two"],
)
def test_a_sample_is_what_the_pipeline_draws(
    tmp_path: Path, flow_map: bool, cfg: float, sizes: list[tuple[int, int]]
) -> None:
    """Sizes are multiples of 16, so that the pipeline leaves the pictures as they are."""
    folder = tiny_flux3_pipeline(tmp_path / "model", flow_map=flow_map)
    family = model_family(ModelConfig(model_type="flux3_klein_edit", pretrained_model_name_or_path=str(folder)))
    random = np.random.default_rng(3)
    shown = [Image.fromarray(random.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes]
    encoder, text = family.load_image_encoder(torch.float32), family.load_text_encoder(torch.float32)
    pixels = [torch.from_numpy(np.asarray(each) / np.float32(127.5) - 1).permute(2, 0, 1)[None] for each in shown]
    caption, negative = text.encode(["make the disc red", "blurry"])

    def sample(references: int) -> np.ndarray:
        conditions = Conditions(references=tuple(encoder.encode(each) for each in pixels[:references]))
        transformer = family.load_transformer(torch.float32)
        settings = SampleSettings(64, 48, steps=3, guidance=1.0, seed=7, cfg=cfg)
        words = {"negative_text": negative if cfg > 1 else None}
        return np.asarray(family.sample(transformer, encoder, caption, settings, conditions=conditions, **words), int)

    ours, pipeline = sample(len(sizes)), flux3_reference(folder)
    if not flow_map:
        pipeline.guider.guidance_scale = cfg
    theirs = pipeline(
        prompt="make the disc red",
        **({} if flow_map else {"negative_prompt": "blurry"}),
        image=shown,
        width=64,
        height=48,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(7),
        output="images",
    )[0]
    assert_same_picture(ours, theirs)
    assert np.abs(ours - sample(len(sizes) - 1)).max() > 1, "the last reference reaches the sample"
