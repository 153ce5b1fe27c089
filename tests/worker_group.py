"""Several processes that do jobs one after the other, forked from one that has imported everything already.

Starting a process and importing torch, diffusers and accelerate takes longer than a short training; a launcher would
do it for every process of every run.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState

from library.errors import UserError
from tests.curves import without_curves
from tests.forked import begin_as_started_by_python, fork_server
from tests.processes import LIMIT, free_ports

Job = tuple[str, Callable[..., object], tuple]  # name, what to call, its arguments


def run_in_group(jobs: Sequence[Job], folder: Path, processes: int = 2) -> dict[str, str]:
    """Let every process do ``jobs``; return for each what a UserError said on process 0, or "" if it was done.

    Raises:
        AssertionError: a process had not done them after ``LIMIT`` seconds.
    """
    # On a shared one a process that is early would still find the store of the job before, and the keys in it, and
    # take them for those of its own job.
    ports = free_ports(len(jobs))
    fork_server()
    arguments = (ports, processes, list(jobs), folder)
    group = torch.multiprocessing.start_processes(
        _work, arguments, nprocs=processes, join=False, start_method="forkserver"
    )
    begun = time.monotonic()
    while not group.join(timeout=5):
        if time.monotonic() - begun > LIMIT:
            for process in group.processes:
                process.kill()
            raise AssertionError(f"{[name for name, _, _ in jobs]}: not done after {LIMIT} s")
    return {name: (folder / f"{name}.said").read_text() for name, _, _ in jobs}


def _work(rank: int, ports: list[int], processes: int, jobs: list[Job], folder: Path) -> None:
    begin_as_started_by_python()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    try:
        for port, (name, call, arguments) in zip(ports, jobs, strict=True):
            os.environ["MASTER_PORT"] = str(port)
            AcceleratorState._reset_state(reset_partial_state=True)
            said = ""
            try:
                with without_curves():
                    call(*arguments)
            except UserError as error:
                said = str(error)
            except BaseException:
                traceback.print_exc()
                raise
            if rank == 0:
                (folder / f"{name}.said").write_text(said)
        _wait_for_others(rank, [folder / f"{ports[0]}-{i}.done" for i in range(processes)])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _wait_for_others(rank: int, done: list[Path]) -> None:
    """Stay until all have done their jobs: a UserError meets no barrier, and process 0 has the store of all."""
    done[rank].touch()
    begun = time.monotonic()
    while not all(path.exists() for path in done) and time.monotonic() - begun < LIMIT:
        time.sleep(0.02)
