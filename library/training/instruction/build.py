"""From the configuration to a prepared run: the base with its LoRA, optimizer, schedule, batches, and the writer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch.utils.data import DataLoader

from library import __version__
from library.accelerator import (
    data_share,
    expect_many_shapes,
    is_tensor_parallel,
)
from library.config.instruction_schema import InstructionTrainConfig
from library.config.optimizer_conflicts import effective_learning_rate
from library.config.parallel_schema import ParallelConfig
from library.errors import UserError
from library.llm.instruction_batches import InstructionSampler, Windows, collate_windows
from library.models.lm_config import LMConfig
from library.models.lm_files import load_lm
from library.models.lm_projections import separate_projections
from library.models.lm_split import deal_out_heads, lm_split_plan
from library.models.transformer_lm import Block, TransformerLM
from library.precision.checkpoint_layouts import Fp8Layout
from library.precision.loading import Fp8Loading
from library.training.base_precision import describe_base, leave_frozen_out_of_ddp
from library.training.checkpoint import Position, shared_settings
from library.training.instruction.adapters import TEMPLATE
from library.training.instruction.data import InstructionData
from library.training.instruction.step import InstructionStep
from library.training.layouts import Shareable, prepare_shared
from library.training.network_plan import NetworkPlan
from library.training.optimizers import build_optimizer, describe_optimizer
from library.training.pipeline.stages import language_outline
from library.training.prepare import attached_lora, base_remark, total_steps
from library.training.recompute import recompute_blocks
from library.training.run import Run
from library.training.schedules import build_schedule
from library.training.training_facts import save_facts, without_folders
from library.training.weight_average import WeightAverage
from networks.injection import AdapterNetwork, inject_adapter
from networks.metadata import build_metadata
from networks.peft_folder import BASE_MODEL


def instruction_settings(config: InstructionTrainConfig) -> dict[str, Any]:
    """Return the settings that a state goes on with; a resumed run that changed one is refused."""
    data = config.instructions
    keys = ("chat_template", "learn", "max_length", "packing", "train_batch_size", "validation_split")
    return shared_settings(config) | {key: getattr(data, key) for key in keys}


def check_family(model_type: str, found: LMConfig) -> None:
    """Raise a UserError if the model's folder holds another family than ``model_type``."""
    if model_type != found.family:
        raise UserError(f'model_type: {model_type}, but the folder holds a {found.family}; set "{found.family}"')


def check_split(architecture: LMConfig, parallel: ParallelConfig) -> None:
    """Raise a UserError if ``tp`` processes cannot have the model together."""
    if parallel.is_tensor_parallel:
        lm_split_plan(architecture, parallel.tp, separate=True)


@dataclass(frozen=True)
class Base:
    """The model with its LoRA, not yet wrapped.

    Attributes:
        model, network: the language model and the LoRA in it.
        fingerprint, precision: of the frozen weights.
    """

    model: TransformerLM
    network: AdapterNetwork
    fingerprint: str
    precision: str


def prepare_base(
    config: InstructionTrainConfig,
    plan: NetworkPlan,
    fp8: Fp8Loading,
    layout: Fp8Layout | None,
    fingerprint: str,
    dtype: torch.dtype,
    device: torch.device,
    console: Console,
) -> Base:
    """Load the model, put the LoRA in, set the memory policy.

    ``fingerprint`` is its weights', as ``weights_fingerprint`` gives it.

    Raises:
        UserError: see ``load_lm``, ``inject_adapter`` and ``load_file`` of its network.
    """
    network, lora_dtype = config.network, torch.bfloat16 if config.training.full_bf16 else torch.float32
    folder = Path(config.model.pretrained_model_name_or_path).expanduser()
    model = load_lm(folder, dtype, device, fp8=fp8)
    separate_projections(model)
    fp8.serve(model)
    precision = describe_base(layout, fp8, dtype)
    if layout is not None or fp8.recipe is not None:
        console.print(f"base: {precision}")
    lora: AdapterNetwork
    if network.dim_from_weights:
        lora = attached_lora(model, network, plan, lora_dtype, console)
    else:
        lora = inject_adapter(model, plan.options, plan.targets, config.training.seed, lora_dtype)
    console.print(lora.describe())
    if remark := base_remark(network.network_weights, fingerprint):
        console.print(remark)
    if network.network_weights and not network.dim_from_weights:
        console.print(lora.load_file(network.network_weights, network.allow_partial))
    recompute_blocks(model, model.config.layers, config.training, device)
    leave_frozen_out_of_ddp(model)
    return Base(model, lora, fingerprint, precision)


def prepare_instruction_run(
    config: InstructionTrainConfig, plan: NetworkPlan, base: Base, data: InstructionData, accelerator: Accelerator
) -> Run:
    """Build optimizer, schedule and batches, and let accelerate wrap and compile the model."""
    training, lora, (_, world) = config.training, base.network, data_share(accelerator)
    optimizer = build_optimizer(config.optimizer, plan.parameter_groups(lora), training.full_bf16, training.seed)
    accumulation = training.gradient_accumulation_steps
    size = config.instructions.train_batch_size
    batches = InstructionSampler(data.windows, size, training.seed, world, accumulation)
    on_gpu = accelerator.device.type == "cuda"
    loader: DataLoader[Any] = DataLoader(
        Windows(data.windows), batch_sampler=batches, collate_fn=collate_windows, pin_memory=on_gpu
    )
    steps = total_steps(training, batches.batches_per_epoch() // world)
    lr_schedule = build_schedule(config.optimizer, optimizer, steps)
    shareable = Shareable(
        base.model,
        lora,
        lambda: language_outline(base.model),
        [Block.__name__],
        lambda processes: lm_split_plan(base.model.config, processes, separate=True),
        ["next_logits"],  # what samples are made with
    )
    shared = prepare_shared(accelerator, config.parallel, shareable, config.optimizer.max_grad_norm, optimizer, loader)
    if shared is not None:
        model, optimizer, loader, pipeline = shared
        if is_tensor_parallel(accelerator):
            deal_out_heads(base.model, config.parallel.tp)
    else:
        pipeline = None
        expect_many_shapes(accelerator)  # a batch is as long as its longest window
        model, optimizer, loader = accelerator.prepare(base.model, optimizer, loader)
    return Run(
        accelerator=accelerator,
        step=InstructionStep(training.seed, accumulation * world),
        transformer=base.model,
        model=model,
        network=lora,
        optimizer=optimizer,
        lr_schedule=lr_schedule,
        loader=loader,
        batches=batches,
        total_steps=steps,
        max_grad_norm=config.optimizer.max_grad_norm,
        base_fingerprint=base.fingerprint,
        average=WeightAverage(lora.parameters(), decay) if (decay := config.saving.ema_decay) else None,
        settings=instruction_settings(config),
        pipeline=pipeline,
    )


def adapter_writer(
    config: InstructionTrainConfig, run: Run, base_precision: str, template: str, begun: float
) -> Callable[[Path, Position], None]:
    """Return a function that writes the network's present weights as a folder of PEFT's.

    Args:
        config: goes into the metadata, whole and in kohya's ``ss_*`` keys.
        run: whose network's weights are written.
        base_precision: of the base's weights as trained on, in words.
        template: the name of the chat template.
        begun: when training began, seconds since 1970.
    """
    saving, network, optimizer, targets = config.saving, config.network, config.optimizer, run.network.targets
    precision = saving.save_precision or ("bf16" if config.training.full_bf16 else "fp32")
    base = Path(config.model.pretrained_model_name_or_path)
    facts: dict[str, object] = {
        "network_module": targets.kohya_module,
        "base_model_version": targets.kohya_base,
        "network_dim": "Dynamic" if network.dim_from_weights else network.network_dim,
        "network_alpha": "Dynamic" if network.dim_from_weights else network.network_alpha,
        "learning_rate": effective_learning_rate(optimizer),
        "optimizer": describe_optimizer(optimizer),
        "lr_scheduler": optimizer.lr_scheduler,
        "gradient_accumulation_steps": config.training.gradient_accumulation_steps,
        "mixed_precision": config.training.mixed_precision,
        "seed": config.training.seed,
        "max_train_steps": run.total_steps,
        "training_started_at": begun,
        "training_comment": saving.training_comment,
    }
    own = {
        BASE_MODEL: base.name if base.is_absolute() or str(base).startswith("~") else str(base),
        TEMPLATE: template,
    }
    config_json = json.dumps(without_folders(config.model_dump(exclude_none=True)))

    def write(path: Path, position: Position) -> None:
        now = time.time()
        metadata = build_metadata(
            facts | save_facts(position, run.total_steps, now),
            title=saving.output_name,
            timestamp=now,
            architecture=targets.architecture,
            implementation=targets.implementation,
            resolution=None,
            description=saving.training_comment,
            base_fingerprint=run.base_fingerprint,
            base_precision=base_precision,
            config_json=config_json,
            version=__version__,
        )
        run.network.save(path, "peft", precision, own | metadata)

    return write
