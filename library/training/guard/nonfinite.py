"""A step whose loss or gradients are not finite: what was the cause, and what is done about it.

``update_guard`` has kept such a step from the weights and put the run back to the step's beginning. Only now is the
step looked at: its batches are read again (they are a function of the position), and each sample goes through the
model by itself, with hooks on every module. Noise, sigmas and captions are functions of seed, step and sample, so a
sample meets here what it met in the step.

==========  =========================================================================================================
stop        weights and state from before the step are saved, and the run ends with one line and exit code 2
skip        the step's batches are passed over; the step is taken with the next ones
rollback    the samples at fault are left out from then on, also after a resume, other images of their size take
            their places, and the step is taken again
==========  =========================================================================================================

A loss is never replaced by another number: nothing is learned from what was not finite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from library.accelerator import is_sharded, model_parallel_rank_and_size, zero_stage
from library.data.batches import MicroStep
from library.errors import UserError, names_in_short
from library.randomness import derive_seed
from library.training.checkpoint.state import Position
from library.training.parallel.gather import to_local
from library.training.parallel.step import drop_gradients, lockstep_batches
from library.training.report.metrics import totals
from library.training.tasks.task import Task

_NAMED = 4  # samples that a message names


@dataclass(frozen=True)
class BadSample:
    """One sample that is not finite in a step, or a whole batch where its samples have no names."""

    name: str  # of the file
    identity: str | None  # of the dataset's sample
    metric: str  # "sigma 0.412"
    what: str  # "loss", "gradient norm"
    module: str | None  # the first whose output was not finite

    def __str__(self) -> str:
        where = f", first in {self.module}" if self.module else ""
        return f"{self.name} ({self.metric}; {self.what}{where})"


@dataclass(frozen=True)
class Diagnosis:
    """What a bad step was made of, over all processes."""

    step: int
    trained: str  # "LoRA", "model"
    bad: list[BadSample] = field(default_factory=list)
    suspects: list[BadSample] = field(default_factory=list)  # all samples of the step, where none is bad by itself
    weights: list[str] = field(default_factory=list)  # trained tensors that are not finite before the step

    def __str__(self) -> str:
        if self.weights:
            return f"step {self.step}: the {self.trained}'s {self.weights[0]} is not finite before the step begins"
        if self.bad:
            return f"step {self.step} is not finite: {names_in_short(self.bad, _NAMED)}"
        names = ", ".join(f"{s.name} ({s.metric})" for s in self.suspects[:_NAMED])
        return f"step {self.step} is not finite, though each of its samples by itself is: {names}"

    def suggestion(self) -> str:
        """Return what to change, in one clause."""
        if self.weights:
            return "lower learning_rate, check the weights it started from, or resume from an earlier state"
        if any(sample.module and sample.module.startswith("the cached") for sample in self.bad):
            return 'delete its cache file, or set on_nan = "rollback" to leave it out'
        if len({sample.name for sample in self.bad}) > 1 or not self.bad or self.bad[0].identity is None:
            return 'lower learning_rate, set max_grad_norm, or use mixed_precision = "bf16"'
        return 'look at the image, use mixed_precision = "bf16", or set on_nan = "rollback" to leave it out'


def diagnose(task: Task, position: Position) -> Diagnosis:
    """Take the step after ``position`` again, sample by sample, without an update; say what is not finite.

    Every process looks at its own batches; all return the same.
    """
    local = [n for n, parameter in task.named_parameters().items() if not to_local(parameter).isfinite().all()]
    broken = list(dict.fromkeys(gather_object(local)))
    bad: list[BadSample] = []
    suspects: list[BadSample] = []
    if not broken:
        single = ((sample, of) for batch, of in _batches(task, position) for sample in task.single_samples(batch))
        last: tuple[Any, MicroStep] | None = None
        for own in lockstep_batches(single, task.accelerator):
            looked_at = own or last  # the last one again, only to take part
            assert looked_at is not None, "every process has a batch in every step"
            last = looked_at
            sample, is_bad = _look_at(task, last[0], position, last[1].number)
            if own is not None and own[1].weight:
                (bad if is_bad else suspects).append(sample)
    everyone = gather_object([(bad, suspects)] if model_parallel_rank_and_size(task.accelerator)[0] == 0 else [])
    bad, suspects = ([sample for pair in everyone for sample in pair[i]] for i in (0, 1))
    return Diagnosis(position.step + 1, task.trained, bad, suspects, broken)


def _batches(task: Task, position: Position) -> Iterator[tuple[Any, MicroStep]]:
    """Yield the batches of the step after ``position`` on this process."""
    task.batches.set_position(position.epoch, position.batches)
    for batch, micro in zip(task.loader, task.batches.micro_steps(), strict=False):
        yield batch, micro
        if micro.ends_step:
            return


def _look_at(task: Task, batch: Any, position: Position, number: int) -> tuple[BadSample, bool]:
    """Return what one sample of the epoch's batch ``number`` does in the step, and whether that is not finite."""
    accelerator = task.accelerator
    torch.manual_seed(derive_seed(task.seed, "dropout", position.step, number))
    with contextlib.ExitStack() as stack:
        for model in task.models:
            stack.enter_context(accelerator.no_sync(model))
        seen = stack.enter_context(_watching(task.models))
        # DeepSpeed's engine would take in the gradients, so under ZeRO the model runs by itself
        by_itself = zero_stage(accelerator) > 0
        if task.pipeline is not None:
            loss, (sums, counts) = task.forward_backward(batch, position.step)
        else:
            loss, values = task.loss(task.transformer if by_itself else task.models[0], batch, position.step)
            sums, counts = totals(values)
        what, module = "loss", next(iter(_of_all_stages(task, list(seen))), None)
        is_bad = not bool(loss.isfinite())
        trained = task.named_parameters()
        gradients: Sequence[Tensor | None] = []
        if task.pipeline is None and (not is_bad or is_sharded(accelerator)):  # of split weights all take part
            if by_itself:  # the engine's hooks on parameters do not see these
                gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            else:
                loss.backward()
        if not is_bad:
            gradients = gradients or [parameter.grad for parameter in trained.values()]
            pairs = zip(trained, gradients, strict=True)
            what = "gradient norm"
            spoilt = _of_all_stages(task, [n for n, g in pairs if g is not None and not to_local(g).isfinite().all()])
            is_bad, module = bool(spoilt), module or (f"the gradient of {spoilt[-1]}" if spoilt else None)
        drop_gradients(task.optimizer)
    module = task.bad_input(batch) or module
    metric = f"{(task.metric or 'loss').removesuffix('_mean')} {float(sums[0] / counts[0]):.4g}"
    return BadSample(task.sample_names(batch)[0], task.sample_identity(batch), metric, what, module), is_bad


@contextlib.contextmanager
def _watching(models: list[nn.Module]) -> Iterator[dict[str, None]]:
    """Yield a dict that fills with the names of modules whose output is not finite, the first first."""
    seen: dict[str, None] = {}
    handles = []

    def hook(name: str, output: Any) -> None:
        tensors = output if isinstance(output, (tuple, list)) else [output]
        if any(isinstance(t, Tensor) and t.is_floating_point() and not t.isfinite().all() for t in tensors):
            seen.setdefault(name or "the model's output")

    for model in models:
        for name, module in model.named_modules():
            short = name.removeprefix("module.")
            handles.append(module.register_forward_hook(lambda _m, _i, out, name=short: hook(name, out)))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _of_all_stages(task: Task, names: list[str]) -> list[str]:
    return names if task.pipeline is None else task.pipeline.gathered(names)


def respond(task: Task, position: Position, end: Position, save: Callable[[Position], str | None]) -> str:
    """Go on after a bad step as ``on_nan`` says; return what was done, in one line.

    Args:
        task: put back to the beginning of the step.
        position: where that is; moved on as the policy says.
        end: where the step ended.
        save: saves what was trained so far; returns its path, or None if there is nothing.

    Raises:
        UserError: the policy is to stop, there were too many bad steps in a row, or it lies in the weights.
    """
    diagnosis = diagnose(task, position)
    position.nonfinite_in_row += 1
    position.updates_dropped += 1
    row = position.nonfinite_in_row
    if task.on_nan == "stop" or diagnosis.weights or row > task.on_nan_limit:
        saved = None if diagnosis.weights else save(position)
        nothing = "nothing is saved of that" if diagnosis.weights else "there was nothing to save"
        last = f"last checkpoint: {saved}" if saved else nothing
        often = f"{row} steps in a row are not finite, the last: " if row > 1 else ""
        raise UserError(f"{often}{diagnosis}; {last}; {diagnosis.suggestion()}")
    if task.on_nan == "skip":
        position.epoch, position.batches = end.epoch, end.batches
        return f"{diagnosis}; its update is dropped ({position.updates_dropped} so far)"
    samples = diagnosis.bad or diagnosis.suspects
    blamed = {one.identity: one.name for one in samples if one.identity is not None}
    position.skipped_samples += sorted(blamed.keys() - set(position.skipped_samples))
    task.exclude(position.skipped_samples)
    return f"{diagnosis}; left out from now on: {', '.join(sorted(set(blamed.values())))}"
