"""Runs of every kind of adapter, and of text encoders: they learn, their files give the trained model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from PIL import Image, ImageChops
from safetensors.torch import load_file
from torch import Tensor

from library.training.run import Run
from networks.merging.merge import LoraSource, merge_loras
from tests.networks.conftest import comfy_weight
from tests.runs import (
    arguments,
    largest_difference,
    lora,
    losses_of,
    metrics,
    run,
    same,
    train_flags,
    velocity,
    write_base,
    write_dataset,
)
from tests.targets import FLUX_TARGETS
from tests.worker_group import run_in_group

KINDS = ["dora", "lokr", "loha"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("kinds")
    return write_base(folder / "base"), write_dataset(folder / "data", images=4)


def train(files: tuple[Path, Path], output: Path, kind: str, **settings: object) -> Run:
    defaults = {"network_dim": 6, "network_alpha": 3, "learning_rate": 0.02, "save_format": "comfy"}
    return run(*files, output, network_type=kind, **(defaults | settings))


def trained_output(events: Run) -> Tensor:
    return velocity(events.task.transformer.eval())


@pytest.fixture(scope="module", params=KINDS)
def trained(
    request: pytest.FixtureRequest, files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Run]:
    """One whole run of each kind."""
    output = tmp_path_factory.mktemp(request.param)
    settings = {"max_train_steps": 12, "log_every_n_steps": 1, "gradient_checkpointing": True}
    return output, train(files, output, request.param, **settings)


def merged_output(base: Path, file: Path, folder: Path) -> Tensor:
    merge_loras(base, [LoraSource(file, 1.0)], folder, FLUX_TARGETS)
    return velocity(FluxTransformer2DModel.from_pretrained(folder / "transformer").eval())


def test_a_run_learns_and_its_merged_file_is_the_trained_model(
    files: tuple[Path, Path], trained: tuple[Path, Run], tmp_path: Path
) -> None:
    output, events = trained
    seen = losses_of(output)
    # random timesteps: single losses vary, means of a third of the run fall
    assert sum(seen[-4:]) < sum(seen[:4])
    plain = velocity(FluxTransformer2DModel.from_pretrained(files[0] / "transformer").eval())
    moved = (plain - trained_output(events)).abs().max()
    assert moved > 0.02
    merged = merged_output(files[0], output / "lora.safetensors", tmp_path / "merged")
    assert (merged - trained_output(events)).abs().max() < 1e-4 * max(1.0, moved)  # fp32 throughout


def test_comfyui_reads_the_file_as_the_trained_weights(trained: tuple[Path, Run]) -> None:
    output, events = trained
    stems: dict[str, dict[str, Tensor]] = {}
    for key, tensor in lora(output).items():
        stem, _, rest = key.partition(".")
        stems.setdefault(stem, {})[rest] = tensor
    modules = events.task.network.modules
    assert len(stems) == len(modules) > 20
    for name, layer in modules.items():
        # SimpleTuner's naming, which ComfyUI's model_lora_keys_unet maps to the rows of the original weight
        weight = comfy_weight(layer.base.weight, stems["lycoris_" + name.replace(".", "_")])
        x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = x.double() @ weight.t() + layer.bias.double()
            torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-4)  # fp32 layer


def test_diffusers_loads_a_dora(files: tuple[Path, Path], tmp_path: Path) -> None:
    events = train(files, tmp_path / "run", "dora", save_format="diffusers", max_train_steps=8)
    transformer = FluxTransformer2DModel.from_pretrained(files[0] / "transformer")
    transformer.load_lora_adapter(tmp_path / "run", weight_name="lora.safetensors", prefix="transformer")
    difference = (velocity(transformer.eval()) - trained_output(events)).abs().max()
    assert difference < 1e-4  # fp32
    merged = merged_output(files[0], tmp_path / "run" / "lora.safetensors", tmp_path / "merged")
    assert (merged - trained_output(events)).abs().max() < 1e-4


def test_a_start_from_the_weights_learns_and_is_saved_as_a_plain_lora(files: tuple[Path, Path], tmp_path: Path) -> None:
    settings = {"init_lora_weights": "pissa", "save_format": "diffusers", "learning_rate": 1e-3}
    events = train(files, tmp_path / "run", "lora", **settings, save_state=True, save_every_n_steps=2)
    tensors = lora(tmp_path / "run")
    assert {t.shape[0] for key, t in tensors.items() if "lora_A" in key} == {12}  # twice the rank
    transformer = FluxTransformer2DModel.from_pretrained(files[0] / "transformer")
    before = velocity(transformer.eval())
    transformer.load_lora_adapter(tmp_path / "run", weight_name="lora.safetensors", prefix="transformer")
    assert (velocity(transformer.eval()) - trained_output(events)).abs().max() < 1e-4  # fp32
    assert (before - trained_output(events)).abs().max() > 0.01
    events.task.network.set_multiplier(0.0)
    assert (before - trained_output(events)).abs().max() < 1e-5  # the base was never touched
    # the start itself is in the state: a decomposition may differ from one machine to another
    train(files, tmp_path / "rest", "lora", **settings, resume=tmp_path / "run" / "lora-step00000002-state")
    assert same(lora(tmp_path / "rest"), tensors)


def test_rslora_is_saved_with_the_alpha_that_every_program_understands(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    events = train(files, tmp_path / "run", "lora", use_rslora=True, save_format="kohya")
    assert events.task.network.modules["transformer_blocks.0.attn.to_out.0"].scale == 3 / math.sqrt(6)
    alpha = lora(tmp_path / "run")["lora_unet_double_blocks_0_img_attn_proj.alpha"]
    assert float(alpha) == pytest.approx(3 * math.sqrt(6), rel=1e-6)  # alpha / rank is the scale; stored in fp32
    merged = merged_output(files[0], tmp_path / "run" / "lora.safetensors", tmp_path / "merged")
    assert (merged - trained_output(events)).abs().max() < 1e-4


def test_text_encoders_are_adapted_too(files: tuple[Path, Path], tmp_path: Path) -> None:
    train(files, tmp_path / "run", "lokr", text_encoder_lr=0.01, max_train_steps=1)
    keys = load_file(tmp_path / "run" / "lora.safetensors")
    assert "lora_te1_text_model_encoder_layers_0_mlp_fc1.lokr_w1" in keys
    path = tmp_path / "run" / "lora.safetensors"
    report = merge_loras(files[0], [LoraSource(path, 1.0)], tmp_path / "merged", FLUX_TARGETS)
    assert report.changed == len({key.split(".")[0] for key in keys})


# As in test_flux_runs.py, AdamW's step has the gradient's sign rather than its size, so that rounding shows in entries
# of lora_B that are nearly zero; text encoders are trained at ten times the rate here. Gradients that were not reduced,
# or another caption, make a difference above 0.1.
SAME_IN_FP32 = 2e-3

CLIP = {"text_encoder_lr": [1e-2]}
BOTH = {"text_encoder_lr": [1e-2, 5e-3], "network_args": ["train_t5xxl=True", "single_dim=0"]}
PROMPT = "a disc, red"


def _rates(output: Path) -> dict[str, float]:
    return {key.removeprefix("lr/"): value for key, value in metrics(output)[0].items() if key.startswith("lr/")}


@torch.no_grad()
def _running(events: Run) -> dict[str, torch.Tensor]:
    encoders = events.task.step.text_encoders
    assert encoders is not None
    return encoders.eval()([PROMPT])


def _encoded(pipeline: FluxPipeline) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        embeds, pooled, _ = pipeline.encode_prompt(PROMPT, PROMPT, max_sequence_length=24)
    return embeds, pooled


@pytest.mark.parametrize("save_format", ["diffusers", "kohya", "comfy"])
def test_diffusers_encodes_a_prompt_as_the_running_clip_does(
    base: Path, dataset: Path, tmp_path: Path, save_format: str
) -> None:
    events = run(
        base, dataset, tmp_path, **CLIP, network_alpha=3, save_format=save_format, network_args=["single_dim=0"]
    )
    pipeline = FluxPipeline.from_pretrained(base)
    _, plain = _encoded(pipeline)
    pipeline.load_lora_weights(tmp_path / "lora.safetensors")
    _, theirs = _encoded(pipeline)
    ours = _running(events)["pooled_prompt_embeds"]
    assert (ours - plain).abs().max() > 1e-2  # the LoRA does something
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)  # fp32, the same products in another order
    assert _rates(tmp_path) == {"lora": 1e-3, "text_encoder": 1e-2}


def test_t5_is_trained_at_its_own_rate_and_merged_by_hand_it_gives_the_running_embeddings(
    base: Path, dataset: Path, tmp_path: Path
) -> None:
    events = run(base, dataset, tmp_path, **BOTH, save_format="kohya", network_alpha=2)
    assert _rates(tmp_path) == {"lora": 1e-3, "text_encoder": 1e-2, "text_encoder_t5": 5e-3}
    pipeline = FluxPipeline.from_pretrained(base)
    plain, _ = _encoded(pipeline)
    tensors = lora(tmp_path)
    merged = 0
    for name, module in pipeline.text_encoder_2.named_modules():
        key = f"lora_te3_{name.replace('.', '_')}"
        if f"{key}.alpha" in tensors:
            down, up = tensors[f"{key}.lora_down.weight"], tensors[f"{key}.lora_up.weight"]
            module.weight.data += tensors[f"{key}.alpha"] / down.shape[0] * up @ down
            merged += 1
    assert merged == sum(key.startswith("lora_te3_") for key in tensors) / 3 == 2 * 7  # two blocks of 4 + 3 linears
    theirs, _ = _encoded(pipeline)
    ours = _running(events)["prompt_embeds"]
    assert (ours - plain).abs().max() > 1e-2
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_one_rate_holds_for_both_and_a_rate_of_zero_leaves_an_encoder_out(
    base: Path, dataset: Path, tmp_path: Path
) -> None:
    run(base, dataset, tmp_path / "a", text_encoder_lr=2e-3, network_args=["train_t5xxl=True"], max_train_steps=1)
    assert _rates(tmp_path / "a") == {"lora": 1e-3, "text_encoder": 2e-3, "text_encoder_t5": 2e-3}
    run(base, dataset, tmp_path / "b", text_encoder_lr=[0, 2e-3], network_args=["train_t5xxl=True"], max_train_steps=1)
    assert _rates(tmp_path / "b") == {"lora": 1e-3, "text_encoder_t5": 2e-3}


def test_text_encoders_alone_are_trained_on_request(base: Path, dataset: Path, tmp_path: Path) -> None:
    ratio = ["loraplus_text_encoder_lr_ratio=4"]
    run(base, dataset, tmp_path, **CLIP, network_train_text_encoder_only=True, network_args=ratio)
    tensors = lora(tmp_path)
    assert {key.split(".")[0] for key in tensors} == {"text_encoder"}
    assert all(tensor.any() for tensor in tensors.values())
    assert _rates(tmp_path) == {"text_encoder_A": 1e-2, "text_encoder_B": 4e-2}
    pipeline = FluxPipeline.from_pretrained(base)
    _, plain = _encoded(pipeline)
    pipeline.load_lora_weights(tmp_path / "lora.safetensors")
    assert (_encoded(pipeline)[1] - plain).abs().max() > 1e-2


def test_samples_and_validation_see_the_trained_encoder(base: Path, tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", text="batch_size = 2\nvalidation_split = 0.25\nvalidation_seed = 1")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a disc, red --w 64 --h 64 --s 2 --l 2 --n blue\n")
    events = run(
        base,
        data,
        tmp_path / "out",
        text_encoder_lr=[0.1],
        network_train_text_encoder_only=True,  # a change can come from CLIP alone
        sample_prompts=prompts,
        sample_at_first=True,
    )
    with (
        Image.open(tmp_path / "out" / "samples" / "step000000_00.png") as before,
        Image.open(tmp_path / "out" / "samples" / "step000004_00.png") as after,
    ):
        assert ImageChops.difference(before.convert("RGB"), after.convert("RGB")).getbbox() is not None
    first, last = losses_of(tmp_path / "out", "val_loss")
    assert first != last
    events.task.network.set_multiplier(0.0)
    assert _running(events)["pooled_prompt_embeds"].equal(
        _encoded(FluxPipeline.from_pretrained(base))[1]
    )  # without its LoRA the running encoder is the base's, bit for bit


def test_batches_carry_the_captions_their_cached_text_was_made_from(base: Path, tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", text="batch_size = 4", shuffle_caption=True, caption_dropout_rate=0.4)
    task = run(base, data, tmp_path / "out", **BOTH, max_train_steps=1).task
    task.batches.set_position(5, 0)
    batches = list(task.loader)
    captions = [caption for batch in batches for caption in batch.captions]
    assert len(captions) == 8
    assert "" in captions
    assert len(set(captions)) > 3
    assert task.step.text_encoders is not None
    task.step.text_encoders.eval()
    task.network.set_multiplier(0.0)
    with torch.no_grad():
        for batch in batches:
            for name, rows in task.step.text(batch).items():
                # the same products; batches of another size round differently
                torch.testing.assert_close(rows, batch.text[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "trained",
    [
        pytest.param(BOTH, marks=pytest.mark.slow, id="all"),
        pytest.param({**CLIP, "network_train_text_encoder_only": True}, id="clip-alone"),
    ],
)
def test_two_processes_equal_one(base: Path, tmp_path: Path, trained: dict[str, object]) -> None:
    held = "validation_split = 0.25\nvalidation_seed = 1"  # two images, in batches that two processes share unequally
    halves = write_dataset(tmp_path / "halves", text=f"batch_size = 2\n{held}", num_repeats=2)
    whole = write_dataset(tmp_path / "whole", text=f"batch_size = 4\n{held}", num_repeats=2)
    settings = {**trained, "max_train_steps": 3, "gradient_checkpointing": True, "validate_every_n_steps": 1}
    one = run(base, whole, tmp_path / "one", **settings)
    job = ("two", train_flags, (arguments(base, halves, tmp_path / "two", **settings),))
    assert run_in_group([job], tmp_path) == {"two": ""}
    assert largest_difference(lora(tmp_path / "two"), lora(tmp_path / "one")) < SAME_IN_FP32
    assert losses_of(tmp_path / "two", "val_loss")[-1] == pytest.approx(one.val_loss, rel=1e-5)
