"""What happens between steps: saving, sampling, validating, and drawing the run at its end.

``RunEvents`` is told when a step or an epoch is over and knows from the settings what is due. Schedule-free
optimizers keep two sets of weights; whatever looks at the LoRA from outside looks at the averaged set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from library.training.checkpoint import OutputNames, Position, save_training_state
from library.training.hub import HubUpload
from library.training.lr_plot import plot_runs
from library.training.metrics import MetricsStream
from library.training.progress import TrainingProgress
from library.training.retention import remove_old
from library.training.run import Run

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

    from library.config.instruction_schema import InstructionSamplingConfig, InstructionValidationConfig
    from library.config.schema import SamplingConfig, SavingConfig, ValidationConfig

SaveLora = Callable[[Path, Position], None]


class Sampler(Protocol):
    """What shows how the model does: ``library.training.sampling.Sampler`` draws pictures, others write text."""

    def sample(self, transformer: nn.Module, step: int) -> list[Path]: ...

    def recall(self, last_step: int) -> None: ...

    def write_sheets(self) -> list[Path]: ...


class HeldOut(Protocol):
    """What a run is validated on: ``library.training.validation.HeldOut``, or a language model's."""

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
    save_states_to_hub: bool = False
    stopped: bool = False
    val_loss: float | None = None
    _validated_at: int | None = None
    _sampled_at: int | None = None

    def at_start(self, position: Position) -> None:
        """Look at the untrained network: validation loss and samples before the first step."""
        if position.step == 0:
            position.val_loss_before = self._validate(position.step)
            if self.sampling.sample_at_first:
                self._sample(position.step)
        elif self.sampler is not None:
            self.sampler.recall(position.step)

    def after_step(self, position: Position) -> None:
        """Do what is due after an optimizer step."""
        step = position.step
        if _due(step, self.held_out.config.validate_every_n_steps if self.held_out else None):
            self._compare(position)
            self._stop_if_stale(position)
        if _due(step, self.sampling.sample_every_n_steps):
            self._sample(step)
        if _due(step, self.saving.save_every_n_steps):
            self._save(self.names.stem(step=step), position, with_state=self.saving.save_state)
            self._rotate(step=step)

    def after_epoch(self, position: Position) -> None:
        """Do what is due after an epoch; ``position.epoch`` is the number of epochs done."""
        epoch = position.epoch
        if _due(epoch, self.held_out.config.validate_every_n_epochs if self.held_out else None):
            self._compare(position)
            self._stop_if_stale(position)
        if _due(epoch, self.sampling.sample_every_n_epochs):
            self._sample(position.step)
        if _due(epoch, self.saving.save_every_n_epochs):
            self._save(self.names.stem(epoch=epoch), position, with_state=self.saving.save_state)
            self._rotate(epoch=epoch)

    def at_end(self, position: Position) -> None:
        """Save first, then look at the result; what can fail for lack of memory comes after what must be kept."""
        self._save(
            self.names.stem(), position, with_state=self.saving.save_state or self.saving.save_state_on_train_end
        )
        if self._validated_at != position.step:
            self._compare(position)
        if self.sampling.sample_at_end and self._sampled_at != position.step:
            self._sample(position.step)

    def draw(self) -> list[Path]:
        """Draw the learning rate curves and the sheets of samples; return the pictures (main process only)."""
        if not self.run.accelerator.is_main_process:
            return []
        pictures = [self.names.folder / "lr.png"]
        plot_runs([self.names.folder], pictures[0])
        return pictures + (self.sampler.write_sheets() if self.sampler else [])

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
        if loss is None:
            return
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
            if self.run.accelerator.is_main_process:
                self.sampler.sample(self.run.transformer, step)
            self.run.accelerator.wait_for_everyone()

    def _save(self, stem: str, position: Position, with_state: bool) -> None:
        with self.progress.phase("save"):
            if self.run.accelerator.is_main_process:
                saved = [self.names.lora(stem)]
                with self.run.deployed_weights():
                    self.save_lora(saved[0], position)
                if with_state:
                    weights, base = self.run.network.state_dict(), self.run.base_fingerprint
                    folder, settings = self.names.state(stem), self.run.settings
                    save_training_state(folder, weights, self.run.parts(), position, base, settings)
                    saved += [folder] if self.save_states_to_hub else []
                if self.upload is not None:
                    for path in saved:
                        self.upload.push(path)
            self.run.accelerator.wait_for_everyone()

    @contextmanager
    def _looking(self, phase: str) -> Iterator[None]:
        """Name the phase and show the averaged weights while the block runs."""
        with self.progress.phase(phase), self.run.deployed_weights():
            yield


def _due(count: int, every: int | None) -> bool:
    return every is not None and count % every == 0
