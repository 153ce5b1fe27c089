"""What happens between steps: saving, sampling, validating, and the summary at the end.

The trainer tells ``RunEvents`` when a step or an epoch is over; from the settings it knows what is due. Schedule-free
optimizers keep two sets of weights; whatever looks at the weights from outside looks at the averaged set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from library.accelerator import is_model_parallel
from library.errors import UserError
from library.files import atomic_folder
from library.processes import agreed
from library.training.checkpoint.hub import HubUpload
from library.training.checkpoint.saving import CheckpointWriter, fallback_folder, remove_old
from library.training.checkpoint.state import OutputNames, Position, save_training_state
from library.training.report.metrics import MetricsStream, peak_memory_bytes
from library.training.report.plots import plot_noise_levels, plot_runs
from library.training.report.progress import TrainingProgress, duration, print_summary, shown_path
from library.training.signals import NOTHING, SignalHandler, StopRequest, resume_hint
from library.training.tasks.task import Sampler, Task


class RunEvents:
    """Saves, samples and validates when it is due.

    Attributes:
        stopped: whether training is to end before its last step.
        stop_request: from outside, that stopped the run.
        val_losses: every validation loss so far.
        val_prior_loss: how much the last validation found changed elsewhere.
        state_saved_at: the step of the last state.
    """

    def __init__(
        self,
        task: Task,
        metrics: MetricsStream,
        progress: TrainingProgress,
        upload: HubUpload | None,
        first_step: int,
    ) -> None:
        """Take a run that begins behind ``first_step``, 0 unless it is resumed."""
        self.task, self.metrics, self.progress, self.upload = task, metrics, progress, upload
        self._first_step = first_step
        self.names, config = task.names, task.config
        self.saving, self.sampling, self.validation = config.saving, config.sampling, config.validation
        self.stopped = False
        self.stop_request: StopRequest = NOTHING
        self.val_losses: list[float] = []
        self.val_prior_loss: float | None = None
        self.state_saved_at: int | None = None
        self._validated_at: int | None = None
        self._sampled_at: int | None = None
        self._checked: str | None = None  # what :meth:`check_saved` found
        self._wrong: UserError | None = None
        fallback = fallback_folder(self.saving.save_fallback_dir, self.saving.output_name)
        self.writer = CheckpointWriter(self.names.folder, fallback, self.saving.save_retries, progress.note)
        self.requests = SignalHandler(
            self.names.folder,
            task.accelerator,
            task.begun,
            has_unsaved=lambda: self.writer.is_due,
            answer=self._answer,
        )
        self._at_end = False  # all steps are done, and what was trained is saved

    @property
    def val_loss(self) -> float | None:
        """The last validation loss."""
        return self.val_losses[-1] if self.val_losses else None

    def _answer(self, signal_name: str) -> None:
        """Say at once what becomes of a signal: some steps, and some samples, take a minute."""
        doing = self.progress.doing
        first = {"training": "this step", "sampling": "this sample"}.get(doing, doing)
        then = "" if self._at_end else f", then saving the {self.task.trained} and a state"
        again = "once more ends it at once" + ("" if self._at_end else ", without saving")
        self.progress.note(f"{signal_name}: stopping after {first}{then}; {again}")

    def at_start(self, position: Position) -> None:
        """Look at the untrained network: validation loss and samples before the first step."""
        if position.step == 0:
            if self.task.validates_first:
                position.val_loss_before = self._validate(position.step)
            if self.task.samples_first:
                self._sample(position.step)
            return
        with agreed("looking for samples"):  # all know the same samples before one draws what is missing
            if self.task.sampler is not None:
                self.task.sampler.recall(position.step)
        self._catch_up(position)

    def _catch_up(self, position: Position) -> None:
        """Do what the run that wrote the state did not get to: look at the weights, delete old files, end."""
        step = position.step
        if self._is_due("validate", step=step) and position.validated_at != step:
            self._compare(position)
        if self._is_due("sample", step=step) and self.task.sampler and step not in self.task.sampler.sampled:
            self._sample(step)
        if self._is_due("save", step=step):
            self._rotate(step=step)
        if position.epoch and not position.batches and self._is_due("save", epoch=position.epoch):
            self._rotate(epoch=position.epoch)
        self._stop_if_stale(position)

    def is_due(self, position: Position) -> bool:
        """Return whether :meth:`after_step` is going to look at the weights."""
        asked = bool(self.requests.look(position.step))
        return asked or any(self._is_due(what, step=position.step) for what in ("validate", "sample", "save"))

    def _is_due(self, what: str, **done: int) -> bool:
        """Return whether to validate, sample or save after so many steps (``step=``) or epochs (``epoch=``)."""
        ((unit, count),) = done.items()
        every = {
            ("validate", "step"): self.validation.validate_every_n_steps,
            ("validate", "epoch"): self.validation.validate_every_n_epochs,
            ("sample", "step"): self.sampling.sample_every_n_steps,
            ("sample", "epoch"): self.sampling.sample_every_n_epochs,
            ("save", "step"): self.saving.save_every_n_steps,
            ("save", "epoch"): self.saving.save_every_n_epochs,
        }[what, unit]
        return every is not None and count % every == 0 and (what != "validate" or self.task.validates)

    def save_before_fault(self, position: Position, alone: bool = False) -> str | None:
        """Save weights and state as they are before a step that cannot be taken; return the weights' path, if any.

        Every process comes by, unless this one is ``alone``, which then writes whichever it is.
        """
        if position.step == 0:
            return None
        stem = self.names.stem(step=position.step)
        if not alone or self.state_saved_at != position.step:
            self._save(stem, position, True, lambda: self.requests.signalled, alone)
        return shown_path((self.writer.in_fallback or [self.names.weights(stem)])[0])

    def after_step(self, position: Position) -> None:
        """Do what is due after an optimizer step."""
        stop_request = self.requests.look(position.step)
        if stop_request.stop is not None and position.step < self.task.total_steps:
            self._stop(stop_request, position)
            return
        self._do_what_is_due(position, stop_request, step=position.step)
        self.requests.answered(stop_request)

    def after_epoch(self, position: Position) -> None:
        """Do what is due after an epoch; ``position.epoch`` is the number of epochs done."""
        self._do_what_is_due(position, NOTHING, epoch=position.epoch)

    def _do_what_is_due(self, position: Position, request: StopRequest, **done: int) -> None:
        if self._is_due("validate", **done):
            self._compare(position)
            self._stop_if_stale(position)
        if self._is_due("sample", **done) or request.sample:
            self._sample(position.step)
        if self._is_due("save", **done) or request.save or request.again:
            with_state = self.saving.save_state or request.save
            if self._save(self.names.stem(**done), position, with_state):
                self._rotate(**done)

    def _stop(self, stop_request: StopRequest, position: Position) -> None:
        """Keep what has been trained, and end: there may be only seconds."""
        stem, in_a_hurry = self.names.stem(step=position.step), stop_request.stop != "STOP"
        self._save(stem, position, with_state=True, last=lambda: in_a_hurry or self.requests.signalled)
        self.requests.answered(stop_request)
        self.stopped, self.stop_request = True, stop_request

    def at_end(self, position: Position) -> None:
        """Save first, then look at the result; what can fail for lack of memory comes after what must be saved."""
        if self.stop_request.stop is not None:
            return
        with_state = self.saving.save_state or self.saving.save_state_on_train_end
        self._save(self.names.stem(), position, with_state, last=lambda: self.requests.signalled)
        self._at_end = True
        if self._validated_at != position.step:
            self._compare(position)
        if self.sampling.sample_at_end and self._sampled_at != position.step:
            self._sample(position.step)
        if self.task.end_sampler is not None:
            self._sample(position.step, self.task.end_sampler)

    def _plot(self) -> list[Path]:
        """Plot the learning rate curves and write the sheets of samples; return the images (main process only)."""
        images: list[Path] = []

        def plot() -> None:
            plot_runs([self.names.folder], self.names.folder / "lr.png")
            images.append(self.names.folder / "lr.png")
            images.extend(plot_noise_levels(self.names.folder, self.names.folder / "noise_levels.png")[:1])

        self.writer.write_optional(plot, "lr.png")
        for sampler in filter(None, (self.task.sampler, self.task.end_sampler)):
            sheets = sampler.write_sheets
            self.writer.write_optional(lambda sheets=sheets: images.extend(sheets()), "the sheets of samples")  # type: ignore[misc]
        return images

    def _validate(self, step: int) -> float | None:
        """Measure what was learnt and what was changed elsewhere, as far as the task can; return the first."""
        if not self.task.validates:
            return None
        with self._looking("validating"):
            values = self.task.validate(step)
        loss, elsewhere, said = values.get("val_loss"), values.get("val_prior_loss"), list[str]()
        if loss is not None:
            said.append(f"loss {loss:.4f}" + (f", {self.val_losses[-1]:.4f} before" if self.val_losses else ""))
            values |= self.task.describe_validation(loss)
            self.val_losses.append(loss)
        if elsewhere is not None:
            said.append(f"changed elsewhere {elsewhere:.4f}")
        self.progress.note(f"validated at step {step}: {'; '.join(said)}")
        self.metrics.write({"step": step, **values})
        self.val_prior_loss, self._validated_at = elsewhere, step
        return loss

    def _compare(self, position: Position) -> None:
        """Validate, and save the best weights so far."""
        loss = self._validate(position.step)
        if loss is None or position.validated_at == position.step:
            return
        position.validated_at = position.step
        score = loss + self.task.best_prior_weight * (self.val_prior_loss or 0.0)
        if position.best_val_loss is None or score < position.best_val_loss:
            position.best_val_loss, position.validations_since_best = score, 0
            if self.saving.save_best:
                self._save(f"{self.names.name}-best", position, with_state=False)
        else:
            position.validations_since_best += 1

    def _stop_if_stale(self, position: Position) -> None:
        """Stop after too many validations without a better one."""
        patience = self.saving.early_stop_patience
        if patience is not None and position.validations_since_best >= patience:
            self.stopped = True

    def _rotate(self, **done: int) -> None:
        if self.task.accelerator.is_main_process:
            remove_old(self.names.folder, self.names.name, self.saving, **done)

    def _sample(self, step: int, sampler: Sampler | None = None) -> None:
        if sampler is None and (sampler := self.task.sampler) is None:
            return
        self._sampled_at = step
        with self._looking("sampling"):
            together = is_model_parallel(self.task.accelerator)  # then no process may stop alone
            stopping = None if together else (lambda: self.requests.signalled)
            with agreed("sampling", partial(self.writer.leave_out, "sampling")):
                if self.task.accelerator.is_main_process or together:
                    sampler.sample(self.task.transformer, step, stopping)
            if files := sampler.sampled.get(step):
                more = f" and {len(files) - 1} more" if len(files) > 1 else ""
                self.progress.note(f"sampled at step {step}: {shown_path(files[0])}{more}")

    def _save(
        self,
        stem: str,
        position: Position,
        with_state: bool,
        last: Callable[[], bool] | None = None,
        alone: bool = False,
    ) -> bool:
        """Save the weights, and a state; return on the main process whether that could be done.

        ``last`` is given when there is no later: it tells whether the process is about to be ended. With ``alone`` this
        process does it, and the others know nothing of it.
        """
        saved: list[Path] | None = None
        main = self.task.accelerator.is_main_process
        with (
            self.progress.phase("saving"),
            self.task.gathered(with_state),
            nullcontext() if alone else agreed("saving"),
        ):
            if main or alone:

                def write(folder: Path) -> list[Path]:
                    return self._write(replace(self.names, folder=folder), stem, position, with_state)

                saved = (
                    self.writer.write_or_retry_later(write)
                    if last is None
                    else self.writer.write_with_retries(write, last)
                )
                if saved:
                    self.progress.note(f"saved at step {position.step}: {shown_path(saved[0])}")
                if self.upload is not None and not alone:  # what is left over is uploaded by the run that goes on
                    for path in saved or []:
                        self.upload.push(path)
        if with_state and (saved or not main):
            self.state_saved_at = position.step
        return saved is not None

    def _write(self, names: OutputNames, stem: str, position: Position, with_state: bool) -> list[Path]:
        """Write the weights, and a state; return what is to be uploaded."""
        task, saved = self.task, [names.weights(stem)]
        with task.deployed_weights(), nullcontext(saved[0]) if names.suffix else atomic_folder(saved[0]) as target:
            task.save(target, position)
        if with_state:
            folder = names.state(stem)
            saved += [folder] if self.task.config.hub.save_state_to_huggingface else []
            if self.upload is not None:
                self.upload.note(saved)  # a run that goes on from this state uploads them, should this one be killed
            weights, state, home = task.weights(), task.state(), self.names.folder
            save_training_state(folder, weights, state, position, task.base_fingerprint, task.settings, home)
        return saved

    @contextmanager
    def _looking(self, phase: str) -> Iterator[None]:
        """Name the phase and show the averaged weights while the block runs."""
        with self.progress.phase(phase), self.task.deployed_weights():
            yield

    def check_saved(self) -> None:
        """Compare what was saved with the live weights; the last thing that all processes come to."""
        task, main = self.task, self.task.accelerator.is_main_process
        # a process that leaves early takes the process group from under the others
        with task.gathered(with_state=False) if task.verifies else nullcontext(), agreed("checking what was saved"):
            if task.verifies and main and self.stop_request.stop is None and not self.writer.in_fallback:
                try:
                    self._checked = task.verify(self.names.weights(self.names.stem()))
                except UserError as error:  # is said after the summary
                    self._wrong = error

    def finish(self, position: Position) -> None:
        """Show what the run did.

        Raises:
            UserError: what is on disk is not what was trained, or lies elsewhere.
        """
        task = self.task
        self.metrics.close()
        if task.accelerator.is_main_process:  # alone from here on
            rows = [*self._summary(position), *task.summary.items()]
            rows += [("LoRA file checked", self._checked)] if self._checked is not None else []
            print_summary(task.console, rows)
            if self.stop_request.stop is not None:
                state = self.names.state(self.names.stem(step=position.step))
                task.console.print(resume_hint(self.stop_request, position.step, state), soft_wrap=True)
        if self.upload is not None and (failed := self.upload.finish()):
            task.console.print(f"not uploaded: {', '.join(map(shown_path, failed))}", soft_wrap=True)
        self.writer.report()
        if self._wrong is not None:
            raise self._wrong

    def _summary(self, position: Position) -> list[tuple[str, str]]:
        """Return the rows of the run's summary: what it did, how well, and where its files are."""
        before, after, folder = position.val_loss_before, self.val_loss, self.names.folder
        resumed = f", from step {self._first_step} to {position.step}" if self._first_step else ""
        steps = f"{position.step - self._first_step} in {duration(time.time() - self.task.begun)}{resumed}"
        rows = [("steps", steps), ("avg loss", f"{position.loss_ema:.4f} (moving average over about 20 steps)")]
        if after is not None:
            first, change = "", ""
            if before is not None and self._validated_at:  # again since the first step
                first, change = f"{before:.4f} before -> ", f" ({(after / before - 1) * 100:+.1f} %)"
            when = "after" if self._validated_at else "before the first step"
            rows.append(("validation loss", f"{first}{after:.4f} {when}{change}"))
            for key, value in self.task.describe_validation(after).items():
                first = "" if before is None else f"{self.task.describe_validation(before)[key]:.1f} -> "
                rows.append((key.removeprefix("val_"), f"{first}{value:.1f}"))
        if self.val_prior_loss is not None:
            rows.append(("changed elsewhere", f"{self.val_prior_loss:.4f} (squared, of velocities on general prompts)"))
        rows += [*self.progress.summary(), ("peak memory", f"{peak_memory_bytes() / 2**30:.2f} GiB")]
        if self.stop_request.stop is not None:
            rows.append(("stopped", f"by {self.stop_request.stop} before step {self.task.total_steps}"))
        elif self.stopped:
            rows.append(("stopped early", f"no lower validation loss since {position.best_val_loss:.4f}"))
        images = self._plot()
        stem = self.names.stem() if self.stop_request.stop is None else self.names.stem(step=position.step)
        files = [self.names.weights(stem), *images, folder / "metrics.jsonl"]
        return rows + [(_title(path) if path in images else path.name, shown_path(path)) for path in files]


def _title(image: Path) -> str:
    """Return what the summary calls an image: of general prompts there is a sheet of the same name."""
    return f"general, {image.stem}" if image.parent.name == "general" else image.stem
