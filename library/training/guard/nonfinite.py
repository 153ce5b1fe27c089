"""A step whose loss or gradients are not finite: what was the cause, and what is done about it.

``update_guard`` has kept such a step from the weights and put the run back to the step's beginning. Only now is the
step looked at: its batches are read again (they are a function of the position), and each sample goes through the
model by itself, with hooks on every module. Noise, sigmas and captions are functions of seed, step and sample, so a
sample meets here what it met in the step.

==========  =========================================================================================================
stop        the LoRA and the state from before the step are saved, and the run ends with one line and exit code 2
skip        the step's batches are passed over; the step is taken with the next ones
rollback    the samples at fault are left out from then on, also after a resume, other images of their size take
            their places, and the step is taken again
==========  =========================================================================================================

A loss is never replaced by another number: what was not finite is not learnt from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from library.accelerator import dp_rank_and_size, is_sharded, model_parallel_rank_and_size, zero_stage
from library.data.batches import Batch, CachedDataset, EpochBatchSampler
from library.errors import UserError
from library.randomness import derive_seed
from library.training.optim.factory import drop_gradients
from library.training.parallel.fsdp import lockstep_batches

if TYPE_CHECKING:
    from library.config.chat_schema import ChatTrainConfig
    from library.config.schema import TrainConfig
    from library.training.checkpoint.state import Position
    from library.training.run import Run


Policy = Literal["stop", "skip", "rollback"]
_NAMED = 4  # samples that a message names


@dataclass(frozen=True)
class BadSample:
    """One sample that is not finite in a step, or a whole batch where its samples have no names."""

    name: str  # of the file
    identity: str | None  # of the dataset's sample
    figure: str  # "sigma 0.412"
    what: str  # "loss", "gradient norm"
    module: str | None  # the first whose output was not finite

    def __str__(self) -> str:
        where = f", first in {self.module}" if self.module else ""
        return f"{self.name} ({self.figure}; {self.what}{where})"


@dataclass(frozen=True)
class Cause:
    """What a bad step was made of, over all processes."""

    step: int
    faults: list[BadSample] = field(default_factory=list)
    suspects: list[BadSample] = field(default_factory=list)  # all samples of the step, where none is at fault by itself
    weights: list[str] = field(default_factory=list)  # tensors of the LoRA that are not finite before the step

    def __str__(self) -> str:
        if self.weights:
            return f"step {self.step}: the LoRA's {self.weights[0]} is not finite before the step begins"
        if self.faults:
            more = f" and {len(self.faults) - _NAMED} more" if len(self.faults) > _NAMED else ""
            return f"step {self.step} is not finite: {', '.join(map(str, self.faults[:_NAMED]))}{more}"
        names = ", ".join(f"{s.name} ({s.figure})" for s in self.suspects[:_NAMED])
        return f"step {self.step} is not finite, though each of its samples by itself is: {names}"


def find_cause(run: Run, position: Position) -> Cause:
    """Take the step after ``position`` again, sample by sample, without an update; say what is not finite.

    Every process looks at its own batches; all return the same cause.
    """
    broken = [name for name, tensor in run.network.state_dict().items() if not tensor.isfinite().all()]
    faults: list[BadSample] = []
    suspects: list[BadSample] = []
    if not broken:
        alone = ((sample, n) for batch, n in _batches(run, position) for sample in _samples(batch))
        last: tuple[Any, int] | None = None
        for own in lockstep_batches(alone, run.accelerator):
            looked_at = own or last  # the last one again, only to take part
            assert looked_at is not None, "every process has a batch in every step"
            last = looked_at
            fault, is_bad = _look_at(run, last[0], position, last[1])
            if own is not None:
                (faults if is_bad else suspects).append(fault)
    everywhere = _gathered(run, [(faults, suspects)] if model_parallel_rank_and_size(run.accelerator)[0] == 0 else [])
    faults = [fault for ours, _ in everywhere for fault in ours]
    return Cause(position.step + 1, faults, [s for _, theirs in everywhere for s in theirs], broken)


def remedy(cause: Cause) -> str:
    """Return what to change, in one clause."""
    if cause.weights:
        return "check network_weights, or resume from an earlier state"
    if any(fault.module and fault.module.startswith("the cached") for fault in cause.faults):
        return 'delete its cache file, or set on_nan = "rollback" to leave it out'
    if len({f.name for f in cause.faults}) > 1 or not cause.faults:
        return 'lower learning_rate, set max_grad_norm, or use mixed_precision = "bf16"'
    return 'look at the image, use mixed_precision = "bf16", or set on_nan = "rollback" to leave it out'


def exclude_samples(run: Run, position: Position) -> int:
    """Let other images take the places of ``position.skipped_samples``; return how many images there are no more.

    Raises:
        UserError: nothing of some size is left.
    """
    dataset, batches = run.loader.dataset, run.batches
    if not position.skipped_samples:
        return 0
    assert isinstance(dataset, CachedDataset)
    assert isinstance(batches, EpochBatchSampler)
    batches.exclude(dataset.items_of(set(position.skipped_samples)))
    return len(position.skipped_samples)


def sample_names(run: Run, batch: Any) -> list[str]:
    """Return the file names of a batch's samples; of batches without, what is known of them."""
    dataset, ids = run.loader.dataset, getattr(batch, "sample_ids", None)
    if ids is None or not isinstance(dataset, CachedDataset):
        return ["a batch of conversations"]
    return [sample.image.path for sample in dataset.samples_of(ids.tolist())]


def _batches(run: Run, position: Position) -> Iterator[tuple[Any, int]]:
    """Yield the batches of the step after ``position`` on this process, each with its place in the epoch."""
    wanted = run.accelerator.gradient_accumulation_steps
    epoch, first = position.epoch, position.batches
    while wanted > 0:
        run.batches.set_position(epoch, first)
        read = 0
        for batch in islice(iter(run.loader), wanted):
            yield batch, first + read * dp_rank_and_size(run.accelerator)[1]
            read += 1
        wanted, epoch, first = wanted - read, epoch + 1, 0


def _samples(batch: Any) -> list[Any]:
    return [batch.only(i) for i in range(len(batch.sample_ids))] if isinstance(batch, Batch) else [batch]


def _look_at(run: Run, batch: Any, position: Position, batches: int) -> tuple[BadSample, bool]:
    """Return what one sample does in the step, and whether that is not finite."""
    torch.manual_seed(
        derive_seed(run.step.seed, "dropout", position.step, batches, dp_rank_and_size(run.accelerator)[0])
    )
    with contextlib.ExitStack() as stack:
        for model in run.models:
            stack.enter_context(run.accelerator.no_sync(model))
        seen = stack.enter_context(_watching(run.models))
        # DeepSpeed's engine would take in the gradients, so under ZeRO the model runs by itself
        by_itself = zero_stage(run.accelerator) > 0
        if run.pipeline is not None:
            loss, figures = run.forward_backward(batch, position.step)
        else:
            model = run.transformer if by_itself else run.model
            loss, figures = run.step.loss(model, batch, position.step)
        what, module = "loss", next(iter(_of_all_stages(run, list(seen))), None)
        is_bad = not bool(loss.isfinite())
        # of split weights all processes take part
        gradients: dict[str, Tensor] = {}
        if run.pipeline is None and (not is_bad or is_sharded(run.accelerator)):
            gradients = _gradients_of(run, loss, by_itself)
        elif run.pipeline is not None:
            gradients = _gradients(run)
        if not is_bad:
            what = "gradient norm"
            spoilt = _of_all_stages(run, [n for n, g in gradients.items() if not g.isfinite().all()])
            is_bad, module = bool(spoilt), module or (f"the gradient of {spoilt[-1]}" if spoilt else None)
        drop_gradients(run.optimizer)
    module = _bad_input(batch) or module
    figure = f"{run.step.figure.removesuffix('_mean')} {float(figures.mean()):.4g}"
    dataset, ids = run.loader.dataset, getattr(batch, "sample_ids", None)
    identity = None
    if ids is not None and isinstance(dataset, CachedDataset):
        identity = dataset.samples_of(ids.tolist())[0].identity
    return BadSample(sample_names(run, batch)[0], identity, figure, what, module), is_bad


def _gradients(run: Run) -> dict[str, Tensor]:
    """Return the gradients of what is trained, in the model's order."""
    return {name: p.grad for name, p in _trained(run).items() if p.grad is not None}


def _gradients_of(run: Run, loss: Tensor, by_itself: bool) -> dict[str, Tensor]:
    """Return the gradients of ``loss``; ``by_itself`` keeps an engine's hooks on parameters from seeing them."""
    if not by_itself:
        loss.backward()
        return _gradients(run)
    named = _trained(run)
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}


def _trained(run: Run) -> dict[str, Tensor]:
    return {
        f"{name}.{part}": parameter
        for name, layer in run.network.modules.items()
        for part, parameter in layer.trained().items()
    }


def _bad_input(batch: Any) -> str | None:
    """Return which of a sample's own tensors is not finite."""
    tensors = {"latents": batch.latents, **batch.text} if isinstance(batch, Batch) else {}
    broken = [name for name, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()]
    return f"the cached {broken[0]}" if broken else None


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


def _of_all_stages(run: Run, names: list[str]) -> list[str]:
    return names if run.pipeline is None else run.pipeline.gathered(names)


def _gathered(run: Run, values: list[Any]) -> list[Any]:
    return gather_object(values) if run.accelerator.num_processes > 1 else values


@dataclass(frozen=True)
class FaultPolicy:
    """What is done about a step that is not finite, how often in a row, and what to say when memory runs out."""

    policy: Policy = "stop"
    limit: int = 10
    memory_advice: str = "lower batch_size or resolution"

    def respond(self, run: Run, position: Position, end: Position, save: Callable[[Position], str | None]) -> str:
        """Go on after a bad step as the policy says; return what was done, in one line.

        Args:
            run: standing before the step.
            position: where that is; moved on as the policy says.
            end: where the step ended.
            save: keeps what was learnt so far; returns the LoRA's path, or None if there is nothing.

        Raises:
            UserError: the policy is to stop, there were too many bad steps in a row, or it lies in the weights.
        """
        cause = find_cause(run, position)
        position.nonfinite_in_row += 1
        position.updates_dropped += 1
        row = position.nonfinite_in_row
        if self.policy == "stop" or cause.weights or row > self.limit:
            raise refusal(cause, None if cause.weights else save(position), row)
        if self.policy == "skip":
            position.epoch, position.batches = end.epoch, end.batches
            return f"{cause}; its update is dropped ({position.updates_dropped} so far)"
        blamed = {one.identity: one.name for one in cause.faults or cause.suspects if one.identity is not None}
        position.skipped_samples += sorted(blamed.keys() - set(position.skipped_samples))
        exclude_samples(run, position)
        names = ", ".join(sorted(set(blamed.values())))
        return f"{cause}; left out from now on: {names}"


def out_of_memory(run: Run, batch: Any, step: int, saved: str | None, advice: str) -> UserError:
    """Return the one line with which a run ends whose batch does not fit into memory."""
    names = ", ".join(sample_names(run, batch)[:_NAMED])
    size = ""
    if isinstance(batch, Batch):
        factor = run.loader.dataset.latent_factor if isinstance(run.loader.dataset, CachedDataset) else 1
        height, width = (side * factor for side in batch.latents.shape[-2:])
        size = f" of {len(batch.sample_ids)} at {width}x{height}"
    kept = f"what was learnt before it is in {saved}" if saved else "nothing was saved"
    return UserError(f"out of memory in step {step}: the batch{size} ({names}) does not fit; {kept}; {advice}")


def refusal(cause: Cause, saved: str | None, row: int = 1) -> UserError:
    """Return the one line with which a run ends."""
    kept = f"what was learnt before it is in {saved}" if saved else "there was nothing to save"
    often = f"{row} steps in a row are not finite, the last: " if row > 1 else ""
    return UserError(f"{often}{cause}; {kept}; {remedy(cause)}")


def advice(config: TrainConfig | ChatTrainConfig) -> str:
    """Return which settings to change when a step does not fit, those first that cost least."""
    training, precision = config.training, config.precision
    options = []
    if not training.gradient_checkpointing:
        options.append("set gradient_checkpointing = true")
    options.append("lower batch_size (train_batch_size) or resolution")
    if not (precision.fp8_base or precision.fp8_scaled):
        options.append("set fp8_scaled = true")
    if hasattr(config, "dataset"):
        swapped = training.blocks_to_swap
        options.append(f"raise blocks_to_swap from {swapped}" if swapped else "set blocks_to_swap")
    return ", or ".join(options[:3])
