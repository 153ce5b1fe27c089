"""Several processes that do jobs one after the other, forked from one that has imported everything already.

Starting a process and importing torch, diffusers and accelerate takes longer than a short training; a launcher would
do it for every process of every run.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

from library.errors import UserError

Job = tuple[str, Callable[..., object], tuple]  # name, what to call, its arguments


def run_in_group(jobs: Sequence[Job], folder: Path, processes: int = 2) -> dict[str, str]:
    """Let every process do ``jobs``; return for each what a UserError said on process 0, or "" if it was done."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "train_lora", "train_llm"])
    arguments = (port, processes, list(jobs), folder)
    torch.multiprocessing.start_processes(_work, arguments, nprocs=processes, start_method="forkserver")
    return {name: (folder / f"{name}.said").read_text() for name, _, _ in jobs}


def _work(rank: int, port: int, processes: int, jobs: list[Job], folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    try:
        for name, call, arguments in jobs:
            AcceleratorState._reset_state(reset_partial_state=True)
            said = ""
            try:
                call(*arguments)
            except UserError as error:
                said = str(error)
            except BaseException:
                traceback.print_exc()
                raise
            if rank == 0:
                (folder / f"{name}.said").write_text(said)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
