"""What is trained: one object for each kind of training, which ``library.training.trainer`` takes to its end.

A ``Task`` is made from a configuration: that looks at what can be refused at once, starts accelerate and finds the
state to resume. ``open`` looks at the model's files. ``prepare`` loads data and model and lets the engine wrap them;
from then on the attributes below are there. Then the trainer asks for losses, and between steps to validate, to sample
and to save. What all kinds have in common is here; ``LoraTask`` is what a LoRA on any model has.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from library.accelerator import build_accelerator, dp_rank_and_size
from library.config.markers import resume_keys
from library.console import Console
from library.data.batches import MicroStep
from library.folder_lock import FolderLock
from library.nn.modes import evaluating
from library.processes import agreed, from_all_processes
from library.training.checkpoint.output_folder import refuse_to_overwrite, try_writing
from library.training.checkpoint.state import (
    AUTO,
    OutputNames,
    Position,
    Stateful,
    begun_position,
    check_whole,
    read_position,
    refuse_finished,
    resolve_resume,
)
from library.training.optim.ema import WeightAverage
from library.training.optim.factory import averaged_weights
from library.training.parallel.parallelize import ParallelSpec
from library.training.parallel.pipeline import Pipeline
from library.training.parallel.step import clip_gradients, lockstep_batches, no_sync
from library.training.report.metrics import totals


class Batches(Protocol):
    """What orders the batches of an epoch, such as ``library.data.batches.EpochBatchSampler``."""

    def set_position(self, epoch: int, first_batch: int = 0) -> None: ...

    def batches_per_epoch(self) -> int: ...

    def micro_steps(self) -> Iterator[MicroStep]: ...


class Sampler(Protocol):
    """What shows how the model does: ``library.training.sampling.images.Sampler`` makes images, others write text."""

    @property
    def sampled(self) -> dict[int, list[Path]]: ...  # by step

    def sample(self, transformer: nn.Module, step: int, is_stopping: Callable[[], bool] | None) -> list[Path]: ...

    def recall(self, last_step: int) -> None: ...

    def write_sheets(self) -> list[Path]: ...


class Task(ABC):
    """One kind of training, and one run of it.

    Attributes:
        asked, config: the settings as given, and with what a resume and a dry run made of them.
        metric: what the metrics call the mean of the second value of :meth:`loss`, or of its first column.
        more_metrics: likewise the means of its further columns.
        throughput: the metric of speed, and how many of its units a sample counts.
        transformer: the network itself, out of any wrapper.
        models: what the engine runs forward and backward; the first is ``transformer``.
        loader, batches: of training batches, and what orders them.
        settings: that a state must have been trained with.
        sampler: None where nothing is sampled. end_sampler: of what is sampled at the end alone.
        best_prior_weight: of ``val_prior_loss`` beside the validation loss, where the best weights are looked for.
        summary: rows for the table at the end of the run.
    """

    metric: ClassVar[str | None] = None
    more_metrics: ClassVar[Sequence[str]] = ()
    throughput: tuple[str, int] = ("samples_per_s", 1)
    verifies: ClassVar[bool] = True  # what was saved last
    suffix: ClassVar[str] = ""  # of what is saved, a folder without one
    trained: ClassVar[str] = "LoRA"  # what is, in words

    transformer: nn.Module
    models: list[nn.Module]
    optimizer: Any
    lr_schedule: torch.optim.lr_scheduler.LRScheduler
    loader: Any
    batches: Batches
    total_steps: int
    total_epochs: int  # the last may be incomplete
    settings: Mapping[str, Any]
    pipeline: Pipeline | None = None
    average: WeightAverage | None = None
    sampler: Sampler | None = None
    end_sampler: Sampler | None = None
    best_prior_weight: float = 0.0
    validates: bool = False
    validates_first: bool = True  # before the first step
    samples_first: bool  # likewise
    base_fingerprint: str = ""

    def __init__(self, config: Any) -> None:
        self.begun = time.time()
        self.asked = config
        self.check(config)
        if (resume := config.training.resume) and resume != AUTO:
            read_position(resume, resume_keys(config))
        self.accelerator = self.build_accelerator(config)
        self.console = Console(quiet=not self.accelerator.is_main_process, markup=False, highlight=False)
        self.resumes_finished = resume == AUTO  # a finished run too, whose end may be yet to come
        self.config = config
        self.seed: int = config.training.seed
        self.on_nan: Literal["stop", "skip"] = config.training.on_nan
        self.on_nan_limit: int = config.training.on_nan_limit
        self.names = OutputNames(Path(config.saving.output_dir), config.saving.output_name, self.suffix)
        self.summary: dict[str, str] = {}
        self.samples_first = self.config.sampling.sample_at_first

    @abstractmethod
    def check(self, config: Any) -> None:
        """Refuse what can be refused before anything is loaded."""

    @contextmanager
    def own_folder(self) -> Iterator[None]:
        """Inside the block the output folder is this run's alone; ``config`` has the state that it goes on from.

        Raises:
            UserError: on every process: another run has the folder, it cannot be written to, holds another result, or
                only damaged states.
        """
        config = self.config
        resumed: str | None = None
        say = partial(self.console.print, soft_wrap=True)
        lock = FolderLock(self.names.folder, self.names.name, say)
        try:
            with agreed("looking at the output folder"):
                if self.accelerator.is_main_process:
                    lock.acquire()
                    resumed = resolve_resume(config.training.resume, config.saving, say)
                    self._check_output(resumed is not None)
            resumed, *_ = from_all_processes(resumed)
            training = config.training.model_copy(update={"resume": resumed})
            self.config = config.model_copy(update={"training": training})
            yield
        finally:
            lock.release()

    def _check_output(self, resumed: bool) -> None:
        saving, logging = self.config.saving, self.config.logging
        if not (resumed or saving.overwrite):
            refuse_to_overwrite(self.names.weights(self.names.stem()), self.asked)
        try_writing(self.names.folder, self.names, 0)
        if logging.log_with:
            try_writing(Path(self.accelerator.logging_dir), self.names, 0, "logging_dir")

    def check_room(self) -> None:
        """Refuse a disk without room for one save of what is trained (on the main process).

        Raises:
            UserError: with the sizes.
        """
        saving, parameters = self.config.saving, self.parameters()
        short = saving.save_precision not in (None, "fp32")
        nbytes = sum(p.numel() * (2 if short else p.dtype.itemsize) for p in parameters)
        if saving.save_state:
            nbytes += sum(p.numel() * p.dtype.itemsize for p in parameters)  # and what the optimizer is going to keep
        if self.accelerator.is_main_process:
            try_writing(self.names.folder, self.names, nbytes)

    def build_accelerator(self, config: Any) -> Accelerator:
        return build_accelerator(config.accelerate, config.training, config.saving, config.logging, config.parallel)

    def loaded_to(self) -> torch.device:
        """Where the model is read to: host memory, where processes get parts of it, as all of it need not fit."""
        return torch.device("cpu") if self.config.parallel.splits_model else self.accelerator.device

    @abstractmethod
    def open(self) -> None:
        """Look at the model's files, prompts and state: what is wrong there is reported before anything is encoded."""

    @abstractmethod
    def prepare(self) -> None:
        """Load data and model, and let the engine wrap them."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch's loss [] with gradient, and what the metrics are means of.

        That is a row a sample (or one for the batch), with a column for ``metric`` and each of ``more_metrics``; NaN
        does not count.
        """

    def forward_backward(
        self, batch: Any, step: int, checked: Callable[[Tensor], Tensor] = lambda loss: loss
    ) -> tuple[Tensor, Tensor]:
        """Add a batch's gradients to those of the optimizer step ``step``; return its loss [], and its metrics' totals.

        ``checked`` is put around every loss before its gradients are made.
        """
        if self.pipeline is not None:
            compute, columns = partial(self.loss, self.models[0], step=step), 1 + len(self.more_metrics)
            return self.pipeline.forward_backward(batch, compute, checked, columns)
        loss, values = self.loss(self.models[0], batch, step)
        self.accelerator.backward(checked(loss))
        return loss.detach(), totals(values)

    @abstractmethod
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return what is trained, in the model's order; of split weights the part that lies here."""

    def parameters(self) -> list[nn.Parameter]:
        return list(self.named_parameters().values())

    def accumulate(self, ends_step: bool) -> AbstractContextManager[None]:
        """Inside the block, a batch: gradients are added up, and exchanged by processes in a step's last batch.

        accelerate's own ``accumulate`` counts batches; here a step may have fewer.
        """
        self.accelerator.sync_gradients = ends_step
        return nullcontext() if ends_step else no_sync(self.accelerator, self.models)

    def gradient_limit(self, step: int) -> float:
        """Return the norm that gradients are clipped to in ``step``, 0 for no clipping."""
        return self.config.optimizer.max_grad_norm

    def clip_gradients(self, step: int) -> Tensor:
        """Scale the gradients of ``step`` to the norm they are limited to; return their norm before that, []."""
        limit = self.gradient_limit(step) or float("inf")  # with inf the norm is measured, not changed
        return clip_gradients(self.accelerator, self.transformer, self.parameters(), limit)

    @abstractmethod
    def parallel(self) -> ParallelSpec:
        """Return what layouts ask about the loaded model."""

    @property
    def held_out_parts(self) -> Sequence[str]:
        """What the metrics call the losses that a validation loss is the mean of, where it has parts."""
        return ()

    @abstractmethod
    def held_out_batches(self) -> Iterable[Any]:
        """Return what to validate on, the same on every process."""

    @abstractmethod
    def held_out_loss(self, batch: Any) -> tuple[Tensor, Tensor | int]:
        """Return the sum of a batch's losses, [] or for each of ``held_out_parts``, and over how many samples or tokens
        it is."""

    def validate(self, step: int) -> dict[str, float]:
        """Return the mean loss on what is held out, ``val_loss``, and the means that it is the mean of.

        Each process takes its share of the batches; the sums are added up before the division, so the loss does not
        depend on the number of processes.
        """
        means = self.mean_over(self.held_out_batches, self.held_out_loss, max(1, len(self.held_out_parts)))
        return {"val_loss": sum(means) / len(means), **dict(zip(self.held_out_parts, means, strict=False))}

    def mean_over(
        self,
        batches: Callable[[], Iterable[Any]],
        measure: Callable[[Any], tuple[Tensor, Tensor | int]],
        parts: int = 1,
    ) -> list[float]:
        """Return the means of the ``parts`` that ``measure``, like :meth:`held_out_loss`, sums up over ``batches``."""
        accelerator = self.accelerator
        sums = torch.zeros(parts + 1, dtype=torch.float64, device=accelerator.device)
        rank, processes = dp_rank_and_size(accelerator)
        with evaluating(*self.models):
            for own in lockstep_batches(islice(batches(), rank, None, processes), accelerator):
                loss, count = measure(next(iter(batches())) if own is None else own)
                if own is not None:  # else only to take part
                    number = torch.as_tensor(count, device=loss.device).double()
                    sums += torch.cat([loss.double().view(parts), number[None]])
        *losses, count = accelerator.reduce(sums, reduction="sum").tolist()
        return [loss / count for loss in losses]

    def describe_validation(self, loss: float) -> dict[str, float]:
        """Return further metrics of a validation loss."""
        return {}

    def after_update(self) -> None:  # noqa: B027 - most tasks have nothing to change
        """Change what an optimizer step left, before it is averaged, saved or looked at."""

    def training_metrics(self, values: dict[str, float], position: Position) -> dict[str, float]:
        """Return a training line's metrics, from those that every task has."""
        return values

    @abstractmethod
    def save(self, path: Path, position: Position) -> None:
        """Write the weights as they are deployed, within :meth:`gathered` and on the main process."""

    def verify(self, path: Path) -> str | None:
        """Read back what was saved last and compare it with the live weights; return the outcome in words."""
        return None

    @abstractmethod
    def memory_advice(self) -> str:
        """Return which settings to change when a step does not fit, cheapest first."""

    def describe_batch(self, batch: Any) -> str:
        """Return what a batch holds, for errors: ``the batch of 4 at 512x512 (a.png, b.png)``."""
        return f"the batch ({', '.join(self.sample_names(batch)[:4])})"

    @abstractmethod
    def sample_names(self, batch: Any) -> list[str]:
        """Return the names of a batch's samples; of batches without, what is known of them."""

    def parts(self) -> dict[str, Stateful]:
        """Return what has a state to save besides the weights."""
        parts: dict[str, Stateful] = {"optimizer": self.optimizer, "schedule": self.lr_schedule}
        if self.accelerator.scaler is not None:
            parts["scaler"] = self.accelerator.scaler
        if self.average is not None:
            parts["average"] = self.average
        return parts

    def begins_at(self) -> Position:
        """Return where the state to resume is, the very beginning without one; no weights are read."""
        return begun_position(self.config.training.resume, self.batches.batches_per_epoch())

    @abstractmethod
    def gathered(self, with_state: bool) -> Any:
        """Return a context in which the main process holds the full weights, and with ``with_state`` :meth:`state`.

        Every process enters it.
        """

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Return the trained weights by name, full ones within :meth:`gathered`."""

    def state(self) -> dict[str, Any]:
        """Return the state dicts of :meth:`parts` as one process would have them."""
        return {name: part.state_dict() for name, part in self.parts().items()}

    def resume(self, folder: str) -> Position:
        """Put a saved state back; return where training goes on.

        Raises:
            UserError: it is no state, a damaged one, or one of another model, or has nothing left to train.
        """
        if self.accelerator.is_local_main_process and not self.accelerator.is_main_process:
            check_whole(Path(folder))  # on another machine than :meth:`own_folder` saw it, which may have a copy
        saved, per_epoch = self.restore(folder), self.batches.batches_per_epoch()
        position = saved.in_epoch_of(per_epoch)
        if saved.batches and saved.epoch_batches not in (None, per_epoch):
            self.console.print(
                f"note: an epoch is {per_epoch} batches (of texts: windows) long, not {saved.epoch_batches} as in the "
                f"state; the run goes on at {position.batches}, where some of this epoch may come again or be left out",
                soft_wrap=True,
            )
        refuse_finished(folder, position, self.total_steps, self.resumes_finished)
        return position

    @abstractmethod
    def restore(self, folder: str) -> Position:
        """Put a saved state back."""

    @contextmanager
    def deployed_weights(self) -> Iterator[None]:
        """Inside the block the model holds the weights to save and look at: averaged ones, where the run averages."""
        with averaged_weights(self.optimizer), self.average.shown() if self.average else nullcontext():
            yield
