"""The training loop: of image LoRAs, chat LoRAs and pretraining alike.

One optimizer step (``Trainer._epoch``) is: some batches forward and backward, clipping, the optimizer; then, when the
host knows that the step was finite, average and schedule (``Trainer._settle``). The ``Task`` says what is trained, the
``Engine`` runs a step on all processes, the ``Run`` saves, samples and validates between steps. Everything random is a
function of (seed, step, sample), so the loop carries no hidden state: its whole memory is ``Position`` and what
optimizer, average and schedule hold. On a GPU the host waits for the step under way only if that step is logged, or if
the weights are about to be looked at; in other steps it waits for the step before (``engine`` names the exceptions).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from accelerate.utils import gather_object

from library.accelerator import has_whole_model
from library.data.batches import MicroStep
from library.errors import UserError, names_in_short, reason_of
from library.processes import FailedElsewhere, watched
from library.training.memory.budget import keep_freed_memory, when_memory_runs_out
from library.training.optim.lr_tracker import read_learning_rates
from library.training.report.metrics import StepMetrics, peak_memory_bytes
from library.training.report.progress import FIRST_STEP
from library.training.run import Run
from library.training.tasks.task import Task

_NAMED = 4  # samples that a message names


def train(task: Task) -> Run:
    """Prepare the task, train, and leave everything in its output folder; return how it went.

    Raises:
        UserError: anything in the configuration, the data or the model that a user can fix; a step is not finite, or
            does not fit into memory.
    """
    run = Run(task)
    with run.locked_folder() as state:
        with watched():
            run.prepare(state)
            with run.progress, run.requests.listening():
                Trainer(task, run).train_or_save()
            run.verify_saved()
        run.finish()
    return run


class Trainer:
    """Takes a task from the run's position to its last step."""

    def __init__(self, task: Task, run: Run) -> None:
        self.task, self.run, self.engine, self.position = task, run, task.engine, run.position
        names, units = (task.metric, *task.more_metrics), task.throughput
        self.step_metrics = StepMetrics(self.engine.accelerator, run.position, names, units)
        self.rates: dict[str, float] = {}
        # in batches of the epoch: where the step begins that is next or under way; where the last one began and ended
        self._step_start = self.position.batches
        self._last_step_range = (0, 0)

    def train_or_save(self) -> None:
        """Train to the end; whatever goes wrong, save the last good step before the error goes on."""
        try:
            self.run.at_start()
            self.task.preparation.begin(FIRST_STEP)
            self.train()
            self.run.at_end()
        except FailedElsewhere:  # the process that failed does this
            raise
        except BaseException as error:
            self.run.progress.unmute()
            is_reported = self.run.state_saved_at == self.position.step  # a line has said that this step is saved
            if (saved := self._save_good_steps()) and not is_reported:
                kept = f"what was learnt up to step {self.position.step} is in {saved}"
                self.run.progress.note(f"{kept}: go on with --resume auto")
            elif not is_reported and self.position.step > self.run.first_step:
                self.run.progress.note(self._what_is_lost())
            if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):  # as torch says it
                raise UserError(
                    f"a process that reads caches was ended from outside ({reason_of(error)}), most likely as memory "
                    "ran out; lower max_data_loader_n_workers"
                ) from error
            raise

    def _what_is_lost(self) -> str:
        since, reason = self.run.state_saved_at or self.run.first_step, ""
        accelerator = self.engine.accelerator
        if not has_whole_model(accelerator):
            reason = " (the weights are split among processes)"
        elif not self.engine.is_whole:
            reason = " (a change of the weights failed half-way)"
        remedy = "go on from there with --resume auto" if since else "start again"
        if accelerator.num_processes > 1 and has_whole_model(accelerator):  # another may have saved it, or may yet
            who, remedy = f"process {accelerator.process_index}", "go on with --resume auto"
            return f"warning: {who} could not save what was learnt after step {since}{reason}; {remedy}"
        return f"warning: what was learnt after step {since} could not be saved{reason}; {remedy}"

    def train(self) -> None:
        """Train until ``total_steps`` optimizer steps are done, or the run is to stop."""
        for model in self.engine.models:
            model.train()
        if self.engine.accelerator.device.type == "cpu":
            keep_freed_memory()
        while self.position.step < self.task.total_steps and not self.run.stopped:
            self._epoch()
        self._settle(before_saving=True)

    def _epoch(self) -> None:
        """Train to the end of the epoch or of the run; leave ``position`` at the start of the next epoch."""
        task, engine, position, metrics = self.task, self.engine, self.position, self.step_metrics
        for (batch, waited), micro in self._batches_of_epoch():
            with when_memory_runs_out(partial(self._out_of_memory, batch)):
                loss, totals = engine.forward_backward(task.loss, batch, position.step, micro, metrics.columns)
                metrics.add(loss, totals, waited, len(batch) if micro.weight else 0, micro.samples)
                position.batches += micro.done
                if not micro.ends_step:
                    continue
                grad_norm = engine.clip(position.step)
                if not self._settle():  # the step before, while the device works on this one
                    return
                if self._is_logged(position.step + 1):
                    self.rates = read_learning_rates(engine.optimizer)  # as this step is going to use them
                engine.update(grad_norm)  # the schedule follows when the step is settled
            position.step += 1
            self._last_step_range, self._step_start = (self._step_start, position.batches), position.batches
            metrics.end_step(grad_norm)
            if not self._after_step():
                return
        self._end_epoch()

    def _batches_of_epoch(self) -> Iterator[tuple[tuple[Any, float], MicroStep]]:
        """Return the batches from ``position`` on, each with the time it was waited for and its place in its step."""
        batches, position = self.task.batches, self.position
        batches.set_position(position.epoch, position.batches)
        self._step_start = position.batches
        self.step_metrics.start_clock()
        return zip(_timed(self.task.loader), batches.micro_steps(), strict=True)

    def _after_step(self) -> bool:
        """Log a step, and let the run do what is due after it; return whether the epoch goes on."""
        run, metrics, step = self.run, self.step_metrics, self.position.step
        logged, due = self._is_logged(step), run.check_due()
        if (logged or due or not self.engine.is_answer_pending) and not self._settle(before_saving=due):
            return False
        metrics.stop_clock()
        run.progress.advance(step)
        if run.norms is not None:
            run.norms.after_step(step)
        if logged:
            self._log()
        elif due:
            metrics.read_average()
        run.after_step()
        metrics.start_clock()
        return step < self.task.total_steps and not run.stopped

    def _end_epoch(self) -> None:
        """Settle the last step of an epoch, and let the run do what is due after it."""
        if not self._settle(before_saving=True):
            return
        if self.step_metrics.ema is not None:  # steps were taken, of which the last may not have been logged
            self.step_metrics.read_average()
        self.position.epoch, self.position.batches, self._step_start = self.position.epoch + 1, 0, 0
        self.run.after_epoch()

    def _settle(self, before_saving: bool = False) -> bool:
        """Complete the last update, or respond to one that was not finite; return whether the step counts.

        ``before_saving`` also checks, on all processes, that the weights are finite: no step has checked what the last
        update made of them.

        Raises:
            UserError: the run is to stop at such a step, there were too many in a row, or the weights are not finite.
        """
        if not self.engine.is_settled:
            if not self.engine.settle():
                self._skip_or_stop()
                return False
            self.position.nonfinite_in_row = 0
        if before_saving:
            self._check_weights()
        return True

    def _uncount_last_step(self) -> int:
        """Put ``position`` before the last step, which is not finite; return the batches of the epoch up to its end."""
        began, ended = self._last_step_range
        self.position.step, self.position.batches, self._step_start = self.position.step - 1, began, began
        self.step_metrics.forget_step()
        return ended

    def _skip_or_stop(self) -> None:
        """Skip the last step and its batches, as it was not finite, or end the run: as ``on_nan`` says."""
        training, position = self.run.config.training, self.position
        ended, row = self._uncount_last_step(), position.nonfinite_in_row + 1
        self._check_weights()
        message = f"step {position.step + 1} is not finite: {self._samples_of_step()}"
        if training.on_nan == "stop" or row > training.on_nan_limit:
            saved = self.run.save_before_fault()
            last = f"last checkpoint: {saved}" if saved else "there was nothing to save"
            often = f"{row} steps in a row are not finite, the last: " if row > 1 else ""
            skip = ', or set on_nan = "skip" to go on without such steps' if training.on_nan == "stop" else ""
            raise UserError(f"{often}{message}; {last}; lower learning_rate or set max_grad_norm{skip}")
        position.batches, position.nonfinite_in_row = ended, row
        position.updates_dropped += 1
        self.run.progress.note(f"{message}; its update is skipped ({position.updates_dropped} so far)")
        self.run.metrics.write({"step": position.step, "updates_dropped": position.updates_dropped})
        if self.step_metrics.ema is not None:
            self.step_metrics.read_average()
        self.run.after_skipped_step()

    def _check_weights(self) -> None:
        if not self.engine.has_finite_weights():
            raise UserError(
                f"the {self.task.trained}'s weights are not finite after step {self.position.step} and are not saved; "
                "lower learning_rate, check the weights it started from, or resume from an earlier state"
            )

    def _samples_of_step(self) -> str:
        """Return the samples of the step after ``position``, of all processes; its batches are read again."""
        task, position, names = self.task, self.position, list[str]()
        task.batches.set_position(position.epoch, position.batches)
        for batch, micro in zip(task.loader, task.batches.micro_steps(), strict=False):
            names += task.sample_names(batch) if micro.weight else []
            if micro.ends_step:
                break
        return names_in_short(list(dict.fromkeys(gather_object(names))), _NAMED)

    def _out_of_memory(self, batch: Any) -> UserError:
        """Go back before the step that does not fit, save, and return the error that names its batch."""
        step, saved = self.position.step + 1, self._save_good_steps()
        last = f"last checkpoint: {saved}" if saved else "nothing more was saved"
        what, advice = self.task.describe_batch(batch), self.task.memory_advice()
        return UserError(f"out of memory in step {step}: {what} does not fit; {last}; {advice}")

    def _is_logged(self, step: int) -> bool:
        checked_at = None if self.run.norms is None else self.run.norms.checked_at
        return step % self.run.config.logging.log_every_n_steps == 0 or step in (self.task.total_steps, checked_at)

    def _log(self) -> None:
        step, norms = self.position.step, self.run.norms
        if norms is not None and norms.is_checked and step < self.task.total_steps:
            norms = None  # from here on at saves
        measured = None if norms is None else norms.measure()  # the next line waits for both
        values = {"step": step, "epoch": self.position.epoch, **self.step_metrics.read(), **self.rates}
        values["peak_mem_bytes"] = peak_memory_bytes()
        if norms is not None:
            values |= norms.read(step, measured)
            norms.grad_norm = values["grad_norm"]
            self.run.check_norms(norms)
        values = self.task.training_metrics(values, self.position)
        self.run.metrics.write(values)
        if self.engine.accelerator.is_main_process:
            self.run.progress.show(values)

    def _save_good_steps(self) -> str | None:
        """Go back to the last good step, and save it; return the weights' path, None if there is nothing to keep.

        Each process does this by itself: another one may be the one that failed, or wait for this one. So weights that
        are split among processes cannot be saved. An update that failed half-way cannot be undone (``Engine.update``).
        """
        if not has_whole_model(self.engine.accelerator) or not self.engine.is_whole:
            return None
        try:
            if self.engine.settle():
                self.position.batches = self._step_start  # a step that was begun has changed nothing yet
                self.step_metrics.forget_batches()
            else:
                self._uncount_last_step()
            self.engine.drop_gradients()
            if self.step_metrics.ema is not None and self.engine.accelerator.num_processes == 1:
                self.step_metrics.read_average()  # others may not come by
            if self.position.step <= self.run.first_step or not self.engine.has_finite_weights(alone=True):
                return None
            return self.run.save_before_fault(alone=True)
        except (Exception, KeyboardInterrupt) as error:  # a device that is lost; what was saved before stays
            self.run.progress.note(f"warning: the last steps could not be saved ({reason_of(error)})")
            return None


def _timed(batches: Iterable[Any]) -> Iterator[tuple[Any, float]]:
    """Yield each batch with the seconds spent waiting for it."""
    iterator = iter(batches)
    while True:
        started = time.perf_counter()
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch, time.perf_counter() - started
