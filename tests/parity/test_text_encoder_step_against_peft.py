"""One step that trains CLIP and T5 beside the transformer, against the same step written with diffusers and peft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from diffusers import FluxPipeline
from peft import LoraConfig

from library.config import load_config
from library.config.schema import FlowConfig
from library.data.batches import Batch
from library.training.flow import noise_for, sample_sigmas
from library.training.tasks.image_lora import ImageLora
from library.training.tasks.image_step import FlowStep
from tests.parity.peft_lora import assert_gradients_are_pefts, copy_to_peft, fill_up
from tests.runs import arguments, pipeline_forward, write_dataset
from tests.tiny import tiny_flux_inputs, tiny_flux_pipeline

RANK, ALPHA, STEP = 4, 3.0, 11
CAPTIONS = ["a disc", "a red disc, plain", ""]


def _prepared(base: Path, checkpointing: bool) -> tuple[FlowStep, ImageLora]:
    flags = arguments(
        base,
        write_dataset(base.parent / "data"),
        base / "out",
        network_dim=RANK,
        network_alpha=ALPHA,
        text_encoder_lr=[1e-5, 1e-5],
        network_args=["train_t5xxl=True"],
        gradient_checkpointing=checkpointing,
    )
    AcceleratorState._reset_state(reset_partial_state=True)  # of a run of other precision before
    task = ImageLora(load_config(flags))
    task.open()
    task.load_networks()
    fill_up(task.network)
    return FlowStep(
        task.family, FlowConfig(timestep_sampling="flux_shift", guidance_scale=3.5), 9, task.text_encoders
    ), task


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_text_encoder_loras_equal_peft(tmp_path: Path, checkpointing: bool) -> None:
    base = tiny_flux_pipeline(tmp_path / "base")
    inputs = tiny_flux_inputs(batch=3)
    wrong = {k: torch.full_like(inputs[k], torch.nan) for k in ("prompt_embeds", "pooled_prompt_embeds")}
    batch = Batch(inputs["latents"], wrong, torch.ones(3), None, [5, 6, 7], CAPTIONS)
    step, task = _prepared(base, checkpointing)
    assert task.text_encoders is not None
    task.text_encoders.train()
    assert any(getattr(m, "gradient_checkpointing", False) for m in task.text_encoders.modules()) == checkpointing
    loss, _ = step.loss(task.transformer.train(), batch, STEP)
    loss.backward()

    pipeline = FluxPipeline.from_pretrained(base)
    theirs = {
        "": pipeline.transformer,
        "text_encoder": pipeline.text_encoder,
        "text_encoder_2": pipeline.text_encoder_2,
    }
    for component, module in theirs.items():
        module.requires_grad_(False)
        prefix = f"{component}." if component else ""
        names = task.network.component(component or "transformer").modules
        targets = [name.removeprefix(prefix) for name in names]
        module.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets))
    named = {
        f"{component}.{name}" if component else name: parameter
        for component, module in theirs.items()
        for name, parameter in module.named_parameters()
    }
    copy_to_peft(task.network, named)
    clip_ids, t5_ids = (
        tokenizer(
            CAPTIONS, padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt"
        ).input_ids
        for tokenizer in (pipeline.tokenizer, pipeline.tokenizer_2)
    )
    text = {
        "pooled_prompt_embeds": pipeline.text_encoder(clip_ids).pooler_output,
        "prompt_embeds": pipeline.text_encoder_2(t5_ids)[0],
    }
    noise = noise_for(batch.latents, batch.sample_ids, 9, STEP)
    sigmas = sample_sigmas(step.flow, batch.sample_ids, 16, 9, STEP)
    noisy = torch.lerp(batch.latents, noise, sigmas.view(-1, 1, 1, 1))
    velocity = pipeline_forward(pipeline.transformer.train(), noisy, sigmas, text, guidance=3.5)
    their_loss = torch.nn.functional.mse_loss(velocity, noise - batch.latents)
    their_loss.backward()

    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=0)
    # fp32, the same operations in another order: rounding of sums, 1e-5 of the largest; T5's first layers are
    # reached through all others
    assert_gradients_are_pefts(task.network, named, 5e-5)
