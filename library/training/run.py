"""One run: its folder, how far it is, and what happens between steps: saving, sampling, validating, the summary.

The trainer calls ``at_start``; ``check_due`` and ``after_step`` after each step, ``after_skipped_step`` where its
update was skipped, ``after_epoch`` after each epoch; ``at_end``; and ``save_before_fault`` if the run fails. What is
due follows from the settings (``_is_due``) and from requests (``signals``).

Validation, samples and saved files use the weights to deploy (``Engine.deployed_weights``).

A save never destroys an older one: files are written under a temporary name and renamed. If the disk is full, the save
is tried again later, and at the end of the run it goes into ``save_fallback_dir`` (``checkpoint.saving``). If one
process fails while the others wait for it, all leave the block (``processes.agreed``); the reason is printed once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from library.accelerator import is_model_parallel
from library.console import print_summary
from library.errors import UserError, error_prefix
from library.files import atomic_folder
from library.folder_lock import FolderLock
from library.processes import agreed, from_all_processes
from library.training.checkpoint.hub import build_upload
from library.training.checkpoint.output_folder import refuse_kept, refuse_to_overwrite, same_name_beside, try_writing
from library.training.checkpoint.saving import CheckpointWriter, Write, fallback_folder, remove_old
from library.training.checkpoint.state import (
    AUTO,
    INPUTS,
    OutputNames,
    Position,
    check_whole,
    describe_state,
    read_inputs,
    refuse_finished,
    resolve_resume,
    save_training_state,
    start_position,
)
from library.training.optim.after_update import UpdateNorms
from library.training.report.metrics import MetricsStream, peak_memory_bytes, write_config
from library.training.report.plots import plot_runs
from library.training.report.progress import SAMPLING, TrainingProgress, duration, shown_path
from library.training.report.run_folder import keep_other_run
from library.training.run_inputs import RunInputs, changes_since, contents_of, require_same, settings_of
from library.training.signals import NOTHING, SignalHandler, StopRequest, interruptible, resume_hint
from library.training.tasks.task import Sampler, Task


class Run:
    """Opens the folder, prepares the task, and saves, samples and validates when it is due.

    Attributes:
        position: how far the run is.
        first_step: where it began, 0 unless it is resumed.
        norms: how far it has moved each layer of an adapter.
        stopped: whether training is to end before its last step.
        stop_request: from outside, that stopped the run.
        val_losses: every validation loss so far.
        val_prior_loss: how much the last validation found changed elsewhere.
        state_saved_at: the step of the last state that was saved, None before the first.
    """

    position: Position
    first_step: int
    norms: UpdateNorms | None
    metrics: MetricsStream
    progress: TrainingProgress
    writer: CheckpointWriter
    requests: SignalHandler

    def __init__(self, task: Task) -> None:
        self.task, self.engine, self.names = task, task.engine, task.names
        self.config, self.saving = task.raw_config, task.raw_config.saving
        self.stopped = False
        self.stop_request: StopRequest = NOTHING
        self.val_losses: list[float] = []
        self.val_prior_loss: float | None = None
        self.state_saved_at: int | None = None
        self._state_stem = ""  # its name
        self._request: StopRequest = NOTHING  # after the last step
        self._validated_at: int | None = None
        self._sampled_at: int | None = None
        self._verified: str | None = None  # what :meth:`verify_saved` found
        self._verify_error: UserError | None = None
        self._stalled = ""  # which layers learn nothing, and why
        self._at_end = False  # all steps are done, and what was trained is saved

    @contextmanager
    def locked_folder(self) -> Iterator[str | None]:
        """Inside the block the output folder is this run's alone; yield the state that it goes on from.

        Raises:
            UserError: on every process: another run has the folder, it cannot be written to, holds another result, or
                only damaged states; the processes have different ones.
        """
        accelerator, resume = self.engine.accelerator, self.config.training.resume
        state: str | None = None
        say = partial(self.task.console.print, soft_wrap=True)
        lock = FolderLock(self.names.folder, self.names.name)
        try:
            with agreed("looking at the output folder"):
                if accelerator.is_main_process:
                    lock.acquire()
                    self.task.preparation.folder = self.names.folder
                    state = resolve_resume(resume, self.saving, say)
                    self._check_output(state is not None)
            found, *_ = from_all_processes(state)
            where = f"process {accelerator.process_index}"
            with agreed("looking at the state to go on from"), error_prefix(where):
                state = found if resume == AUTO else resume
                if state is not None and accelerator.is_local_main_process and not accelerator.is_main_process:
                    check_whole(Path(state))  # another machine's, which may be a copy
                described = describe_state(state)
            require_same({f"{found}": described})
            yield state
        finally:
            self.task.preparation.end()
            lock.release()

    def _check_output(self, resumed: bool) -> None:
        accelerator = self.engine.accelerator
        weights = self.names.weights(self.names.stem())
        refuse_kept(weights)
        if not (resumed or self.saving.overwrite):
            refuse_to_overwrite(weights, self.config)
        if other := same_name_beside(weights):
            note = f"note: {shown_path(other)} has the file name of this run's; set output_name to tell them apart"
            self.task.console.print(note, soft_wrap=True)
        try_writing(self.names.folder, self.names, 0)
        if self.config.logging.log_with:
            try_writing(Path(accelerator.logging_dir), self.names, 0, "logging_dir")

    def prepare(self, state: str | None) -> None:
        """Let the task load data and model; go to the position of ``state``, the very beginning without one."""
        task, accelerator, hub = self.task, self.engine.accelerator, self.config.hub
        with interruptible("before the first step; what is cached is kept"):
            with agreed("looking at the model's files and the hub"):
                task.open(state)
                self.upload = build_upload(hub, accelerator, task.console)
            config = task.plan.config
            task.inputs = RunInputs(settings_of(config), contents_of(config, task.base_fingerprint, task.base_parts))
            contents = {f"{key}'s content": content for key, content in task.inputs.contents.items()}
            require_same(task.inputs.settings | contents)
            task.prepare()
            if not task.validates:
                task.refuse_to_validate()
            with agreed("looking for room on the disk"):
                self._check_room()
        per_epoch = task.batches.batches_per_epoch()
        self.position = start_position(None, per_epoch) if state is None else self._resume(state, per_epoch)
        self.first_step = self.position.step
        self.norms = task.update_norms(self.first_step)
        folder = self.names.folder
        if state is None and accelerator.is_main_process and (line := keep_other_run(folder, self.names.name)):
            task.console.print(f"note: {line}", soft_wrap=True)
        write_config(folder, self.config, accelerator)
        self.metrics = MetricsStream(folder / "metrics.jsonl", accelerator, self.config.logging, self.first_step)
        self.progress = TrainingProgress(task.console, task.total_steps, task.total_epochs, self.first_step)
        fallback = fallback_folder(self.saving.save_fallback_dir, self.saving.output_name)
        self.writer = CheckpointWriter(folder, fallback, self.saving.save_retries, self.progress.note)
        self.requests = SignalHandler(
            folder, accelerator, task.started_at, overdue=self._overdue, on_first_signal=self._announce_stop
        )

    def _overdue(self) -> StopRequest:
        """Return what must be saved again, as it could not be saved before (main process)."""
        return StopRequest(save=self.writer.lacks_state, again=True) if self.writer.retry_is_due else NOTHING

    def _check_room(self) -> None:
        """Refuse a disk without room for one save of what is trained (on the main process).

        Raises:
            UserError: with the sizes.
        """
        parameters, short = self.engine.parameters, self.saving.save_precision not in (None, "fp32")
        nbytes = sum(p.numel() * (2 if short else p.dtype.itemsize) for p in parameters)
        if self.saving.save_state:
            nbytes += sum(p.numel() * p.dtype.itemsize for p in parameters)  # and what the optimizer is going to keep
        if self.engine.accelerator.is_main_process:
            try_writing(self.names.folder, self.names, nbytes)

    def _resume(self, state: str, per_epoch: int) -> Position:
        """Put a saved state back; return where training goes on.

        Raises:
            UserError: it is one of another model, or has nothing left to train.
        """
        task = self.task
        saved = task.restore(state)
        before, position = read_inputs(state), saved.in_epoch_of(per_epoch)
        lines = [f"resume: {line}" for line in changes_since(before, task.inputs, task.plan.config)]
        is_longer = saved.epoch_batches not in (None, per_epoch)
        if saved.batches and (is_longer or (before and [*before["samples"]] != [*task.inputs.samples])):
            unit, changed = task.epoch_unit, "the samples of this epoch, or their order, have changed"
            changed = f"an epoch now has {per_epoch} {unit}, {saved.epoch_batches} before" if is_longer else changed
            done = f"the run goes on after {position.batches} of its {per_epoch} {unit}"
            lines.append(f"note: {changed}; {done}: some samples may come twice in it, or not at all")
        for line in lines:
            task.console.print(line, soft_wrap=True)
        refuse_finished(state, position, task.total_steps, self.config.training.resume == AUTO)
        return position

    @property
    def val_loss(self) -> float | None:
        """The last validation loss."""
        return self.val_losses[-1] if self.val_losses else None

    def _announce_stop(self, signal_name: str) -> None:
        """Print at once what a signal will do: some steps, and some samples, take a minute."""
        doing = self.progress.doing
        first = {"training": "this step", "sampling": "this sample"}.get(doing, doing)
        then = "" if self._at_end else f", then saving the {self.task.trained} and a state"
        again = "once more ends it at once" + ("" if self._at_end else ", without saving")
        self.progress.note(f"{signal_name}: stopping after {first}{then}; {again}")

    def at_start(self) -> None:
        """Validate and sample before the first step; after a resume do what the run before did not get to."""
        if self.position.step == 0:
            if self.task.validates_first:
                self.position.val_loss_before = self._measure_losses()
            sampling = self.config.sampling
            samples_first = sampling.sample_at_first
            if samples_first is None:  # of pretraining
                samples_first = bool(sampling.sample_every_n_steps)
            if samples_first:
                self._sample()
            return
        with agreed("looking for samples"):  # all know the same samples before one draws what is missing
            if self.task.sampler is not None:
                self.task.sampler.recall(self.position.step)
        self._catch_up()

    def _catch_up(self) -> None:
        """Do what was due at the state's step and is not done: validate, sample, save the epoch, delete old files."""
        step, units = self.position.step, ["step"]
        if self.position.epoch and not self.position.batches:
            units.append("epoch")
        if any(self._is_due("validate", unit) for unit in units) and self.position.validated_at != step:
            self._validate()
        samples = any(self._is_due("sample", unit) for unit in units)
        if samples and self.task.sampler and step not in self.task.sampler.sampled:
            self._sample()
        for unit in (unit for unit in units if self._is_due("save", unit)):
            if unit == "epoch" and not self._is_written(stem := self._stem(unit)):
                self._save(stem, self.saving.save_state)
            self._remove_old(unit)
        self._stop_if_stale()

    def _is_written(self, stem: str) -> bool:
        """Return on all processes whether the main process finds the weights ``stem`` in the output folder."""
        is_written, *_ = from_all_processes(self.names.weights(stem).exists())
        return bool(is_written)

    def check_due(self) -> bool:
        """Look for requests, once after every step; return whether :meth:`after_step` needs settled, finite weights."""
        self.task.preparation.end()
        self._request = self.requests.poll()
        return bool(self._request) or any(self._is_due(what, "step") for what in ("validate", "sample", "save"))

    def _is_due(self, what: str, unit: str) -> bool:
        """Return whether to validate, sample or save after this ``step`` or ``epoch``, by its option."""
        validation, sampling, saving = self.config.validation, self.config.sampling, self.saving
        is_timed = validation.validate_every_n_steps or validation.validate_every_n_epochs
        schedule = "save" if what == "validate" and not is_timed else what
        every = {
            ("validate", "step"): validation.validate_every_n_steps,
            ("validate", "epoch"): validation.validate_every_n_epochs,
            ("sample", "step"): sampling.sample_every_n_steps,
            ("sample", "epoch"): sampling.sample_every_n_epochs,
            ("save", "step"): saving.save_every_n_steps,
            ("save", "epoch"): saving.save_every_n_epochs,
        }[schedule, unit]
        is_due = every is not None and getattr(self.position, unit) % every == 0
        return is_due and (what != "validate" or self.task.validates)

    def _stem(self, unit: str) -> str:
        """Return the name, without suffix, of what is saved after this ``step`` or ``epoch``."""
        return self.names.stem(**{unit: getattr(self.position, unit)})

    def save_before_fault(self, alone: bool = False) -> str | None:
        """Save weights and state of the last good step before the run fails; return the weights' path, if any.

        Every process calls this, unless one is ``alone``: that one writes, also if it is not the main process. It does
        not wait before it tries again: the other processes learn of the error only when it ends.
        """
        if self.position.step == 0:
            return None
        if not alone or self.state_saved_at != self.position.step:
            others_wait = alone and self.engine.accelerator.num_processes > 1
            self._save_at_end(self._stem("step"), True, lambda: others_wait or self.requests.signalled, alone)
        return shown_path(self._saved_names.weights(self._state_stem))

    def after_step(self) -> None:
        """Do what is due after an optimizer step, and what :meth:`check_due` found to be asked for."""
        if self._request.stop is not None and self.position.step < self.task.total_steps:
            self._stop()
            return
        self._do_what_is_due("step", self._request)
        self.requests.remove_files(self._request)

    def after_skipped_step(self) -> None:
        """Stop if that is asked for: the next step may not be finite either."""
        if self._request.stop is not None:
            self._stop()

    def after_epoch(self) -> None:
        """Do what is due after an epoch; ``self.position.epoch`` is the number of epochs done."""
        self._do_what_is_due("epoch", NOTHING)

    def _do_what_is_due(self, unit: str, request: StopRequest) -> None:
        step = self.position.step  # at the end of an epoch its last step may have done the same already
        if self._is_due("validate", unit) and self._validated_at != step:
            self._validate()
            self._stop_if_stale()
        if (self._is_due("sample", unit) or request.sample) and self._sampled_at != step:
            self._sample()
        is_save_due = self._is_due("save", unit) or request.save or request.again
        if is_save_due and self._save(self._stem(unit), self.saving.save_state or request.save):
            self._remove_old(unit)

    def _stop(self) -> None:
        """Save what has been trained, and end the run; there may be only seconds left."""
        in_a_hurry = self._request.stop != "STOP"
        self._save_at_end(self._stem("step"), True, lambda: in_a_hurry or self.requests.signalled)
        self.requests.remove_files(self._request)
        self.stopped, self.stop_request = True, self._request

    def at_end(self) -> None:
        """Save first, then look at the result; what can fail for lack of memory comes after what must be saved."""
        if self.stop_request.stop is not None:
            return
        with_state = self.saving.save_state or self.saving.save_state_on_train_end
        self._save_at_end(self.names.stem(), with_state, lambda: self.requests.signalled)
        self._at_end = True
        if self.norms is not None:
            self.check_norms(self.norms)
        if self._validated_at != self.position.step:
            self._validate()
        if self.config.sampling.sample_at_end and self._sampled_at != self.position.step:
            self._sample()
        if self.task.end_sampler is not None:
            self._sample(self.task.end_sampler)

    def check_norms(self, norms: UpdateNorms) -> None:
        """Name the layers that learn nothing, by the norms read last."""
        if problem := norms.check(self.engine.optimizer.param_groups, self._at_end):
            self.progress.note(f"warning: {problem}")
            self._stalled = problem

    def _plot(self) -> list[Path]:
        """Plot the learning rate curves and write the sheets of samples; return the images (main process only)."""
        images: list[Path] = []

        def plot() -> None:
            plot_runs([self.names.folder], self.names.folder / "lr.png")
            images.append(self.names.folder / "lr.png")

        self.writer.write_optional(plot, "lr.png")
        for sampler in filter(None, (self.task.sampler, self.task.end_sampler)):
            sheets = sampler.write_sheets
            self.writer.write_optional(lambda sheets=sheets: images.extend(sheets()), "the sheets of samples")  # type: ignore[misc]
        return images

    def _measure_losses(self) -> float | None:
        """Measure what was learnt and what was changed elsewhere, as far as the task can; return the first."""
        if not self.task.validates:
            return None
        step = self.position.step
        with self._deployed_weights("validating"):
            values = self.task.validate(step)
        loss, elsewhere, parts = values.get("val_loss"), values.get("val_prior_loss"), list[str]()
        if loss is not None:
            parts.append(f"loss {loss:#.4g}" + (f" (last time {self.val_losses[-1]:#.4g})" if self.val_losses else ""))
            values |= {f"val_{name}": of_loss(loss) for name, of_loss in self.task.from_val_loss.items()}
            self.val_losses.append(loss)
        if elsewhere is not None:
            parts.append(f"changed elsewhere {elsewhere:#.4g}")
        self.progress.note(f"validated at step {step}: {'; '.join(parts)}")
        self.metrics.write({"step": step, **values})
        self.val_prior_loss, self._validated_at = elsewhere, step
        return loss

    def _validate(self) -> None:
        """Validate, and save the weights if they are the best so far."""
        loss, position = self._measure_losses(), self.position
        if loss is None or position.validated_at == position.step:
            return
        position.validated_at = position.step
        best = position.best_val_loss
        is_best = math.isfinite(loss) and (best is None or math.isnan(best) or loss < best)
        if not is_best:
            position.validations_since_best += 1
            return
        position.validations_since_best = 0
        if self.saving.save_best:
            saved = self._save(f"{self.names.name}-best", False, self.writer.write_or_leave_out)
            is_saved, *_ = from_all_processes(saved)
            if not is_saved:  # the best of what is on the disk is an earlier one
                return
        position.best_val_loss = loss

    def _stop_if_stale(self) -> None:
        """Stop after too many validations without a better one."""
        patience = self.saving.early_stop_patience
        if patience is not None and self.position.validations_since_best >= patience:
            self.stopped = True

    def _remove_old(self, unit: str) -> None:
        if self.engine.accelerator.is_main_process:
            remove_old(self.names.folder, self.names.name, self.saving, **{unit: getattr(self.position, unit)})

    def _sample(self, sampler: Sampler | None = None) -> None:
        if sampler is None and (sampler := self.task.sampler) is None:
            return
        self._sampled_at = step = self.position.step
        self.task.preparation.begin(SAMPLING)
        with self._deployed_weights("sampling"):
            together = is_model_parallel(self.engine.accelerator)  # then no process may stop alone
            stopping = None if together else self.requests.asks_to_stop
            with agreed("sampling", partial(self.writer.leave_out, "sampling")):
                if self.engine.accelerator.is_main_process or together:
                    sampler.sample(self.task.transformer, step, stopping)
            if files := sampler.sampled.get(step):
                more = f" and {len(files) - 1} more" if len(files) > 1 else ""
                self.progress.note(f"sampled at step {step}: {shown_path(files[0])}{more}")

    def _save_at_end(self, stem: str, with_state: bool, in_a_hurry: Callable[[], bool], alone: bool = False) -> None:
        """Save what the run ends with; no retry waits where the process is ``in_a_hurry``, about to be killed."""
        self._save(stem, with_state, partial(self.writer.write_with_retries, in_a_hurry=in_a_hurry), alone)

    def _save(
        self,
        stem: str,
        with_state: bool,
        attempt: Callable[[Write], list[Path] | None] | None = None,
        alone: bool = False,
    ) -> bool:
        """Save the weights, and a state; return on the main process whether that could be done.

        Args:
            stem: names the files.
            with_state: whether to save a state too.
            attempt: what becomes of a save that fails, a method of the ``writer``; by default it is tried again later.
            alone: this process saves without the others.
        """
        if not alone:
            self._read_norms()
        saved: list[Path] | None = None
        main = self.engine.accelerator.is_main_process
        attempt = attempt or partial(self.writer.write_or_retry_later, with_state=with_state)
        with (
            self.progress.phase("saving"),
            self.task.gathered(with_state),
            nullcontext() if alone else agreed("saving"),
        ):
            if main or alone:
                saved = attempt(lambda folder: self._write(replace(self.names, folder=folder), stem, with_state))
                if saved:
                    self.progress.note(f"saved at step {self.position.step}: {shown_path(saved[0])}")
                if self.upload is not None and not alone:
                    for path in saved or []:
                        self.upload.push(path)
        if with_state and (saved or not main):
            self.state_saved_at, self._state_stem = self.position.step, stem
        return saved is not None

    def _read_norms(self) -> None:
        """Write how far each kind of layer has moved, unless a line of this step says so."""
        if self.norms is not None and self.norms.read_at != self.position.step > self.first_step:
            self.metrics.write({"step": self.position.step, **self.norms.read(self.position.step)})

    @property
    def _saved_names(self) -> OutputNames:
        """Where the run's last save lies: in the fallback folder, if the output folder did not take it."""
        return replace(self.names, folder=self.writer.fallback) if self.writer.in_fallback else self.names

    def _write(self, names: OutputNames, stem: str, with_state: bool) -> list[Path]:
        """Write the weights, and a state; return what is to be uploaded."""
        task, saved = self.task, [names.weights(stem)]
        written = nullcontext(saved[0]) if names.suffix else atomic_folder(saved[0])
        with self.engine.deployed_weights(), written as target:
            task.save(target, self.position)
        if with_state:
            folder = names.state(stem)
            saved += [folder] if self.config.hub.save_state_to_huggingface else []
            states = {name: part.state_dict() for name, part in self.engine.parts().items()}
            states[INPUTS] = {key: getattr(task.inputs, key) for key in ("settings", "contents", "samples")}
            about = task.base_fingerprint, task.state_settings(), self.names.folder
            save_training_state(folder, task.weights(), states, self.position, *about)
        return saved

    @contextmanager
    def _deployed_weights(self, phase: str) -> Iterator[None]:
        """While the block runs, name the phase, on the page too, and let the model hold the weights to deploy.

        The block has all memory.
        """
        self.engine.drop_graphs()
        folder = self.names.folder if self.engine.accelerator.is_main_process else None
        told = self.task.preparation.between_steps(phase, folder)
        with self.progress.phase(phase), told, self.engine.deployed_weights():
            yield

    def verify_saved(self) -> None:
        """Compare what was saved with the live weights; the last thing that all processes come to."""
        task, main = self.task, self.engine.accelerator.is_main_process
        # a process that leaves early takes the process group from under the others
        with task.gathered(with_state=False) if task.verifies else nullcontext(), agreed("checking what was saved"):
            if task.verifies and main and self.stop_request.stop is None and not self.writer.in_fallback:
                try:
                    self._verified = task.verify(self.names.weights(self.names.stem()))
                except UserError as error:  # is raised after the summary
                    self._verify_error = error

    def finish(self) -> None:
        """Show what the run did.

        Raises:
            UserError: what is on disk is not what was trained, or lies elsewhere.
        """
        task = self.task
        self.metrics.close()
        if self.engine.accelerator.is_main_process:  # alone from here on
            rows = [*self._summary(), *task.summary.items()]
            rows += [("LoRA file checked", self._verified)] if self._verified is not None else []
            print_summary(task.console, rows)
            if self.stop_request.stop is not None:
                state = self._saved_names.state(self._state_stem)
                task.console.print(resume_hint(self.stop_request, self.position.step, state), soft_wrap=True)
        if self.upload is not None and (failed := self.upload.finish()):
            task.console.print(f"not uploaded: {', '.join(map(shown_path, failed))}", soft_wrap=True)
        self.writer.report()
        if self._verify_error is not None:
            raise self._verify_error
        if self._stalled and self.norms is not None and self.norms.is_zero and self.stop_request.stop is None:
            saved = shown_path(self._saved_names.weights(self.names.stem()))
            raise UserError(f"{saved}: is as it was before the first step; {self._stalled}")

    def _summary(self) -> list[tuple[str, str]]:
        """Return the rows of the run's summary: what it did, how well, and where its files are."""
        before, after = self.position.val_loss_before, self.val_loss
        resumed = f", from step {self.first_step} to {self.position.step}" if self.first_step else ""
        steps = f"{self.position.step - self.first_step} in {duration(time.time() - self.task.started_at)}{resumed}"
        rows = [("steps", steps), ("avg loss", f"{self.position.loss_ema:#.4g} (moving average over about 20 steps)")]
        if after is not None:
            first, change = "", ""
            if before is not None and self._validated_at:  # again since the first step
                first, change = f"{before:#.4g} before the first step -> ", f" ({(after / before - 1) * 100:+.1f} %)"
            when = "after" if self._validated_at else "before the first step"
            rows.append(("validation loss", f"{first}{after:#.4g} {when}{change}"))
            for name, of_loss in self.task.from_val_loss.items():
                first = "" if before is None else f"{of_loss(before):.1f} -> "
                rows.append((name, f"{first}{of_loss(after):.1f}"))
        if self.val_prior_loss is not None:
            rows.append(("changed elsewhere", f"{self.val_prior_loss:#.4g} (squared, velocities on general prompts)"))
        rows += [*self.progress.summary(), ("peak memory", f"{peak_memory_bytes() / 2**30:.2f} GiB")]
        if self.stop_request.stop is not None:
            rows.append(("stopped", f"by {self.stop_request.stop} before step {self.task.total_steps}"))
        elif self.stopped:
            rows.append(("stopped early", f"no lower validation loss since {self.position.best_val_loss:#.4g}"))
        images = self._plot()
        stem = self.names.stem() if self.stop_request.stop is None else self._state_stem
        files = [self._saved_names.weights(stem), *images, self.names.folder / "metrics.jsonl"]
        return rows + [(_title(path) if path in images else path.name, shown_path(path)) for path in files]


def _title(image: Path) -> str:
    """Return what the summary calls an image: of general prompts there is a sheet of the same name."""
    return f"general, {image.stem}" if image.parent.name == "general" else image.stem
