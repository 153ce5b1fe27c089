"""The run's metrics: gathered over steps (``StepMetrics``), written to ``metrics.jsonl`` and to the trackers.

One flat JSON object a line, in order of steps; every plot and report reads this file. docs/metrics.md lists the keys
with their units. Of several processes a training line also has each one's own speed and memory, ``s_per_it/<rank>`` and
so on: a slow one holds up all. ``metrics_file`` reads the file back.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from pydantic import BaseModel
from torch import Tensor

from library import __version__
from library.checksums import checksum
from library.config.run_schema import LoggingConfig
from library.errors import UserError, counted, reason_of
from library.files import atomic_path, toml_text, write_text
from library.training.checkpoint.state import Position
from library.training.report.metrics_file import parse_line

_EMA = 0.95  # weight of the past in loss_ema: a memory of about twenty steps


class MetricsStream:
    """Appends to ``metrics.jsonl`` on the main process and passes the same values to accelerate's trackers."""

    def __init__(self, path: Path, accelerator: Accelerator, logging: LoggingConfig, resume_step: int) -> None:
        """Open the stream; what a resumed run is going to write again is cut off, a new run starts a new file.

        Raises:
            UserError: a tracker cannot be started.
        """
        self._accelerator = accelerator
        self._path = path
        self._waiting, self._warned, self._tracker_warned = b"", False, False
        # keys of the lines that an interrupted run wrote of the step it is resumed at
        self._written_before: set[frozenset[str]] = set()
        if logging.log_with:
            run = {"wandb": {"name": logging.wandb_run_name}} if logging.wandb_run_name else {}
            try:
                accelerator.init_trackers(logging.log_tracker_name, init_kwargs=run)
            except Exception as error:  # of packages that raise what they like: no network, no rights, no account
                reason = reason_of(error)
                raise UserError(f"log_with: {logging.log_with} cannot be started ({reason}); correct it, or remove "
                                "log_with") from error  # fmt: skip
        if accelerator.is_main_process:
            written = path.read_bytes() if resume_step and path.exists() else b""
            lines, torn = written.split(b"\n"), written.rpartition(b"\n")[2]  # what a killed process was writing
            steps = {line: record["step"] for line in lines if (record := parse_line(line))}
            damaged = sum(line not in steps and line not in (b"", torn if torn[:1] == b"{" else b"") for line in lines)
            if damaged:
                kept = path.with_name(f"metrics.damaged-{checksum(path)}.jsonl")
                with atomic_path(kept) as copy:
                    shutil.copyfile(path, copy)
                count = counted(damaged, "line")
                print(
                    f"warning: {path}: {count} cannot be read and left out; the file as it was is kept as {kept.name}",
                    file=sys.stderr,
                )
            remaining = [line for line in lines if steps.get(line, math.inf) <= resume_step]
            with atomic_path(path) as file:
                file.write_bytes(b"".join(line + b"\n" for line in remaining))
            self._written_before = {frozenset(json.loads(line)) for line in remaining if steps[line] == resume_step}
        self._resume_step = resume_step

    def write(self, values: dict[str, float]) -> None:
        """Write one line; ``values`` holds ``step``."""
        again = values["step"] == self._resume_step and frozenset(values) in self._written_before
        if self._accelerator.is_main_process and not again:
            self._waiting += (json.dumps(values) + "\n").encode()
            self._append()
        log, numbers = self._accelerator.log, {k: v for k, v in values.items() if k != "step"}
        self._call_trackers(lambda: log(numbers, step=int(values["step"])))

    def _call_trackers(self, call: Callable[[], None]) -> None:
        """Trackers write a copy: one that fails is no reason to end a run."""
        try:
            call()
        except Exception as error:
            if not self._tracker_warned:
                reason = reason_of(error)
                print(f"warning: log_with: a tracker failed ({type(error).__name__}: {reason}); the run goes on, and "
                      f"{self._path} has everything", file=sys.stderr)  # fmt: skip
            self._tracker_warned = True

    def _append(self) -> None:
        """Write what waits, full lines or nothing; a full disk gets another chance with the next line."""
        begin = None
        try:
            with open(self._path, "ab", buffering=0) as file:
                begin = file.tell()
                written = file.write(self._waiting)
                if written < len(self._waiting):
                    raise OSError(errno.ENOSPC, "the disk is full")
            self._waiting = b""
        except OSError as error:
            with suppress(OSError):
                if begin is not None:
                    os.truncate(self._path, begin)
            if not self._warned:
                print(f"warning: {self._path}: cannot be written ({error.strerror}); trying again", file=sys.stderr)
            self._warned = True

    def close(self) -> None:
        """Write what waits, and let the trackers do so."""
        if self._waiting:
            self._append()
        self._call_trackers(self._accelerator.end_training)


class StepMetrics:
    """Gathers the metrics of steps on the device; reads them back only for a logged step."""

    def __init__(
        self, accelerator: Accelerator, position: Position, names: Sequence[str | None], throughput: tuple[str, int]
    ) -> None:
        """Begin with nothing.

        Args:
            accelerator: of the run.
            position: of the run; its ``loss_ema`` is kept up to date.
            names: of the columns that a task's loss returns; None for one that is no metric.
            throughput: the metric of speed, and how many of its units a sample counts.
        """
        self._accelerator, self._position, self._names, self._throughput = accelerator, position, names, throughput
        self.columns = len(names)
        self.ema: Tensor | None = None
        self._ema_before: Tensor | None = None  # before the last step
        self._losses: list[Tensor] = []
        self._totals: list[Tensor] = []
        self._steps, self._samples, self._all_samples, self._waited, self._busy = 0, 0, 0, 0.0, 0.0
        self._loss = self._grad_norm = torch.zeros(())
        self._clock = time.perf_counter()

    def add(self, loss: Tensor, metrics: Tensor, waited: float, samples: int, of_all: int) -> None:
        """Take in one batch: its weighted loss, its metrics' totals, its samples, and those of all processes."""
        self._samples += samples
        self._all_samples += of_all
        self._losses.append(loss)
        # a batch that another process has counted counts nothing here
        self._totals.append(metrics if samples else torch.zeros_like(metrics))
        self._waited += waited

    def end_step(self, grad_norm: Tensor) -> None:
        """Take in the end of an optimizer step."""
        accumulated = self._accelerator.gradient_accumulation_steps  # by weight, if not by number
        self._loss, self._grad_norm = torch.stack(self._losses).sum() / accumulated, grad_norm
        past = self.ema
        if past is None:  # the first step; of a resumed run the average of before, rounded as that was
            resumed = torch.tensor(self._position.loss_ema, device=self._loss.device)
            past = self._loss if self._position.step == 1 else resumed
        self._ema_before, self.ema = self.ema, _EMA * past + (1 - _EMA) * self._loss
        self._losses = []
        self._steps += 1

    def forget_step(self) -> None:
        """Forget the last step; what was added up since the last line has what was not finite in it."""
        self.ema, self._losses, self._totals = self._ema_before, [], []

    def forget_batches(self) -> None:
        """Forget the batches of a step that is not going to end."""
        self._losses = []

    def start_clock(self) -> None:
        """Begin to count the time of steps; that of saving, sampling and validating before is left out of s/it."""
        self._clock = time.perf_counter()

    def stop_clock(self) -> None:
        """Count the seconds since the clock was started; where the host waits, it has done so."""
        self._busy += time.perf_counter() - self._clock

    def read_average(self) -> None:
        """Let ``position`` have the average loss, over processes."""
        assert self.ema is not None
        self._position.loss_ema = float(self._accelerator.reduce(self.ema, reduction="mean"))

    def read(self) -> dict[str, float]:
        """Return the metrics since the last call, averaged over processes or over all their samples."""
        ema = self.ema if self.ema is not None else self._loss
        on_device = torch.stack([self._loss, ema, torch.as_tensor(self._grad_norm, device=ema.device)])
        on_device = torch.cat([on_device, torch.stack(self._totals).sum(dim=0).flatten()])
        loss, ema_value, grad_norm, *totals = self._accelerator.reduce(on_device, reduction="mean").tolist()
        sums, counts = totals[: len(totals) // 2], totals[len(totals) // 2 :]
        self._position.loss_ema = ema_value
        values = {"loss": loss, "loss_ema": ema_value, "grad_norm": grad_norm}
        for name, total, count in zip(self._names, sums, counts, strict=True):
            if name is not None and count:
                values[name] = total / count
        throughput, units = self._throughput
        speed = {
            throughput: self._samples * units / self._busy,
            "s_per_it": self._busy / self._steps,
            "data_wait_s": self._waited / self._steps,
        }
        each = of_each_process(self._accelerator, speed | {"peak_mem_bytes": peak_memory_bytes()})
        speed[throughput] = self._all_samples * units / self._busy
        self._totals, self._steps, self._samples, self._all_samples = [], 0, 0, 0
        self._waited = self._busy = 0.0
        return values | speed | each


def write_config(folder: Path, config: BaseModel, accelerator: Accelerator) -> None:
    """Write the configuration beside what it makes, as TOML that runs again (main process only)."""
    if accelerator.is_main_process:
        sections = config.model_dump(exclude_unset=True, exclude_none=True)
        text = toml_text({name: keys for name, keys in sections.items() if keys})
        write_text(folder / "config.toml", f"# Tandem {__version__}: the settings of this run\n\n{text}")


def of_each_process(accelerator: Accelerator, values: Mapping[str, float]) -> dict[str, float]:
    """Return ``values`` of every process as ``<key>/<rank>``; nothing if there is but one. All have to come by."""
    if accelerator.num_processes == 1:
        return {}
    local = torch.tensor([list(values.values())], dtype=torch.float64, device=accelerator.device)
    everyone = accelerator.gather(local).tolist()
    return {f"{key}/{rank}": row[i] for i, key in enumerate(values) for rank, row in enumerate(everyone)}


def totals(values: Tensor) -> Tensor:
    """Return the columns' sums and what they are over, [2, columns] fp32, of ``values`` [n] or [n, columns].

    NaN does not count. Totals of batches and of processes can be added up, where means cannot.
    """
    table = values.detach().float().view(len(values), -1)
    return torch.stack([table.nansum(dim=0), (~table.isnan()).sum(dim=0)])


def peak_memory_bytes() -> int:
    """Return the peak memory so far: the device's allocator on CUDA, the process's resident set on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
