"""Whole runs that train CLIP, T5 or both, beside the transformer or alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image, ImageChops

from library.training.run import Run
from tests.runs import arguments, largest_difference, lora, losses_of, metrics, run, train_flags, write_dataset
from tests.worker_group import run_in_group

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
