"""One step that trains CLIP and T5 beside the transformer, against the same step written with diffusers and peft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline
from peft import LoraConfig

from library.config.schema import FlowConfig, ModelConfig, NetworkConfig, OptimizerConfig, TrainingConfig
from library.data.batches import Batch
from library.models.flux.files import FLUX_TARGETS
from library.models.registry import model_family
from library.training.flow import noise_for, sample_sigmas
from library.training.tasks.image_lora import Networks, prepare_networks
from library.training.tasks.image_step import FlowStep
from library.training.tasks.lora_plan import plan_network
from tests.runs import pipeline_forward
from tests.tiny import tiny_flux_inputs, tiny_flux_pipeline

RANK, ALPHA, STEP = 4, 3.0, 11
CAPTIONS = ["a disc", "a red disc, plain", ""]


def _prepared(base: Path, console: object, checkpointing: bool) -> tuple[FlowStep, Networks]:
    family = model_family(ModelConfig(pretrained_model_name_or_path=str(base)))
    training = TrainingConfig(gradient_checkpointing=checkpointing)
    network = NetworkConfig(network_dim=RANK, network_alpha=ALPHA, network_args=["train_t5xxl=True"])
    plan = plan_network(network, OptimizerConfig(text_encoder_lr=[1e-5, 1e-5]), training, FLUX_TARGETS)
    encoder = family.load_text_encoder(torch.float32)
    cpu = torch.device("cpu")
    networks = prepare_networks(family, encoder, plan, network, training, torch.float32, cpu, console)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(1)
    for layer in networks.lora.modules.values():  # so that lora_A gets a gradient too
        layer.lora_B.weight.data.normal_(std=0.05, generator=random)
    return FlowStep(
        family, FlowConfig(timestep_sampling="flux_shift", guidance_scale=3.5), 9, networks.text_encoders
    ), networks


class _Silent:
    def print(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_text_encoder_loras_equal_peft(tmp_path: Path, checkpointing: bool) -> None:
    base = tiny_flux_pipeline(tmp_path / "base")
    inputs = tiny_flux_inputs(batch=3)
    wrong = {k: torch.full_like(inputs[k], torch.nan) for k in ("prompt_embeds", "pooled_prompt_embeds")}
    batch = Batch(inputs["latents"], wrong, torch.ones(3), None, torch.tensor([5, 6, 7]), CAPTIONS)
    step, networks = _prepared(base, _Silent(), checkpointing)
    assert networks.text_encoders is not None
    networks.text_encoders.train()
    assert any(getattr(m, "gradient_checkpointing", False) for m in networks.text_encoders.modules()) == checkpointing
    loss, _ = step.loss(networks.transformer.train(), batch, STEP)
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
        names = networks.lora.component(component or "transformer").modules
        targets = [name.removeprefix(prefix) for name in names]
        module.add_adapter(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets))
    named = {
        f"{component}.{name}" if component else name: parameter
        for component, module in theirs.items()
        for name, parameter in module.named_parameters()
    }
    for name, tensor in networks.lora.state_dict().items():
        named[name.replace(".weight", ".default.weight")].data.copy_(tensor)
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
    for name, layer in networks.lora.modules.items():
        for part in ("lora_A", "lora_B"):
            ours = getattr(layer, part).weight.grad
            peft = named[f"{name}.{part}.default.weight"].grad
            # fp32, the same operations in another order: rounding of sums, 1e-5 of the largest; T5's first layers are
            # reached through all others
            assert (ours - peft).abs().max() <= 5e-5 * peft.abs().max(), f"{name}.{part}"
