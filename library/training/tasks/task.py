"""What is trained: a ``Task`` for each kind of training, which ``library.training.trainer`` takes to its end.

A ``Task`` is made from a configuration: that refuses what can be refused at once and starts accelerate. ``open`` looks
at the model's files. ``prepare`` loads data and model and hands them to the ``engine``. Then the trainer asks for
losses, and the run asks, between steps, to validate, to sample and to save. ``LoraTask`` is what a LoRA on any model
has.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from library.accelerator import build_accelerator
from library.config.markers import resume_keys
from library.config.pretrain_schema import LLMTrainingConfig
from library.config.schema import TrainingConfig
from library.console import Console
from library.data.batches import DataParallelRank, MicroStep
from library.errors import UserError, counted
from library.processes import agreed, join
from library.training.checkpoint.state import AUTO, OutputNames, Position, describe_state, read_position
from library.training.compiling import compile_blocks, plan_compilation
from library.training.engine import Engine
from library.training.optim.after_update import UpdateNorms
from library.training.parallel.parallelize import ParallelSpec
from library.training.plan import Plan
from library.training.report.progress import Preparation
from library.training.run_inputs import RESUMED, RunInputs, require_same, settings_of


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
    """One kind of training.

    Attributes:
        raw_config: the configuration, as given.
        plan: what the task does; of a LoRA known once it is open.
        preparation: what is done before the first step.
        engine: what runs its steps, with the optimizer and what is trained.
        metric: what the metrics call the mean of the second value of :meth:`loss`, or of its first column.
        more_metrics: likewise the means of its further columns.
        from_val_loss: further metrics, that follow from the validation loss.
        throughput: the metric of speed, and how many of its units a sample counts.
        transformer: the network itself, out of any wrapper.
        loader, batches: of training batches, and what orders them.
        resume_keys: settings that a state must have been trained with.
        sampler: None where nothing is sampled. end_sampler: of what is sampled at the end alone.
        summary: rows for the table at the end of the run.
    """

    metric: ClassVar[str | None] = None
    more_metrics: Sequence[str] = ()
    from_val_loss: ClassVar[Mapping[str, Callable[[float], float]]] = {}
    throughput: tuple[str, int] = ("samples_per_s", 1)
    epoch_unit: ClassVar[str] = "batches"  # what an epoch is counted in
    verifies: ClassVar[bool] = True  # what was saved last
    suffix: ClassVar[str] = ""  # of what is saved, a folder without one
    trained: ClassVar[str] = "LoRA"  # what is, in words
    to_hold_out: ClassVar[str] = "set validation_split in the dataset TOML"

    plan: Plan[Any]
    transformer: nn.Module
    loader: Any
    batches: Batches
    total_steps: int
    total_epochs: int  # the last may be incomplete
    resume_keys: Mapping[str, Any]
    sampler: Sampler | None = None
    end_sampler: Sampler | None = None
    validates: bool = False
    validates_first: bool = True  # before the first step too
    base_fingerprint: str = ""  # of its weights
    base_parts: Mapping[str, str] = MappingProxyType({})  # of its other parts, by name
    state: str | None = None  # the folder of the state that the run goes on from
    inputs: RunInputs  # once it is open; its samples, once it is prepared

    def __init__(self, config: Any) -> None:
        self.started_at = time.time()
        self.raw_config = config = self._settled(config)
        joined = join(config.accelerate.ddp_timeout)
        with agreed("checking the settings") if joined else nullcontext():
            self._check(config)
            if (resume := config.training.resume) and resume != AUTO:
                read_position(resume, resume_keys(config))
            resumed = describe_state(resume)
        if joined:  # else a run in a run, or a process alone
            device = "a GPU" if torch.cuda.is_available() else "a CPU"
            require_same(settings_of(config) | {"device": device, RESUMED: resumed})
        self.engine = Engine(self._build_accelerator(config), config.training.seed)
        self.accelerator = self.engine.accelerator
        self.console = Console(quiet=not self.accelerator.is_main_process, markup=False, highlight=False)
        self.preparation = self.console.preparation = Preparation()
        self.names = OutputNames(Path(config.saving.output_dir), config.saving.output_name, self.suffix)
        self.summary: dict[str, str] = {}

    def _settled(self, config: Any) -> Any:
        """Return the configuration with the defaults that depend on the state to go on from, and on the device."""
        return config

    def refuse_to_validate(self, keys: Sequence[str] = ()) -> None:
        """Raise a UserError, as nothing is held out, if one of ``keys`` or what goes by the held-out loss is set."""
        saving = self.raw_config.saving
        if asked := [*keys, *(key for key in ("save_best", "early_stop_patience") if getattr(saving, key))]:
            what = f"{asked[0]}: nothing is held out to validate on"
            raise UserError(f"{what}; {self.to_hold_out}, or remove {asked[0]}")

    def state_settings(self) -> Mapping[str, Any]:
        """Return the settings that a state keeps."""
        return self.resume_keys

    @abstractmethod
    def _check(self, config: Any) -> None:
        """Refuse what can be refused before anything is loaded."""

    def _build_accelerator(self, config: Any) -> Accelerator:
        return build_accelerator(config.accelerate, config.training, config.saving, config.logging, config.parallel)

    def _loaded_to(self) -> torch.device:
        """Where the model is read to: host memory, where processes get parts of it, as all of it need not fit."""
        return torch.device("cpu") if self.plan.config.parallel.splits_model else self.accelerator.device

    def _compile(self, config: Any, spec: ParallelSpec, steps: int, sizes: Literal["one", "some", "many"]) -> None:
        """Compile the model's blocks, if ``config`` has it so; ``sizes``: of how many the batches are."""
        compiles, line = plan_compilation(config, self.accelerator.device, steps, lengths_vary=sizes == "many")
        if line:
            self.console.print(line, soft_wrap=True)
        if compiles:
            blocks = [module for module in spec.model.modules() if type(module).__name__ in spec.blocks]
            compile_blocks(blocks, config.accelerate, dynamic=None if sizes == "one" else True)

    @abstractmethod
    def open(self, state: str | None = None) -> None:
        """Look at the model's files, the prompts and the ``state`` to go on from; report what is wrong there."""

    @abstractmethod
    def prepare(self) -> None:
        """Load data and model, and let the engine wrap them."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch's loss [] with gradient, and what the metrics are means of.

        That is a row a sample (or one for the batch), with a column for ``metric`` and each of ``more_metrics``; NaN
        does not count.
        """

    @abstractmethod
    def validate(self, step: int) -> dict[str, float]:
        """Return the mean loss on what is held out, ``val_loss``, and other means as metrics call them."""

    def training_metrics(self, values: dict[str, float], position: Position) -> dict[str, float]:
        """Return a training line's metrics, from those that every task has."""
        return values

    def update_norms(self, first_step: int) -> UpdateNorms | None:
        """Return what measures how far the run's steps move what is trained; None where that is not measured."""
        return None

    @abstractmethod
    def gathered(self, with_state: bool) -> AbstractContextManager[None]:
        """Return a context in which the main process has the full weights, and with ``with_state`` the full state.

        Every process enters it.
        """

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """Return the trained weights by name, full ones within :meth:`gathered`."""

    @abstractmethod
    def restore(self, folder: str) -> Position:
        """Put the saved state in ``folder`` back; return how far it is."""

    @abstractmethod
    def save(self, path: Path, position: Position) -> None:
        """Write the weights as they are deployed, within :meth:`gathered` and on the main process."""

    def verify(self, path: Path) -> str | None:
        """Read back what was saved last and compare it with the live weights; return the outcome in words."""
        return None

    @abstractmethod
    def memory_advice(self) -> str:
        """Return which settings to change when a step does not fit, cheapest first."""

    @abstractmethod
    def sample_names(self, batch: Any) -> list[str]:
        """Return the names of a batch's samples; of batches without, what is known of them."""

    def describe_batch(self, batch: Any) -> str:
        """Return what a batch holds, for errors: ``the batch of 4 at 512x512 (a.png, b.png)``."""
        return f"the batch ({', '.join(self.sample_names(batch)[:4])})"


def run_length(
    training: TrainingConfig | LLMTrainingConfig, per_epoch: int, per_step: int, start: Position
) -> tuple[int, int]:
    """Return the number of optimizer steps of the run, and of epochs; the last epoch may be incomplete.

    Epochs win over steps. The last step of an epoch is a smaller one where ``per_step`` does not divide ``per_epoch``.
    A run that goes on with another number of processes takes as many steps as its epochs have left. Skipped steps (they
    were not finite) do not count: others are taken in their place, if need be in another epoch.

    Args:
        training: max_train_steps, max_train_epochs.
        per_epoch, per_step: batches, or windows, of an epoch and of a full step over all processes.
        start: where the run begins or goes on.
    """
    in_epoch = math.ceil(per_epoch / per_step)
    passed = (start.epoch + 1) * in_epoch - math.ceil(max(0, per_epoch - start.batches) / per_step)  # skipped ones too
    steps = training.max_train_steps
    if training.max_train_epochs is not None:
        steps = start.step + training.max_train_epochs * in_epoch - (passed - start.updates_dropped)
    return steps, math.ceil((passed + steps - start.step) / in_epoch)


def describe_steps(per_epoch: int, dp_rank: DataParallelRank, per_step: int, unit: str = "batch") -> str:
    """Return in a line how an epoch's batches, or another ``unit``, become steps."""
    several = f"{unit}es" if unit == "batch" else f"{unit}s"
    counts = {"processes": dp_rank.processes, "accumulated": dp_rank.accumulation}
    of = " x ".join(f"{count} {what}" for what, count in counts.items() if count > 1)
    steps, left = math.ceil(per_epoch / per_step), per_epoch % per_step
    last = f", {'of' if steps == 1 else 'the last of'} {left} {unit if left == 1 else several}" if left else ""
    return (
        f"{per_epoch:,} {several} an epoch, {per_step:,} in a step{f' ({of})' if of else ''}: "
        f"{counted(steps, 'step')} an epoch{last}"
    )
