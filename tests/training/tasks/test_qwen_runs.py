"""Whole runs on tiny random Qwen-Image models: what is equal must be equal, and what is written must be readable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from PIL import Image
from safetensors import safe_open

from library.conditions import Conditions
from library.config.schema import FlowConfig, ModelConfig, NetworkConfig
from library.data.batches import Batch
from library.models.family import model_family
from library.models.latents import pack_latents
from library.models.registry import lora_targets
from library.training.flow import noise_for
from library.training.tasks.image_step import FlowStep
from networks.injection import inject_adapter
from networks.options import parse_network_args
from tests.runs import largest_difference, learn_by_heart, lora, losses_of, run, write_dataset
from tests.tiny_qwen import Kind, save_split_files, tiny_qwen_inputs, tiny_qwen_pipeline
from tests.training.test_host_waits import asked_by_more_steps

QWEN = {"model_type": "qwen_image", "timestep_sampling": "qwen_shift"}
SAME_IN_FP32 = 2e-4  # see test_flux_runs.py


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen_pipeline(tmp_path_factory.mktemp("qwen") / "base", blocks=4)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen-data")
    dataset = write_dataset(folder, images=4, text="batch_size = 2")
    for i in range(4):  # captions of different lengths, so that batches are padded
        (folder / "images" / f"{i}.txt").write_text("a disc, " + "plain, " * (3 * i) + "red")
    return dataset


@pytest.fixture(scope="module")
def plain(base: Path, dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without anything special."""
    folder = tmp_path_factory.mktemp("qwen-plain")
    run(base, dataset, folder, **QWEN)
    return folder


@torch.no_grad()
def _output(transformer: torch.nn.Module) -> torch.Tensor:
    inputs = tiny_qwen_inputs()
    return transformer(
        hidden_states=pack_latents(inputs["latents"]),
        timestep=inputs["sigmas"],
        encoder_hidden_states=inputs["prompt_embeds"],
        img_shapes=[[(1, 4, 4)]] * 2,
        return_dict=False,
    )[0]


def test_steps_read_nothing_back_from_the_device(base: Path, tmp_path: Path) -> None:
    def train(folder: Path, steps: int) -> None:
        given = {"max_train_steps": steps, "log_every_n_steps": 100, "save_every_n_epochs": 9, **QWEN}
        run(base, write_dataset(tmp_path), folder, **given)

    more = asked_by_more_steps(tmp_path, train)
    assert not more, more


def test_a_run_leaves_a_lora_that_gives_diffusers_the_output_of_the_running_network(
    base: Path, dataset: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a disc --w 64 --h 64 --s 2\na disc --w 96 --h 64 --s 2 --l 3 --n plain disc\n")
    out = tmp_path / "out"
    events = run(
        base, dataset, out, **QWEN, learning_rate=1e-2, network_alpha=3, sample_prompts=prompts, sample_at_first=True
    )
    with Image.open(out / "samples" / "step000004_01.png") as image:
        assert image.size == (96, 64)
    pipeline = QwenImagePipeline.from_pretrained(base)
    ours, plain = _output(events.task.transformer.eval()), _output(pipeline.transformer)
    pipeline.load_lora_weights(out / "lora.safetensors")
    torch.testing.assert_close(_output(pipeline.transformer), ours, rtol=1e-4, atol=1e-5)
    assert (ours - plain).abs().max() > 1e-3
    with safe_open(out / "lora.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert metadata["ss_network_module"] == "networks.lora_qwen_image"
    assert metadata["ss_base_model_version"] == "qwen_image"
    assert metadata["modelspec.architecture"] == "Qwen-Image/lora"
    assert metadata["modelspec.implementation"] == "https://github.com/QwenLM/Qwen-Image"


@pytest.mark.parametrize("option", [{"gradient_checkpointing": True}, {"blocks_to_swap": 2}], ids=str)
def test_checkpointing_and_swapped_blocks_change_nothing(
    base: Path, dataset: Path, plain: Path, tmp_path: Path, option: dict[str, object]
) -> None:
    run(base, dataset, tmp_path, **QWEN, **option)
    assert largest_difference(lora(tmp_path), lora(plain)) < SAME_IN_FP32


def test_split_files_and_an_fp8_base_train(base: Path, dataset: Path, plain: Path, tmp_path: Path) -> None:
    files = save_split_files(base, tmp_path / "files", "model.diffusion_model.")
    parts = {"vae": files.vae, "text_encoder": files.text_encoder, "qwen_tokenizer": files.tokenizer}
    run(files.transformer, dataset, tmp_path / "single", **QWEN, **parts)
    assert all(torch.equal(a, b) for a, b in zip(lora(tmp_path / "single").values(), lora(plain).values(), strict=True))
    run(files.transformer, dataset, tmp_path / "fp8", **QWEN, **parts, fp8_scaled=True, fp8_text_encoder=True)
    whole, small = losses_of(plain), losses_of(tmp_path / "fp8")
    # fp8 text and weights: a tenth off in the velocity, so a hundredth in the loss, and twice that for luck
    assert all(0 < abs(a - b) < 0.02 * a for a, b in zip(whole, small, strict=True))


@pytest.mark.parametrize("kind", ["qwen_image", "qwen_image_edit", "qwen_image_edit_plus"])
def test_one_image_is_learnt_by_heart(kind: Kind, tmp_path: Path) -> None:
    """A tenth of what predicting nothing would cost, for one image at one noise; the output layer is frozen."""
    folder = tiny_qwen_pipeline(tmp_path / "base", kind, blocks=1)
    family = model_family(ModelConfig(model_type=kind, pretrained_model_name_or_path=str(folder)))
    transformer = family.load_transformer(torch.float32)
    transformer.get_parameter("proj_out.weight").mul_(5)  # a random one cannot reach a velocity's size
    targets = lora_targets()[kind]
    options = parse_network_args(NetworkConfig(network_dim=32, network_alpha=32), targets)
    network = inject_adapter(transformer, options, targets, seed=0)
    inputs = tiny_qwen_inputs(1, side=6)
    text = {name: inputs[name] for name in ("prompt_embeds", "prompt_embeds_mask")}
    references = () if kind == "qwen_image" else (inputs["latents"].flip(-1),)
    conditions = Conditions(references=references)
    batch = Batch(inputs["latents"], text, torch.ones(1), None, torch.tensor([3]), conditions=conditions)
    step = FlowStep(family, FlowConfig(timestep_sampling="qwen_shift"), seed=9)
    losses = learn_by_heart(step, transformer, network, batch)
    nothing = (noise_for(batch.latents, batch.sample_ids, 9, 0) - batch.latents).square().mean().item()
    assert losses[-1] < 0.1 * min(nothing, losses[0])
