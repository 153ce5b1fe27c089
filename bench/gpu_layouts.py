"""Steps of a LoRA on several GPUs: what ``bench/gpu.py`` starts in as many processes as there are GPUs.

A layout is a row: ``dp`` copies the model, ``shard`` splits its weights (FSDP2), ``pp`` its depth, ``tp`` its layers;
``device_map`` is one process with a run of the blocks on each GPU, or on one GPU and the CPU, then of few blocks. Each
is set up by the functions that a training run calls. ``dp`` and ``shard`` train an image a GPU, ``pp`` as many in one
batch, the others one image a step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from bench.families import FAMILIES, Sizes, build_transformer, tandem_network
from bench.gpu_cases import RANK, GpuCase, sizes_of
from bench.lora_step import LoraStep, call_transformer, target_of
from bench.measure import time_steps
from library.accelerator import build_accelerator
from library.config.schema import AccelerateConfig, LoggingConfig, ParallelConfig, SavingConfig, TrainingConfig
from library.models.family import split_plan
from library.nn.checkpointing import ActivationCheckpointing
from library.training.parallel.device_map import place_blocks
from library.training.parallel.parallelize import parallelize
from library.training.parallel.pipeline.schedule import Pipeline
from library.training.parallel.spec import ParallelSpec, transformer_split_points
from library.training.parallel.step import average_gradients

LAYOUTS = ("dp", "shard", "pp", "tp")
_BEHIND_BLOCKS = ("norm_out", "proj_out")  # of FLUX and Qwen-Image
_FEW_BLOCKS = 2  # a kind, where a CPU has half of them


@dataclass
class Images:
    """A batch as a pipeline takes it: it has a length and can be cut."""

    inputs: dict[str, Tensor]
    target: Tensor

    def __len__(self) -> int:
        return len(self.target)

    def chunk(self, count: int) -> list[Images]:
        """Return ``count`` pieces; what all images have in common (positions) goes to each."""
        targets, many = self.target.chunk(count), len(self)
        shared = {name for name, tensor in self.inputs.items() if tensor.ndim == 2 and "ids" in name}
        assert all(len(tensor) == many for name, tensor in self.inputs.items() if name not in shared)
        cut = {name: tensor.chunk(count) for name, tensor in self.inputs.items() if name not in shared}
        kept = {name: self.inputs[name] for name in shared}
        return [Images(kept | {name: parts[i] for name, parts in cut.items()}, targets[i]) for i in range(count)]


def processes_of(layout: str, device: torch.device) -> int:
    """Return in how many processes ``layout`` is measured: one a GPU; two to try it on a CPU."""
    if layout == "device_map":
        return 1
    return torch.cuda.device_count() if device.type == "cuda" else 2


def layouts_for(device: torch.device) -> list[str]:
    """Return the rows that ``device``'s machine has: one GPU has nobody to share with but its CPU."""
    alone = device.type == "cuda" and torch.cuda.device_count() < 2
    return ["device_map"] if alone else [*LAYOUTS, "device_map"]


def measure_layout(family_name: str, layout: str, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Return seconds and images of a step and the fullest GPU's peak.

    Call it in a fresh process, for all but ``device_map`` in each of ``processes_of`` processes of a launcher.
    """
    if layout == "device_map":
        return _measure_device_map(family_name, device, tiny)
    world = int(os.environ["WORLD_SIZE"])
    parallel = ParallelConfig(**({} if layout == "dp" else {layout: world}))
    training, saving = TrainingConfig(mixed_precision="bf16"), SavingConfig()
    accelerator = build_accelerator(AccelerateConfig(), training, saving, LoggingConfig(), parallel)
    sizes = sizes_of(GpuCase(family_name, batch=world if layout == "pp" else 1), tiny)
    step = _step_of(layout, accelerator, parallel, family_name, sizes)
    seconds, peak = time_steps(step, accelerator.device, once=tiny)
    peaks: list[float] = [0.0] * world
    dist.all_gather_object(peaks, peak)
    return _row(seconds, 1 if layout == "tp" else world, max(peaks))


def _measure_device_map(family_name: str, device: torch.device, tiny: bool) -> dict[str, Any]:
    """One process with all GPUs; with one GPU, or none, the CPU has the other half of a few blocks."""
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if device.type == "cuda" else [device]
    sizes = sizes_of(GpuCase(family_name), tiny)
    if len(devices) < 2:
        devices.append(torch.device("cpu"))
        sizes = replace(sizes, blocks=tuple(min(_FEW_BLOCKS, blocks) for blocks in sizes.blocks))
    family = FAMILIES[family_name]
    transformer: Any = build_transformer(family, sizes, torch.bfloat16, str(devices[0]))
    network = tandem_network(family_name, family.optimise_forward(transformer), RANK)
    blocks = family.blocks(transformer)
    transformer.enable_gradient_checkpointing(ActivationCheckpointing(len(blocks)))
    placed = place_blocks(transformer, blocks, devices)
    inputs = family.inputs(sizes, devices[0])
    step = LoraStep(transformer, network.parameters(), call_transformer, inputs, autocast=True)
    seconds, peak = time_steps(step.loss, devices[0], once=tiny)
    return _row(seconds, 1, peak) | {"placed": placed}


def _row(seconds: float, images: int, peak: float) -> dict[str, Any]:
    return {"step_s": seconds, "images": images, "peak_gib": peak / 2**30}


def _step_of(
    layout: str, accelerator: Accelerator, parallel: ParallelConfig, family_name: str, sizes: Sizes
) -> Callable[[], Tensor]:
    """Return what takes a training step and returns its loss."""
    family, device = FAMILIES[family_name], accelerator.device
    transformer: Any = build_transformer(family, sizes, torch.bfloat16, str(device))
    if layout != "dp":
        transformer.to("cpu")  # made faster on the GPU, but a run splits what lies in host memory
    network = tandem_network(family_name, family.optimise_forward(transformer), RANK)
    blocks = family.blocks(transformer)
    transformer.enable_gradient_checkpointing(ActivationCheckpointing(len(blocks)))
    trained = network.parameters()
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    inputs = family.inputs(sizes, device)
    batch = Images(inputs, target_of(inputs))
    kinds = sorted({type(block).__name__ for block in blocks})
    spec = ParallelSpec(
        transformer,
        kinds,
        lambda: transformer_split_points(transformer, blocks, _BEHIND_BLOCKS),
        lambda processes: split_plan(type(transformer), transformer.config, processes),
        network,
    )
    model, optimizer, _, _, pipeline = parallelize(accelerator, parallel, spec, optimizer)
    return lambda: _step(accelerator, model.train(), pipeline, batch, trained, optimizer)


def _step(
    accelerator: Accelerator,
    model: nn.Module,
    pipeline: Pipeline | None,
    batch: Images,
    trained: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> Tensor:
    def compute(images: Images) -> tuple[Tensor, Tensor]:
        with accelerator.autocast():
            output = call_transformer(model, images.inputs)
        loss = (output.float() - images.target).square().mean()
        return loss, loss.detach()

    if pipeline is not None:
        loss, _ = pipeline.forward_backward(batch, compute)
    else:
        loss, _ = compute(batch)
        accelerator.backward(loss)
    average_gradients(accelerator, trained)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
