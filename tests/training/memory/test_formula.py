"""The formula: against a real step, and against a prepared run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from library.models.family_by_name import family_class
from library.models.registry import lora_targets
from library.models.weights import read_config
from library.nn.checkpointing import ActivationCheckpointing, neighbours
from library.training.memory.budget import tensor_bytes
from library.training.memory.formula import StepOptions, model_numbers, step_parts
from library.training.optim.factory import unwrapped
from networks.network import inject_adapter
from networks.options import parse_network_args
from tests.runs import run

# What a pass holds at its highest point, by the formula, over what torch's profiler counts. The profiler also sees the
# buffers in which oneDNN packs weights, which differ from processor to processor.
LOW, HIGH = 0.8, 1.25
FLUX = {
    "guidance_embeds": True,
    "num_layers": 2,
    "num_single_layers": 4,
    "attention_head_dim": 64,
    "num_attention_heads": 6,
    "joint_attention_dim": 128,
    "pooled_projection_dim": 64,
    "axes_dims_rope": (8, 28, 28),
}


def peak(step: Callable[[], None]) -> int:
    """Return the most bytes that ``step`` holds at once besides its gradients, which it adds to those of one before."""
    step()
    gc.collect()  # what that step left in cycles would be let go of in the next and count as less held
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def lora_step(checkpointing: bool, tokens: int, text: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], None]:
    """Return a step of diffusers' FLUX transformer with Tandem's layers and LoRA, on numbers."""
    from diffusers import FluxTransformer2DModel

    from library.config.schema import NetworkConfig
    from library.models.flux.model import optimise_forward

    model = optimise_forward(FluxTransformer2DModel(**FLUX).to(dtype))
    options = parse_network_args(NetworkConfig(network_dim=8, network_alpha=8), lora_targets()["flux"])
    inject_adapter(model, options, lora_targets()["flux"], seed=0)
    if checkpointing:
        blocks = family_class("flux").blocks(model)
        pairs, chained_args = neighbours(blocks), family_class("flux").chained_args
        model.enable_gradient_checkpointing(
            ActivationCheckpointing(len(blocks), pairs=pairs, chained_args=chained_args)
        )
    inputs = {
        "hidden_states": torch.randn(1, tokens, 64),
        "encoder_hidden_states": torch.randn(1, text, 128),
        "pooled_projections": torch.randn(1, 64),
        "timestep": torch.rand(1),
        "guidance": torch.ones(1),
        "img_ids": torch.zeros(tokens, 3),
        "txt_ids": torch.zeros(text, 3),
    }

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = model.train()(**inputs, return_dict=False)[0]
        output.float().square().mean().backward()

    return step


@pytest.mark.parametrize(("tokens", "checkpointing"), [(256, False), (784, True)])
def test_a_lora_steps_peak_is_what_was_estimated(tokens: int, checkpointing: bool) -> None:
    parts = step_parts(
        model_numbers(family_class("flux"), FLUX, (tokens, 64), 8), StepOptions(checkpointing=checkpointing)
    )
    assert LOW < parts["activations"] / peak(lora_step(checkpointing, tokens, 64)) < HIGH


def test_a_step_in_fp32_too() -> None:
    model = model_numbers(family_class("flux"), FLUX, (256, 64), 8, torch.float32, autocast=False)
    parts = step_parts(model, StepOptions(base_bytes=4))
    assert LOW < parts["activations"] / peak(lora_step(False, 256, 64, torch.float32)) < HIGH


def test_the_parts_are_those_of_a_prepared_run(base: Path, dataset: Path, tmp_path: Path) -> None:
    done = run(base, dataset, tmp_path / "out", max_train_steps=1, mixed_precision="bf16", network_dim=4).task
    trained, states = done.engine.parameters, unwrapped(done.engine.optimizer).state.values()
    numbers = model_numbers(family_class("flux"), read_config(base / "transformer"), (16, 24), 4)
    parts = step_parts(numbers, StepOptions())
    ids = {id(p) for p in trained}
    assert parts["weights"] == tensor_bytes([p for p in done.transformer.parameters() if id(p) not in ids])
    assert parts["LoRA"] == parts["gradients"] == tensor_bytes(trained)
    held = tensor_bytes([value for state in states for key, value in state.items() if key != "step"])
    assert parts["optimizer"] == held
