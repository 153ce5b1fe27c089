"""A LoRA in a frozen model that is cut into stages.

The LoRA stays whole on every process, as with ``shard``: it is small, so any optimizer can train it, norms and averages
are those of the whole, and files and states are written and read as ever. A stage computes the gradients of its own
layers; ``library.training.sharding.share_gradients`` adds them up over the stages, and so completes those of layers
that several stages use (embedders, conditioning).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from torch import nn

from library.accelerator import device_mesh, prepare_loader
from library.config.parallel_schema import ParallelConfig
from library.errors import UserError
from library.nn.tensor_split import Parts
from library.training.pipeline.schedule import Pipeline
from library.training.pipeline.stages import Outline, cut, let_go
from library.training.pipeline.wires import open_wires, speak_for_all
from library.training.tensor_parallel import split_layers
from networks.injection import AdapterNetwork


def check_pieces(parallel: ParallelConfig, largest_batch: int) -> None:
    """Raise a UserError if ``microbatches`` was set to more than the samples of the largest batch."""
    if parallel.is_pipelined and (parallel.microbatches or 1) > largest_batch:
        raise UserError(
            f"microbatches: {parallel.microbatches}, but the dataset's batches have at most {largest_batch} images; "
            f"set batch_size = {parallel.microbatches} there, or lower microbatches"
        )


def prepare_stage(
    accelerator: Accelerator,
    parallel: ParallelConfig,
    model: nn.Module,
    outline: Outline,
    network: AdapterNetwork,
    methods: Sequence[str],
    optimizer: Any,
    loader: Any,
    plan: Mapping[str, Parts] | None = None,
) -> tuple[Pipeline, nn.Module, Any, Any]:
    """Leave ``model`` with this process's stage, on its device; return the pipeline, and what accelerate has prepared.

    Args:
        accelerator, parallel: of the run.
        model: whole, in host memory, with its LoRA.
        outline: where it can be cut.
        network: the LoRA.
        methods: of the model, that then give every stage what the last one has computed.
        optimizer, loader: of the run.
        plan: layer -> how several processes have it together (``tp``), of the whole model.

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
    if plan:
        here = {name for name, _ in model.named_modules()}
        own = {name: parts for name, parts in plan.items() if name in here}
        split_layers(model, own, device_mesh(accelerator)["tp"])
    model.to(accelerator.device)
    prepared = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)  # no DDP around a stage
    speak_for_all(model, wires, methods)
    steps = accelerator.gradient_accumulation_steps
    pipeline = Pipeline(prepared, wires, parallel.pieces, parallel.schedule, steps)
    return pipeline, prepared, accelerator.prepare_optimizer(optimizer), prepare_loader(accelerator, loader)
