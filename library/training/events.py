"""What happens between steps: saving, sampling, validating, and drawing the run at its end.

``RunEvents`` is told when a step or an epoch is over and knows from the settings what is due. Schedule-free
optimizers keep two sets of weights; whatever looks at the LoRA from outside looks at the averaged set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from library.accelerator import is_model_parallel
from library.files import atomic_folder
from library.training.checkpoint.hub import HubUpload
from library.training.checkpoint.saving import CheckpointWriter, fallback_folder, remove_old
from library.training.checkpoint.state import OutputNames, Position, save_training_state
from library.training.guard.signals import NOTHING, SignalHandler, StopRequest
from library.training.report.metrics import MetricsStream, peak_memory_bytes
from library.training.report.plots import plot_runs
from library.training.report.progress import TrainingProgress, duration, shown_path
from library.training.run import Run

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from library.config.chat_schema import InstructionSamplingConfig, InstructionValidationConfig
    from library.config.schema import SamplingConfig, SavingConfig, ValidationConfig


SaveLora = Callable[[Path, Position], None]


class Sampler(Protocol):
    """What shows how the model does: ``library.training.sampling.images.Sampler`` draws pictures, others write text."""

    drawn: dict[int, list[Path]]  # by step

    def sample(self, transformer: nn.Module, step: int) -> list[Path]: ...

    def recall(self, last_step: int) -> None: ...

    def write_sheets(self) -> list[Path]: ...


class HeldOut(Protocol):
    """What a run is validated on: ``library.training.tasks.image_lora.HeldOut``, or a language model's."""

    @property
    def config(self) -> ValidationConfig | InstructionValidationConfig: ...

    def loss(self, model: nn.Module, accelerator: Accelerator) -> float: ...


@dataclass
class RunEvents:
    """Saves, samples and validates when it is due; ``val_loss`` is the last validation loss."""

    run: Run
    names: OutputNames
    saving: SavingConfig
    sampling: SamplingConfig | InstructionSamplingConfig
    save_lora: SaveLora
    metrics: MetricsStream
    progress: TrainingProgress
    sampler: Sampler | None
    held_out: HeldOut | None
    upload: HubUpload | None
    begun: float  # seconds since 1970
    save_states_to_hub: bool = False
    stopped: bool = False
    stop_request: StopRequest = NOTHING  # that stopped the run
    val_loss: float | None = None
    _validated_at: int | None = None
    _sampled_at: int | None = None

    def __post_init__(self) -> None:
        fallback = fallback_folder(self.saving.save_fallback_dir, self.saving.output_name)
        self.writer = CheckpointWriter(self.names.folder, fallback, self.saving.save_retries, self.progress.note)
        self.requests = SignalHandler(
            self.names.folder, self.run.accelerator, self.begun, is_owed=lambda: self.writer.is_due
        )

    def at_start(self, position: Position) -> None:
        """Look at the untrained network: validation loss and samples before the first step."""
        if position.step == 0:
            position.val_loss_before = self._validate(position.step)
            if self.sampling.sample_at_first:
                self._sample(position.step)
            return
        if self.sampler is not None:
            self.sampler.recall(position.step)
        self.run.accelerator.wait_for_everyone()  # all know the same samples before one draws what is missing
        self._catch_up(position)

    def _catch_up(self, position: Position) -> None:
        """Do what the run that wrote the state did not get to: look at the weights, delete old files, end."""
        step = position.step
        every = self.held_out.config.validate_every_n_steps if self.held_out else None
        if _due(step, every) and position.validated_at != step:
            self._compare(position)
        if _due(step, self.sampling.sample_every_n_steps) and self.sampler and step not in self.sampler.drawn:
            self._sample(step)
        if _due(step, self.saving.save_every_n_steps):
            self._rotate(step=step)
        if position.epoch and not position.batches and _due(position.epoch, self.saving.save_every_n_epochs):
            self._rotate(epoch=position.epoch)
        self._stop_if_stale(position)

    def is_due(self, position: Position) -> bool:
        """Return whether :meth:`after_step` is going to look at the weights."""
        if self.requests.look(position.step):
            return True
        validation = self.held_out.config.validate_every_n_steps if self.held_out else None
        counts = (validation, self.sampling.sample_every_n_steps, self.saving.save_every_n_steps)
        return any(_due(position.step, every) for every in counts)

    def save_before_fault(self, position: Position) -> str | None:
        """Save LoRA and state as they are before a step that cannot be taken; return the LoRA's path, if any."""
        if position.step == 0:
            return None
        stem = self.names.stem(step=position.step)
        self._save(stem, position, with_state=True, last=lambda: self.requests.signalled)
        return shown_path(self.names.lora(stem))

    def after_step(self, position: Position) -> None:
        """Do what is due after an optimizer step."""
        step = position.step
        stop_request = self.requests.look(step)
        if stop_request.stop is not None and step < self.run.total_steps:
            self._stop(stop_request, position)
            return
        if _due(step, self.held_out.config.validate_every_n_steps if self.held_out else None):
            self._compare(position)
            self._stop_if_stale(position)
        if _due(step, self.sampling.sample_every_n_steps) or stop_request.sample:
            self._sample(step)
        if _due(step, self.saving.save_every_n_steps) or stop_request.save or stop_request.again:
            with_state = self.saving.save_state or stop_request.save
            if self._save(self.names.stem(step=step), position, with_state):
                self._rotate(step=step)
        self.requests.answered(stop_request)

    def _stop(self, stop_request: StopRequest, position: Position) -> None:
        """Keep what has been trained, and end: there may be only seconds."""
        stem, in_a_hurry = self.names.stem(step=position.step), stop_request.stop != "STOP"
        self._save(stem, position, with_state=True, last=lambda: in_a_hurry or self.requests.signalled)
        self.requests.answered(stop_request)
        self.stopped, self.stop_request = True, stop_request

    def after_epoch(self, position: Position) -> None:
        """Do what is due after an epoch; ``position.epoch`` is the number of epochs done."""
        epoch = position.epoch
        if _due(epoch, self.held_out.config.validate_every_n_epochs if self.held_out else None):
            self._compare(position)
            self._stop_if_stale(position)
        if _due(epoch, self.sampling.sample_every_n_epochs):
            self._sample(position.step)
        if not _due(epoch, self.saving.save_every_n_epochs):
            return
        if self._save(self.names.stem(epoch=epoch), position, with_state=self.saving.save_state):
            self._rotate(epoch=epoch)

    def at_end(self, position: Position) -> None:
        """Save first, then look at the result; what can fail for lack of memory comes after what must be kept."""
        if self.stop_request.stop is not None:
            return
        with_state = self.saving.save_state or self.saving.save_state_on_train_end
        self._save(self.names.stem(), position, with_state, last=lambda: self.requests.signalled)
        if self._validated_at != position.step:
            self._compare(position)
        if self.sampling.sample_at_end and self._sampled_at != position.step:
            self._sample(position.step)

    def draw(self) -> list[Path]:
        """Draw the learning rate curves and the sheets of samples; return the pictures (main process only)."""
        if not self.run.accelerator.is_main_process:
            return []
        pictures: list[Path] = []

        def plot() -> None:
            plot_runs([self.names.folder], self.names.folder / "lr.png")
            pictures.append(self.names.folder / "lr.png")

        self.writer.tolerate(plot)
        if self.sampler is not None:
            sheets = self.sampler.write_sheets
            self.writer.tolerate(lambda: pictures.extend(sheets()))
        return pictures

    def _validate(self, step: int) -> float | None:
        if self.held_out is None:
            return None
        with self._looking("validate"):
            loss = self.held_out.loss(self.run.model, self.run.accelerator)
        self.metrics.write({"step": step, "val_loss": loss})
        self.val_loss, self._validated_at = loss, step
        return loss

    def _compare(self, position: Position) -> None:
        """Validate, and keep the best LoRA so far."""
        loss = self._validate(position.step)
        if loss is None or position.validated_at == position.step:
            return
        position.validated_at = position.step
        if position.best_val_loss is None or loss < position.best_val_loss:
            position.best_val_loss, position.validations_since_best = loss, 0
            if self.saving.save_best:
                self._save(f"{self.names.name}-best", position, with_state=False)
        else:
            position.validations_since_best += 1

    def _stop_if_stale(self, position: Position) -> None:
        """Stop after too many validations without a better one."""
        patience = self.saving.early_stop_patience
        if patience is not None and position.validations_since_best >= patience:
            self.stopped = True

    def _rotate(self, step: int | None = None, epoch: int | None = None) -> None:
        if self.run.accelerator.is_main_process:
            remove_old(self.names.folder, self.names.name, self.saving, step, epoch)

    def _sample(self, step: int) -> None:
        if self.sampler is None:
            return
        self._sampled_at = step
        with self._looking("sample"):
            if self.run.accelerator.is_main_process or is_model_parallel(self.run.accelerator):
                sampler, transformer = self.sampler, self.run.transformer
                self.writer.tolerate(lambda: sampler.sample(transformer, step))
            self.run.accelerator.wait_for_everyone()

    def _save(self, stem: str, position: Position, with_state: bool, last: Callable[[], bool] | None = None) -> bool:
        """Save the LoRA, and a state; return on the main process whether that could be done.

        ``last`` is given when there is no later: it tells whether the process is about to be ended.
        """
        saved: list[Path] | None = None
        with self.progress.phase("save"), self.run.whole(with_state):
            if self.run.accelerator.is_main_process:

                def write(folder: Path) -> list[Path]:
                    return self._write(replace(self.names, folder=folder), stem, position, with_state)

                saved = self.writer.attempt(write) if last is None else self.writer.insist(write, last)
                if self.upload is not None:
                    for path in saved or []:
                        self.upload.push(path)
            self.run.accelerator.wait_for_everyone()
        return saved is not None

    def _write(self, names: OutputNames, stem: str, position: Position, with_state: bool) -> list[Path]:
        """Write the LoRA, and a state; return what is to be uploaded."""
        saved = [names.lora(stem)]
        with self.run.deployed_weights(), nullcontext(saved[0]) if names.suffix else atomic_folder(saved[0]) as target:
            self.save_lora(target, position)
        if with_state:
            folder = names.state(stem)
            saved += [folder] if self.save_states_to_hub else []
            if self.upload is not None:
                self.upload.note(saved)  # a run that goes on from this state uploads them, should this one be killed
            weights, base = self.run.network.state_dict(), self.run.base_fingerprint
            save_training_state(folder, weights, self.run.parts(), position, base, self.run.settings)
        return saved

    @contextmanager
    def _looking(self, phase: str) -> Iterator[None]:
        """Name the phase and show the averaged weights while the block runs."""
        with self.progress.phase(phase), self.run.deployed_weights():
            yield


def _due(count: int, every: int | None) -> bool:
    return every is not None and count % every == 0


def run_summary(events: RunEvents, position: Position, seconds: float) -> list[tuple[str, str]]:
    """Draw the run and return the rows of its summary: what it did, how well, and where its files are."""
    before, after = position.val_loss_before, events.val_loss
    rows = [
        ("steps", f"{position.step} in {duration(seconds)}"),
        ("loss", f"{position.loss_ema:.4f} (mean of the last steps)"),
        *events.progress.summary(),
        ("peak memory", f"{peak_memory_bytes() / 2**30:.2f} GiB"),
    ]
    if before is not None and after is not None:
        change = (after / before - 1) * 100
        rows.insert(2, ("validation loss", f"{before:.4f} before -> {after:.4f} after ({change:+.1f} %)"))
    if events.stop_request.stop is not None:
        rows.append(("stopped", f"by {events.stop_request.stop} before step {events.run.total_steps}"))
    elif events.stopped:
        rows.append(("stopped early", f"no lower validation loss since {position.best_val_loss:.4f}"))
    if events.upload and (failed := events.upload.finish()):
        rows.append(("not uploaded", ", ".join(shown_path(path) for path in failed)))
    pictures = events.draw()
    stem = events.names.stem() if events.stop_request.stop is None else events.names.stem(step=position.step)
    files = [events.names.lora(stem), *pictures, events.names.folder / "metrics.jsonl"]
    return rows + [(path.stem if path in pictures else path.name, shown_path(path)) for path in files]
