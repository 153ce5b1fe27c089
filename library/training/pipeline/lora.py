"""A LoRA in a frozen model that is cut into stages.

The LoRA stays whole on every process, as with ``shard``: it is small, so any optimizer can train it, norms and averages
are those of the whole, and files and states are written and read as ever. A stage computes the gradients of its own
layers; ``library.training.sharding.share_gradients`` adds them up over the stages, and so completes those of layers
that several stages use (embedders, conditioning).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator
from torch import nn

from library.accelerator import prepare_loader
from library.config.parallel_schema import ParallelConfig
from library.training.pipeline.schedule import Pipeline
from library.training.pipeline.stages import Outline, cut, let_go
from library.training.pipeline.wires import open_wires, speak_for_all
from networks.injection import AdapterNetwork


def prepare_stage(
    accelerator: Accelerator,
    parallel: ParallelConfig,
    model: nn.Module,
    outline: Outline,
    network: AdapterNetwork,
    methods: Sequence[str],
    optimizer: Any,
    loader: Any,
) -> tuple[Pipeline, nn.Module, Any, Any]:
    """Leave ``model`` with this process's stage, on its device; return the pipeline, and what accelerate has prepared.

    Args:
        accelerator, parallel: of the run.
        model: whole, in host memory, with its LoRA.
        outline: where it can be cut.
        network: the LoRA.
        methods: of the model, that then give every stage what the last one has computed.
        optimizer, loader: of the run.

    Raises:
        UserError: there are fewer blocks than stages, or the processes have read different models.
    """
    wires = open_wires(accelerator)
    cut(model, outline, wires, parallel.stage_balance)
    held = set(model.modules())
    for layer in network.modules.values():
        if layer not in held:
            let_go(layer.base)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(accelerator.device)
    model.to(accelerator.device)
    prepared = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)  # no DDP around a stage
    speak_for_all(model, wires, methods)
    steps = accelerator.gradient_accumulation_steps
    pipeline = Pipeline(prepared, wires, parallel.pieces, parallel.schedule, steps)
    return pipeline, prepared, accelerator.prepare_optimizer(optimizer), prepare_loader(accelerator, loader)
