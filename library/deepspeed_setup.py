"""DeepSpeed as the engine under accelerate: what has to be said before its first import, and its settings.

It is an extra (``requirements-zero.txt``) and imported only where ``zero`` is set. On a CPU it would look for a GPU
and compile an exchange through shared memory for minutes; here it does neither.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from typing import Any

import torch

from library.errors import UserError


def require_deepspeed() -> None:
    """Import DeepSpeed.

    Raises:
        UserError: it is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError(
            "zero: DeepSpeed is not installed; run make setup-zero (DS_BUILD_OPS=0 pip install --no-build-isolation "
            "--no-deps -r requirements-zero.txt), or set shard, which needs nothing"
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


def zero_plugin(stage: int, accumulation: int) -> Any:
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


def hide_from_transformers() -> None:
    """Let transformers load models whole: accelerate tells it of stage 3, and it would split text encoders, too."""
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
