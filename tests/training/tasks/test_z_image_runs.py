"""Whole runs on tiny random Z-Image models: what is equal must be equal, and what is written must be readable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import ZImagePipeline
from PIL import Image
from safetensors import safe_open

from library.config import load_config
from library.config.schema import FlowConfig, ModelConfig, NetworkConfig
from library.data.batches import Batch
from library.errors import UserError
from library.models.family import model_family
from library.models.z_image.files import Z_IMAGE_TARGETS
from library.training.flow import noise_for
from library.training.tasks.image_step import FlowStep
from networks.injection import inject_adapter
from networks.options import parse_network_args
from tests.runs import arguments, largest_difference, learn_by_heart, lora, losses_of, run, write_dataset
from tests.tiny_z_image import save_z_split_files, tiny_z_inputs, tiny_z_pipeline

Z_IMAGE = {"model_type": "z_image", "timestep_sampling": "shift"}
SAME_IN_FP32 = 2e-4  # see test_flux_runs.py


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_z_pipeline(tmp_path_factory.mktemp("z") / "base", layers=4)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("z-data")
    dataset = write_dataset(folder, images=4, text="batch_size = 2")
    for i in range(4):  # captions of different lengths: 32 to 64 tokens, so that batches are padded
        (folder / "images" / f"{i}.txt").write_text("a disc, " + "plain, " * (6 * i) + "red")
    return dataset


@pytest.fixture(scope="module")
def plain(base: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without anything special."""
    folder = tmp_path_factory.mktemp("z-plain")
    run(base, dataset, folder, **Z_IMAGE)
    return folder


@torch.no_grad()
def _output(transformer: torch.nn.Module) -> torch.Tensor:
    inputs = tiny_z_inputs()
    given = list(inputs["latents"].unsqueeze(2)), inputs["sigmas"], list(inputs["prompt_embeds"])
    return torch.stack(transformer(*given, return_dict=False)[0])


def test_a_run_leaves_a_lora_that_gives_diffusers_the_output_of_the_running_network(
    base: Path, dataset: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a disc --w 64 --h 64 --s 2\na disc --w 96 --h 64 --s 2 --l 3 --n plain disc\n")
    out = tmp_path / "out"
    settings = {"network_alpha": 3, "learning_rate": 1e-2, "sample_prompts": prompts, "sample_at_first": True}
    events = run(base, dataset, out, **Z_IMAGE, **settings)
    with Image.open(out / "samples" / "step000004_01.png") as image:
        assert image.size == (96, 64)
    pipeline = ZImagePipeline.from_pretrained(base)
    ours, plain = _output(events.task.transformer.eval()), _output(pipeline.transformer)
    pipeline.load_lora_weights(out / "lora.safetensors")
    torch.testing.assert_close(_output(pipeline.transformer), ours, rtol=1e-4, atol=1e-5)
    assert (ours - plain).abs().max() > 1e-3
    with safe_open(out / "lora.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert metadata["ss_network_module"] == "networks.lora_zimage"
    assert metadata["ss_base_model_version"] == "z_image"
    assert metadata["modelspec.architecture"] == "Z-Image/lora"


@pytest.mark.parametrize("option", [{"gradient_checkpointing": True}, {"blocks_to_swap": 2}], ids=str)
def test_checkpointing_and_swapped_blocks_change_nothing(
    base: Path, dataset: Path, plain: Path, tmp_path: Path, option: dict[str, object]
) -> None:
    run(base, dataset, tmp_path, **Z_IMAGE, **option)
    assert largest_difference(lora(tmp_path), lora(plain)) < SAME_IN_FP32


def test_split_files_and_an_fp8_base_train(base: Path, dataset: Path, plain: Path, tmp_path: Path) -> None:
    files = save_z_split_files(base, tmp_path / "files", "model.diffusion_model.")
    parts = {"vae": files.vae, "text_encoder": files.text_encoder, "qwen_tokenizer": files.tokenizer}
    run(files.transformer, dataset, tmp_path / "single", **Z_IMAGE, **parts)
    assert all(torch.equal(a, b) for a, b in zip(lora(tmp_path / "single").values(), lora(plain).values(), strict=True))
    run(files.transformer, dataset, tmp_path / "fp8", **Z_IMAGE, **parts, fp8_scaled=True, fp8_text_encoder=True)
    whole, small = losses_of(plain), losses_of(tmp_path / "fp8")
    # fp8 text and weights: a tenth off in the velocity, so a hundredth in the loss, and twice that for luck
    assert all(0 < abs(a - b) < 0.02 * a for a, b in zip(whole, small, strict=True))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"guidance_scale": 3.5}, 'guidance_scale: has no effect with model_type = "z_image", which takes no guidance'),
        ({"t5xxl": "t5.safetensors"}, 't5xxl: has no effect with model_type = "z_image"'),
        ({"zero_cond_t": "true"}, 'zero_cond_t: has no effect with model_type = "z_image"'),
    ],
)
def test_options_of_other_models_are_refused(option: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_config(arguments(tmp_path, tmp_path, tmp_path, model_type="z_image", **option))


def test_one_image_is_learnt_by_heart(tmp_path: Path) -> None:
    """A tenth of what predicting nothing would cost, for one image at one noise; the output layer is frozen."""
    folder = tiny_z_pipeline(tmp_path / "base", layers=1)
    family = model_family(ModelConfig(model_type="z_image", pretrained_model_name_or_path=str(folder)))
    transformer = family.load_transformer(torch.float32)
    output = transformer.get_parameter("all_final_layer.2-1.linear.weight")
    output.mul_(5)  # a random one cannot reach a velocity's size from what the last norm gives
    # attention and MLP alone stop at 0.4 of it here: behind the last norm, whose scale they cannot change, it is frozen
    config = NetworkConfig(network_dim=32, network_alpha=32, network_args=["mod_dim=32"])
    options = parse_network_args(config, Z_IMAGE_TARGETS)
    network = inject_adapter(transformer, options, Z_IMAGE_TARGETS, seed=0)
    inputs = tiny_z_inputs(1, side=6)
    text = {name: inputs[name] for name in ("prompt_embeds", "prompt_embeds_mask")}
    batch = Batch(inputs["latents"], text, torch.ones(1), None, torch.tensor([3]))
    step = FlowStep(family, FlowConfig(timestep_sampling="shift"), seed=9)
    losses = learn_by_heart(step, transformer, network, batch)
    nothing = (noise_for(batch.latents, batch.sample_ids, 9, 0) - batch.latents).square().mean().item()
    assert losses[-1] < 0.1 * min(nothing, losses[0])
