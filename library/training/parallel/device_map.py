"""A transformer on several GPUs driven by one process: each has a run of neighbouring blocks.

accelerate's ``dispatch_model`` places the weights and puts hooks around the modules that move what comes in to where
the weights are; what lies outside the blocks stays on the first GPU, and so does the result. A LoRA lies beside the
layers that it changes. Autograd takes gradients back the same way. One GPU works at a time: a run has the memory of all
and the speed of one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator, dispatch_model
from torch import nn

from library.config.schema import ParallelConfig
from library.errors import UserError
from library.training.memory.budget import in_words, tensor_bytes
from library.training.parallel.pipeline import partition


def devices_to_fill(parallel: ParallelConfig, accelerator: Accelerator) -> list[torch.device]:
    """Return this machine's GPUs if ``device_map`` asks for them, else nothing.

    Raises:
        UserError: there are several processes, or fewer than two GPUs.
    """
    if parallel.device_map is None:
        return []
    if accelerator.num_processes > 1:
        raise UserError("device_map: one process drives all GPUs; start with python, or set shard instead of it")
    count = torch.cuda.device_count()
    if count < 2:
        raise UserError(f'device_map: needs two GPUs, this process sees {count}; remove it, or set memory = "auto"')
    return [torch.device("cuda", number) for number in range(count)]


def place_blocks(transformer: nn.Module, blocks: Sequence[nn.Module], devices: Sequence[torch.device]) -> str:
    """Put ``transformer`` with its LoRA on ``devices`` so that the fullest holds as little as can be; return how.

    Parameters on another device than before are new objects: call it before an optimizer is built.

    Raises:
        UserError: there are fewer blocks than devices.
    """
    if len(blocks) < len(devices):
        raise UserError(f"device_map: {len(devices)} GPUs for {len(blocks)} blocks; hide some (CUDA_VISIBLE_DEVICES)")
    names = {id(module): name for name, module in transformer.named_modules()}
    sizes = [tensor_bytes((*block.parameters(), *block.buffers())) for block in blocks]
    within = {id(t) for block in blocks for t in (*block.parameters(), *block.buffers())}
    outside = tensor_bytes([t for t in (*transformer.parameters(), *transformer.buffers()) if id(t) not in within])
    sizes[0] += outside
    runs = partition(sizes, len(devices))
    places = {names[id(blocks[i])]: device for run, device in zip(runs, devices, strict=True) for i in run}
    elsewhere = dict.fromkeys(_beside(transformer, set(places)), devices[0])
    whole_map = {name: str(device) for name, device in (elsewhere | places).items()}
    dispatch_model(transformer, whole_map, main_device=str(devices[0]), force_hooks=True)
    held = [in_words(sum(sizes[i] for i in run)) for run in runs]
    parts = (f"{device} {len(run)} blocks, {size}" for device, run, size in zip(devices, runs, held, strict=True))
    return f"device map: {'; '.join(parts)}"


def _beside(transformer: nn.Module, blocks: set[str]) -> list[str]:
    """Return the names of the modules and tensors right under ``transformer`` that hold no block."""
    children = [name for name, _ in transformer.named_children() if not any(b.startswith(f"{name}.") for b in blocks)]
    direct = (*transformer.named_parameters(recurse=False), *transformer.named_buffers(recurse=False))
    return [*children, *(name for name, _ in direct)]
