"""accelerate, set up in code, and checked afterwards.

``accelerate`` reads environment variables and a machine-wide ``default_config.yaml``, and falls back to
something simpler without a word when what it finds does not fit: under torchrun on a CPU, for one, every
process trains alone. So everything is passed explicitly, and what came out is compared with what was asked;
a difference ends the run. No ``accelerate config`` is needed, and an existing one changes nothing.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)

from library.errors import UserError

if TYPE_CHECKING:
    from library.config.schema import AccelerateConfig, LoggingConfig, SavingConfig, TrainingConfig

# Engines that ``accelerate launch`` switches on through the environment. Tandem sets up its own.
_FOREIGN_ENGINES = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM")


def build_accelerator(
    accelerate: AccelerateConfig, training: TrainingConfig, saving: SavingConfig, logging: LoggingConfig
) -> Accelerator:
    """Return the process's ``Accelerator`` for a single process or DDP, under python, accelerate launch or torchrun.

    Raises:
        UserError: the environment asks for another engine, the precision does not exist on this device, a tracker
            is not installed, or accelerate set up something other than what was asked.
    """
    on_cpu = not torch.cuda.is_available()
    _refuse_foreign_engines()
    if training.mixed_precision == "fp16" and on_cpu:
        raise UserError('mixed_precision: fp16 needs a GPU; on a CPU use "bf16" or "no"')
    accelerator = Accelerator(
        cpu=on_cpu,  # without it torchrun on a CPU leaves every process alone
        mixed_precision=training.mixed_precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=training.gradient_accumulation_steps,
            sync_with_dataloader=False,  # an optimizer step may span two epochs
        ),
        dataloader_config=DataLoaderConfiguration(even_batches=False, non_blocking=not on_cpu),
        project_config=_project(saving, logging),
        log_with=_trackers(logging),
        dynamo_plugin=_dynamo(accelerate),
        step_scheduler_with_optimizer=False,
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(minutes=accelerate.ddp_timeout)),
            DistributedDataParallelKwargs(
                # Buffers are frozen here (CLIP's position numbers, fp8 scales). Broadcasting them in every forward
                # pass would wait for ever where processes validate different numbers of batches.
                broadcast_buffers=False,
                gradient_as_bucket_view=accelerate.ddp_gradient_as_bucket_view,
                static_graph=accelerate.ddp_static_graph,
            ),
        ],
    )
    _compare_with_what_was_asked(accelerator, training.mixed_precision)
    return accelerator


def _refuse_foreign_engines() -> None:
    for variable in _FOREIGN_ENGINES:
        if os.environ.get(variable, "false").lower() in ("1", "true"):
            raise UserError(
                f"{variable}: accelerate's configuration asks for an engine that the training file does not name; "
                "start with torchrun, or with accelerate launch --multi_gpu"
            )


def _project(saving: SavingConfig, logging: LoggingConfig) -> ProjectConfiguration:
    return ProjectConfiguration(
        project_dir=saving.output_dir,
        logging_dir=logging.logging_dir or str(Path(saving.output_dir) / "logs"),
    )


def _trackers(logging: LoggingConfig) -> list[str] | None:
    """Return the trackers to start, or None.

    Raises:
        UserError: wandb is asked for and not installed.
    """
    wanted = {"tensorboard": ["tensorboard"], "wandb": ["wandb"], "all": ["tensorboard", "wandb"]}
    names = wanted[logging.log_with] if logging.log_with else None
    if names and "wandb" in names:
        from accelerate.utils import is_wandb_available

        if not is_wandb_available():
            raise UserError("log_with: wandb is not installed; pip install wandb, or use tensorboard")
    return names


def _dynamo(accelerate: AccelerateConfig) -> TorchDynamoPlugin:
    """Return the compilation plugin; blocks are compiled once each kind (regional), not the whole model."""
    if not accelerate.torch_compile:
        return TorchDynamoPlugin(backend="no")
    return TorchDynamoPlugin(
        backend=accelerate.dynamo_backend,
        mode=accelerate.dynamo_mode,
        use_regional_compilation=True,
    )


def _compare_with_what_was_asked(accelerator: Accelerator, mixed_precision: str) -> None:
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    plain = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    if accelerator.distributed_type not in plain:
        raise UserError(f"accelerate set up {accelerator.distributed_type}; unset the ACCELERATE_* variables")
    if accelerator.num_processes != asked:
        raise UserError(f"{asked} processes were started but accelerate joined {accelerator.num_processes} of them; "
                        "start with torchrun --nproc-per-node N train_lora.py ...")  # fmt: skip
    if accelerator.mixed_precision != mixed_precision:
        raise UserError(f"mixed_precision: accelerate fell back to {accelerator.mixed_precision}; unset ACCELERATE_*")
