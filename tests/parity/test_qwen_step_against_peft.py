"""One training step of Qwen-Image beside the same step written plainly with diffusers and peft."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from library.conditions import Conditions
from library.config.schema import FlowConfig, ModelConfig, NetworkConfig
from library.data.batches import Batch
from library.models.family_by_name import model_family
from library.models.registry import lora_targets
from library.training.flow import noise_for, sample_sigmas
from library.training.tasks.image_step import FlowStep
from networks.network import inject_adapter
from networks.options import parse_network_args
from tests.parity.peft_lora import assert_gradients_are_pefts, copy_to_peft, fill_up
from tests.tiny_qwen import Kind, tiny_qwen_inputs, tiny_qwen_pipeline

RANK, ALPHA = 4, 3.0


@pytest.mark.parametrize("kind", ["qwen_image", "qwen_image_edit", "qwen_image_edit_plus", "2511"])
def test_loss_and_gradients_of_a_step_equal_diffusers_and_peft(kind: str, tmp_path: Path) -> None:
    model_type: Kind = "qwen_image_edit_plus" if kind == "2511" else kind  # type: ignore[assignment]
    base = tiny_qwen_pipeline(tmp_path / "base", model_type, zero_cond_t=kind == "2511")
    inputs, step, targets = tiny_qwen_inputs(3), 11, lora_targets()[model_type]
    inputs["prompt_embeds_mask"][1, 4:] = False
    references: tuple[torch.Tensor, ...] = ()
    if kind != "qwen_image":
        references = (torch.randn(3, 16, 4, 6, generator=torch.Generator().manual_seed(2)),)
    text = {name: inputs[name] for name in ("prompt_embeds", "prompt_embeds_mask")}
    ids = [5, 6, 7]
    batch = Batch(inputs["latents"], text, torch.ones(3), None, ids, conditions=Conditions(references=references))

    family = model_family(ModelConfig(model_type=model_type, pretrained_model_name_or_path=str(base)))
    transformer = family.load_transformer(torch.float32)
    network_args = ["img_mod_dim=2", "txt_mod_dim=2"]
    config = NetworkConfig(network_dim=RANK, network_alpha=ALPHA, network_args=network_args)
    network = inject_adapter(transformer, parse_network_args(config, targets), targets, seed=0, dtype=torch.float32)
    fill_up(network)
    flow = FlowConfig(timestep_sampling="qwen_shift")
    loss, _ = FlowStep(family, flow, seed=9).loss(transformer.train(), batch, step)
    loss.backward()

    theirs = QwenImageTransformer2DModel.from_pretrained(base, subfolder="transformer").requires_grad_(False)
    ranks = {name: layer.rank for name, layer in network.modules.items()}
    theirs.add_adapter(
        LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,
            target_modules=list(ranks),
            rank_pattern=ranks,
            alpha_pattern=dict.fromkeys(ranks, ALPHA),
        )
    )
    named = dict(theirs.named_parameters())
    copy_to_peft(network, named)
    noise = noise_for(batch.latents, ids, 9, step)
    sigmas = sample_sigmas(flow, ids, 16, 9, step)
    noisy = torch.lerp(batch.latents, noise, sigmas.view(-1, 1, 1, 1))
    packed = [QwenImagePipeline._pack_latents(p, 3, 16, *p.shape[2:]) for p in (noisy, *references)]
    output = theirs.train()(
        hidden_states=torch.cat(packed, dim=1),
        timestep=sigmas,
        encoder_hidden_states=text["prompt_embeds"],
        encoder_hidden_states_mask=text["prompt_embeds_mask"],
        img_shapes=[[(1, 4, 4), *((1, 2, 3) for _ in references)]] * 3,
        return_dict=False,
    )[0]
    velocity = QwenImagePipeline._unpack_latents(output[:, :16], 64, 64, 8)[:, :, 0]
    their_loss = torch.nn.functional.mse_loss(velocity, noise - batch.latents)
    their_loss.backward()

    assert len(get_peft_model_state_dict(theirs)) == len(network.state_dict())
    # fp32, the same operations with the down-projections of q, k, v stacked: rounding of sums, 1e-5 of the largest
    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=0)
    assert_gradients_are_pefts(network, named, 1e-5)
