"""The process's ``Accelerator``: all Accelerate settings are explicit and verified.

``accelerate`` reads environment variables and a machine-wide ``default_config.yaml``, and falls back to something
simpler without a word when what it finds does not fit: under torchrun on a CPU, for one, every process trains alone. So
every setting is passed, what came out is compared with it, and a difference ends the run. No ``accelerate config`` is
needed, and an existing one changes nothing.

DeepSpeed, the engine of ``zero``, is an extra (``requirements/zero.txt``) and imported only there. Left to itself it
would look for a GPU on a CPU, compile an exchange through shared memory for minutes, and split text encoders too; its
settings say none of that.

Below that, what the rest of the code asks about the layout: its mesh, and this process's place in it.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.data_loader import prepare_data_loader
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    is_wandb_available,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._triton import has_triton_package
from torch.utils.data import DataLoader

from library.config.run_schema import AccelerateConfig, LoggingConfig, ParallelConfig, SavingConfig
from library.config.schema import TrainingConfig
from library.errors import UserError


def build_accelerator(
    accelerate: AccelerateConfig,
    training: TrainingConfig,
    saving: SavingConfig,
    logging: LoggingConfig,
    parallel: ParallelConfig | None = None,
) -> Accelerator:
    """Return the process's ``Accelerator``, under python, accelerate launch or torchrun.

    It is one for a single process, DDP, or as ``parallel`` says FSDP2, HSDP or ZeRO.

    Raises:
        UserError: the environment asks for another engine, there are more or fewer processes than ``parallel`` says,
            the precision does not exist on this device, a tracker or DeepSpeed is not installed, or accelerate set up
            something other than what was asked.
    """
    parallel, world = parallel or ParallelConfig(), int(os.environ.get("WORLD_SIZE", "1"))
    replicas, timeout = parallel.replicas(world), timedelta(minutes=accelerate.ddp_timeout)
    on_cpu = not torch.cuda.is_available()
    _check_surroundings(accelerate, training.mixed_precision, world, on_cpu)
    if parallel.shard > 1 and on_cpu:
        _let_accelerate_shard_on_a_cpu(timeout)
    # torch would have it another name, which accelerate does not know
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
    steps, stage = training.gradient_accumulation_steps, parallel.zero
    accelerator = Accelerator(
        # without it torchrun on a CPU leaves every process alone; with it DeepSpeed is passed over
        cpu=on_cpu and stage is None,
        mixed_precision=training.mixed_precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=steps,
            sync_with_dataloader=False,  # where a step ends is said by MicroStep
        ),
        dataloader_config=DataLoaderConfiguration(even_batches=False, non_blocking=not on_cpu),
        project_config=ProjectConfiguration(
            saving.output_dir, logging_dir=logging.logging_dir or str(Path(saving.output_dir) / "logs")
        ),
        log_with=_trackers(logging),
        dynamo_plugin=TorchDynamoPlugin(backend="no"),  # blocks are compiled by ``training.compiling``
        step_scheduler_with_optimizer=False,
        deepspeed_plugin=_zero_plugin(stage, steps) if stage is not None else None,
        fsdp_plugin=_sharding() if parallel.shard > 1 else None,
        parallelism_config=_mesh(replicas, parallel.shard) if parallel.shard > 1 and replicas > 1 else None,
        kwargs_handlers=[
            # Casts of sharded weights are not kept: they would hold the whole model from forward to backward.
            AutocastKwargs(cache_enabled=not parallel.gathers_weights),
            InitProcessGroupKwargs(timeout=timeout, backend="gloo" if on_cpu and stage is not None else None),
            DistributedDataParallelKwargs(
                # Buffers are frozen here (CLIP's position numbers, fp8 scales). Broadcasting them in every forward
                # pass would wait for ever where processes validate different numbers of batches.
                broadcast_buffers=False,
                gradient_as_bucket_view=accelerate.ddp_gradient_as_bucket_view,
                static_graph=accelerate.ddp_static_graph,
            ),
        ],
    )
    accelerator.mesh_sizes = parallel.mesh(world)
    for variable in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        os.environ.pop(variable, None)  # accelerate has set it; a run that follows would take it for asked
    if stage is not None:
        from transformers.integrations import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # transformers, told of stage 3 by accelerate, would split text encoders too
        accelerator.native_amp = training.mixed_precision == "bf16"  # accelerate leaves this to DeepSpeed
    _verify(accelerator, training.mixed_precision, parallel)
    return accelerator


def _check_surroundings(accelerate: AccelerateConfig, mixed_precision: str, world: int, on_cpu: bool) -> None:
    """Refuse what the environment asks for beside the training file, and what this machine cannot do."""
    for engine in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"):  # of accelerate launch
        variable = f"ACCELERATE_USE_{engine}"
        if os.environ.get(variable, "false").lower() in ("1", "true"):
            raise UserError(
                f"{variable}: accelerate's configuration asks for an engine that the training file does not name; "
                "start with torchrun, or with accelerate launch --multi_gpu"
            )
    if mixed_precision == "fp16" and on_cpu:
        raise UserError('mixed_precision: fp16 needs a GPU; on a CPU use "bf16" or "no"')
    if world > 1 and not on_cpu and not torch.distributed.is_nccl_available():
        raise UserError(
            f"{world} processes: GPUs communicate through NCCL, which PyTorch for Windows does not have; "
            "start one process, or train in WSL 2"
        )
    compiles = accelerate.torch_compile is True and accelerate.dynamo_backend == "inductor" and not on_cpu
    if compiles and not has_triton_package():
        raise UserError(
            "torch_compile: needs triton, which is not installed; pip install triton, on Windows triton-windows, "
            "or remove torch_compile"
        )


def _sharding() -> FullyShardedDataParallelPlugin:
    """Return FSDP2's settings, all of them, since accelerate reads those that are missing from the environment.

    Weights are gathered in the dtype that they have. Which modules are gathered as one is said when there is a model.
    """
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[],
        ignored_modules=[],
        mixed_precision_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
        cpu_offload=False,
        state_dict_type="SHARDED_STATE_DICT",
        activation_checkpointing=False,
        activation_checkpointing_offload=False,
        cpu_ram_efficient_loading=False,
    )


def _mesh(replicas: int, shard: int) -> ParallelismConfig:
    """Return the layout of HSDP: ``replicas`` groups of ``shard`` neighbouring processes."""
    return ParallelismConfig(
        dp_replicate_size=replicas,
        dp_shard_size=shard,
        tp_size=1,
        cp_size=1,
        cp_backend="torch",
        sp_size=1,
        sp_backend="deepspeed",
    )


def _let_accelerate_shard_on_a_cpu(timeout: timedelta) -> None:
    """Keep accelerate from passing over the FSDP settings on a CPU, where it runs DDP instead without a word.

    It knows FSDP only of processes with accelerators, torch of all: the group is set up for the CPU and then called
    what accelerate calls one of GPUs.
    """
    if not PartialState._shared_state:
        PartialState(cpu=True, timeout=timeout)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def _trackers(logging: LoggingConfig) -> list[str] | None:
    """Return the trackers to start, or None.

    Raises:
        UserError: wandb is asked for and not installed.
    """
    if logging.log_with is None:
        return None
    if logging.log_with != "tensorboard" and not is_wandb_available():
        raise UserError("log_with: wandb is not installed; pip install wandb, or use tensorboard")
    return ["tensorboard", "wandb"] if logging.log_with == "all" else [logging.log_with]


def is_sharded(accelerator: Accelerator) -> bool:
    """Return whether the run's weights are split among processes, and gathered where they are used."""
    return mesh_sizes(accelerator).get("shard", 1) > 1 or zero_stage(accelerator) == 3


def zero_stage(accelerator: Accelerator) -> int:
    """Return the stage of ZeRO that DeepSpeed runs, 0 without it."""
    plugin = accelerator.state.deepspeed_plugin
    return 0 if plugin is None else plugin.zero_stage


def is_tensor_parallel(accelerator: Accelerator) -> bool:
    """Return whether processes share layers."""
    return mesh_sizes(accelerator).get("tp", 1) > 1


def mesh_sizes(accelerator: Accelerator) -> dict[str, int]:
    """Return how many processes lie along each dimension of the run's mesh, in its order."""
    return getattr(accelerator, "mesh_sizes", {"dp": accelerator.num_processes})


def is_model_parallel(accelerator: Accelerator) -> bool:
    """Return whether a forward pass takes more processes than this one."""
    return is_sharded(accelerator) or model_parallel_rank_and_size(accelerator)[1] > 1


def has_whole_model(accelerator: Accelerator) -> bool:
    """Return whether this process has all weights and all of the optimizer's state, as those of DDP have."""
    return not is_model_parallel(accelerator) and zero_stage(accelerator) == 0


def dp_rank_and_size(accelerator: Accelerator) -> tuple[int, int]:
    """Return (rank, size) among the processes that have batches of their own.

    Those that compute one batch together (along ``tp`` and ``pp``) have the same rank.
    """
    sizes = mesh_sizes(accelerator)
    count = sizes.get("dp", 1) * sizes.get("shard", 1)
    return accelerator.process_index // sizes.get("tp", 1) % count, count


def model_parallel_rank_and_size(accelerator: Accelerator) -> tuple[int, int]:
    """Return (rank, size) among the processes that compute this one's batches together."""
    tp, (_, dp_size) = mesh_sizes(accelerator).get("tp", 1), dp_rank_and_size(accelerator)
    stage, tp_rank = accelerator.process_index // (dp_size * tp), accelerator.process_index % tp
    return stage * tp + tp_rank, accelerator.num_processes // dp_size


def prepare_loader(accelerator: Accelerator, loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return ``loader``, whose sampler gives this process's batches alone, as accelerate runs it."""
    prepared = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
        even_batches=False,
        non_blocking=accelerator.non_blocking,
    )
    accelerator._dataloaders.append(prepared)
    return prepared


def device_mesh(accelerator: Accelerator) -> DeviceMesh:
    """Return the run's processes as a mesh with named dimensions; the first call is collective."""
    if not hasattr(accelerator, "device_mesh"):
        sizes = mesh_sizes(accelerator)
        mesh = init_device_mesh(accelerator.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        accelerator.device_mesh = mesh
    return accelerator.device_mesh


def _verify(accelerator: Accelerator, mixed_precision: str, parallel: ParallelConfig) -> None:
    started = int(os.environ.get("WORLD_SIZE", "1"))
    plain = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    fits, wanted = accelerator.distributed_type in plain, ""
    if parallel.shard > 1:
        fits = accelerator.is_fsdp2
        wanted = f", shard = {parallel.shard} asks for FSDP2"
    elif parallel.zero is not None:
        fits = accelerator.distributed_type == DistributedType.DEEPSPEED and zero_stage(accelerator) == parallel.zero
        wanted = f", zero = {parallel.zero} asks for DeepSpeed"
    if not fits:
        raise UserError(f"accelerate set up {accelerator.distributed_type}{wanted}; unset the ACCELERATE_* variables")
    if accelerator.num_processes != started:
        raise UserError(
            f"{started} processes were started but accelerate joined {accelerator.num_processes} of them; "
            "start with torchrun --nproc-per-node N train_lora.py ..."
        )
    if accelerator.mixed_precision != mixed_precision:
        raise UserError(f"mixed_precision: accelerate fell back to {accelerator.mixed_precision}; unset ACCELERATE_*")


def require_deepspeed() -> None:
    """Import DeepSpeed.

    Raises:
        UserError: it is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            "zero: DeepSpeed is not installed; run make setup-zero (DS_BUILD_OPS=0 pip install --no-build-isolation "
            "--no-deps -r requirements/zero.txt), or set shard, which needs nothing"
        )
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*reduce_scatter_tensor` is deprecated", category=FutureWarning)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if on_cpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not torch.distributed.is_initialized():  # an earlier run in this process has closed what DeepSpeed remembers
        deepspeed.utils.groups._release_process_group_references()
        deepspeed.comm.comm.cdb = None


def _zero_plugin(stage: int, accumulation: int) -> Any:
    """Return accelerate's plugin with all settings that do not depend on the model.

    Raises:
        UserError: DeepSpeed is not installed.
    """
    require_deepspeed()
    from accelerate import DeepSpeedPlugin

    settings = {
        "train_micro_batch_size_per_gpu": 1,  # what DeepSpeed prints; batches come from the loader
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {
            "stage": stage,
            "memory_efficient_linear": False,  # it would put another linear function into torch
            "round_robin_gradients": False,
            "sub_group_size": 10**12,  # one part for each group of the optimizer
        },
    }
    return DeepSpeedPlugin(hf_ds_config=settings, zero3_init_flag=False)


def release() -> None:
    """Give unused memory back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
