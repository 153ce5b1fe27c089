"""Whether a training step fits, found out before thousands of images are cached: real steps at the largest bucket.

The model is loaded as for the run, with LoRA, optimizer and memory policy; latents are noise of the right shape, one
caption (the longest) is encoded for its text. Two steps are taken, the second with the optimizer's state in place and,
with accumulation, gradients held beside the activations. First at a sixteenth and a quarter of the area: from what
these take the full step is estimated, so that a CPU run that would be killed for its memory is not started.

Then everything is let go of. Nothing of it reaches the run: it loads its networks anew, all its random numbers are
functions of seed and step, and the global generator and the loss scaler are put back. The price is loading the model
twice.

``memory = "auto"``: the fastest memory policy with which the largest batch fits, found by taking real steps.

From the fastest on: nothing is computed again; everything is, but for as much as the free memory keeps; the inputs of
blocks wait in host memory; frozen blocks do too. None of it changes a number of the training, so a run may go on under
another choice. A GPU without other work is what is measured: a twentieth is left free for what the allocator wastes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from PIL import Image
from rich.console import Console
from torch import Tensor, nn

from library.conditions import NO_CONDITIONS, Conditions
from library.config.schema import TrainConfig, TrainingConfig
from library.data.batches import Batch, Bucket
from library.data.cache import TextJob
from library.data.dataset import TrainingData
from library.data.samples import Sample
from library.errors import UserError
from library.models.family import Family
from library.models.text import TextEncoder
from library.randomness import generator
from library.training.checkpoint.state import Position
from library.training.guard.update_guard import build_guard
from library.training.memory.block_swap import kind_sizes, most_swapped
from library.training.memory.budget import Parts, available_bytes, in_words, is_out_of_memory, release, tensor_bytes
from library.training.optim.factory import unwrapped
from library.training.tasks.task import Task

Stub = dict[str, Tensor]
_SHARES = (4, 2)  # the first steps have so many times shorter sides


@dataclass(frozen=True)
class Trial:
    """What a step took.

    Attributes:
        parts: in bytes; None if not even small steps could be taken.
        fits: the step was taken, or on a CPU is estimated to fit.
        blocks, swappable: of the transformer, and how many of them may be swapped; 0 where host memory is the same.
    """

    parts: Parts | None
    fits: bool
    blocks: int = 0
    swappable: int = 0

    def within(self, share: float, limit: int) -> bool:
        """Whether the step fits with room to spare: into ``share`` of ``limit``."""
        return self.fits and self.parts is not None and self.parts.total <= share * limit


class ImageTask(Protocol):
    """``library.training.tasks.image_lora.ImageLora``, with its data read and nothing loaded."""

    config: TrainConfig
    accelerator: Accelerator
    family: Family
    text_encoder: TextEncoder
    data: TrainingData

    def trial(self, training: TrainingConfig) -> Task: ...


@dataclass(frozen=True)
class Rehearsal:
    """Takes steps ahead of a run, at its largest bucket."""

    task: ImageTask

    @cached_property
    def limit(self) -> int:
        """Bytes that there are, for this and every other process."""
        device = self.task.accelerator.device
        limits = torch.tensor([available_bytes(device)], dtype=torch.int64, device=device)
        return int(self.task.accelerator.gather(limits).min())  # all processes decide alike

    @cached_property
    def bucket(self) -> tuple[Sample, int]:
        """A sample of the largest bucket, and the batch size there."""
        return largest(self.task.data, self.task.family)

    @property
    def what(self) -> str:
        """The batch in words."""
        sample, size = self.bucket
        width, height = sample.fit.bucket
        return f"{size} at {width}x{height}"

    @cached_property
    def _text(self) -> Stub:
        return _text(self.task.text_encoder, self.task.data, self.bucket[0])

    def trial(self, training: TrainingConfig) -> Trial:
        """Take real steps under the memory policy of ``training``; everything is let go of again."""
        family, data, accelerator = self.task.family, self.task.data, self.task.accelerator
        device, (sample, size) = accelerator.device, self.bucket
        parts: Parts | None = None
        with _unnoticed(accelerator):
            try:
                text = self._text
                task = self.task.trial(training)
                blocks = family.blocks(task.transformer)
                small, parts = (
                    _measured(task, blocks, _batch(data, family, sample, text, size, share)) for share in _SHARES
                )
                parts = replace(parts, activations=_extrapolated(data, family, sample, small, parts))
                # a GPU says itself when it is full
                fits = parts.total <= self.limit * (1.2 if device.type == "cuda" else 1.0)
                if fits:
                    parts = _measured(task, blocks, _batch(data, family, sample, text, size, 1))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                fits = False
            if parts is None:
                blocks = []
            swappable = most_swapped(kind_sizes(blocks)) if device.type != "cpu" else 0
            trial = Trial(parts, fits, len(blocks), swappable)
            task = blocks = None  # type: ignore[assignment]
        return trial

    def refuse(self, trial: Trial, remedy: str) -> UserError:
        """Return the error with which a run ends whose step does not fit."""
        if trial.parts is None:
            return UserError(
                f"preflight: not even the model fits into {in_words(self.limit)}; set fp8_scaled = true or "
                "blocks_to_swap"
            )
        needed = in_words(trial.parts.total)
        return UserError(f"preflight: a step of {self.what} needs about {needed} of {in_words(self.limit)}; {remedy}")


def preflight(rehearsal: Rehearsal, console: Console) -> None:
    """Take real steps at the largest bucket and print what they take, by part.

    Raises:
        UserError: they do not fit; it names the settings that would, by estimate.
    """
    config, limit = rehearsal.task.config, rehearsal.limit
    trial = rehearsal.trial(config.training)
    parts = trial.parts
    if parts is None:
        raise rehearsal.refuse(trial, "")
    hidden = _hidden(parts, trial.blocks)
    others = suggestions(parts, limit, config, trial.blocks, rehearsal.bucket[1], hidden, trial.swappable)
    console.print(
        f"preflight: a step of {rehearsal.what} takes {parts.describe()}, of {in_words(limit)}", soft_wrap=True
    )
    if trial.within(0.95, limit):
        return
    for name, total, would_fit in others:
        console.print(f"  with {name}: about {in_words(total)}, {'fits' if would_fit else 'does not fit'}")
    if not trial.fits:
        fitting = [name for name, _, would_fit in others if would_fit]
        raise rehearsal.refuse(trial, f"set {fitting[0]}" if fitting else "lower resolution, or use a larger device")


def largest(data: TrainingData, family: Family) -> tuple[Sample, int]:
    """Return a sample of the bucket whose batches have most tokens, and the batch size."""
    sizes = data.train.batch_sizes
    counts = {bucket: data.train.buckets.count(bucket) for bucket in sizes}

    def tokens(bucket: Bucket) -> int:
        return min(sizes[bucket], counts[bucket]) * sum(width * height for width, height in bucket[1:])

    bucket = max(sizes, key=tokens)
    sample = next(
        one
        for one in data.train.samples
        if (one.group.dataset, one.fit.bucket, *(c.fit.encoded for c in one.controls)) == bucket
    )
    return sample, min(sizes[bucket], counts[bucket])


def _sides(data: TrainingData, family: Family, size: tuple[int, int], share: int) -> tuple[int, int]:
    """Height and width in latents of a picture with ``share`` times shorter sides, in whole patches."""
    unit = family.patch_size
    width, height = (max(1, side // data.latent_factor // unit // share) * unit for side in size)
    return height, width


def _area(data: TrainingData, family: Family, sample: Sample, share: int) -> float:
    sizes = [sample.fit.bucket, *(control.fit.encoded for control in sample.controls)]
    return float(sum(h * w for h, w in (_sides(data, family, size, share) for size in sizes)))


def _extrapolated(data: TrainingData, family: Family, sample: Sample, small: Parts, middle: Parts) -> int:
    """The activations of the full area, on the line through those of two smaller ones; the text's part is constant."""
    areas = [_area(data, family, sample, share) for share in (*_SHARES, 1)]
    if areas[1] == areas[0]:
        return middle.activations
    slope = (middle.activations - small.activations) / (areas[1] - areas[0])
    return round(middle.activations + max(slope, 0.0) * (areas[2] - areas[1]))


def _text(text_encoder: TextEncoder, data: TrainingData, sample: Sample) -> Stub:
    """The embeddings of the longest caption: from the cache where they are, else encoded."""
    caption = max(data.captions(), key=len)
    path = TextJob(caption).path(data.text_folder, text_encoder.fingerprint)
    if path.exists() and not text_encoder.sees_references:
        data.missing_text(text_encoder.fingerprint)
        return data.text_embeddings(caption)
    pictures = [Image.new("RGB", control.fit.encoded) for control in sample.controls]
    (embeddings,) = text_encoder.encode([caption], [pictures] if text_encoder.sees_references else None)
    text_encoder.release()
    return embeddings


def _batch(data: TrainingData, family: Family, sample: Sample, text: Stub, size: int, share: int) -> Batch:
    """A batch as the data loader gives it, of noise."""
    noise = generator("rehearsal")
    height, width = _sides(data, family, sample.fit.bucket, share)

    def latents(h: int, w: int) -> Tensor:
        return torch.randn(size, family.latent_channels, h, w, generator=noise)

    conditions = NO_CONDITIONS
    factor = data.latent_factor
    if data.conditioning == "fill":
        conditions = Conditions(latents(height, width), torch.ones(size, 1, height * factor, width * factor))
    elif data.conditioning == "references":
        sides = [_sides(data, family, control.fit.encoded, share) for control in sample.controls]
        conditions = Conditions(references=tuple(latents(*side) for side in sides))
    masks = torch.ones(size, 1, height, width) if data.has_regions else None
    batched = {name: tensor[None].expand(size, *tensor.shape).contiguous() for name, tensor in text.items()}
    ids = torch.arange(size)
    captions = [max(data.captions(), key=len)] * size
    return Batch(latents(height, width), batched, torch.ones(size), masks, ids, captions, conditions)


def _measured(task: Task, blocks: list[nn.Module], batch: Batch) -> Parts:
    """Take two steps on ``batch``; return what they take."""
    device, position, guard = task.accelerator.device, Position(), build_guard(task)
    batch = batch.to(device)
    activations = 0
    for model in task.models:
        model.train()
    for _ in range(2):
        guard.begin(position, None)
        for _ in range(min(2, task.accelerator.gradient_accumulation_steps)):
            with _held(device) as held:
                loss, _ = task.loss(task.models[0], batch, position.step)
                task.accelerator.backward(guard.nan_if_bad(loss))
            activations = max(activations, held())
            del loss
        limit = task.config.optimizer.max_grad_norm or float("inf")
        guard.update(task.accelerator.clip_grad_norm_(task.parameters(), limit), task.optimizer.step)
        task.optimizer.zero_grad()
        position.step += 1
        guard.end(position)
    return measured_parts(task, blocks, activations, device)


@contextlib.contextmanager
def _held(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many bytes the block held at most besides what there was before.

    On a GPU the allocator's peak. On a CPU, where nobody counts, what the forward pass keeps for the backward pass.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - before
        return
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or not tensor.is_leaf:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield lambda: sum(kept.values())


def _hidden(parts: Parts, blocks: int) -> int:
    """Bytes of one block's input, as a part of its activations.

    A transformer block with attention and a fourfold MLP keeps some 34 times its input for the backward pass
    (Korthikanti et al. 2022, arXiv 2205.05198, equation 2, without the scores that flash attention does not keep).
    """
    return parts.activations // (34 * max(blocks, 1))


@contextlib.contextmanager
def _unnoticed(accelerator: Accelerator) -> Iterator[None]:
    """Put back what the block changed of the process: generators, loss scaler, accelerate's lists and counts."""
    cpu, on_gpu = torch.get_rng_state(), torch.cuda.is_available()
    gpu = torch.cuda.get_rng_state_all() if on_gpu else []
    scaler = accelerator.scaler.state_dict() if accelerator.scaler is not None else None
    try:
        yield
    finally:
        accelerator.free_memory()
        release()
        if scaler is not None:
            accelerator.scaler.load_state_dict(scaler)
        torch.set_rng_state(cpu)
        if on_gpu:
            torch.cuda.set_rng_state_all(gpu)
            torch.cuda.reset_peak_memory_stats()


_ROOM = 0.95  # of the memory there is
_WORTH_KEEPING = 64 * 2**20  # bytes; less buys no time
_SWAP_TRIES = 3


def rehearsed(rehearsal: Rehearsal, console: Console) -> TrainConfig:
    """Return the run's configuration after a rehearsal, if one is due: as it was, or with memory's choice made.

    Raises:
        UserError: a step does not fit, whatever is chosen.
    """
    config = rehearsal.task.config
    if config.training.memory == "auto":
        chosen, trial = choose(rehearsal)
        assert trial.parts is not None
        said = ", ".join(f"{key} = {_toml(value)}" for key, value in _changes(chosen).items()) or "nothing recomputed"
        takes = f"{trial.parts.describe()}, of {in_words(rehearsal.limit)}"
        console.print(f"memory: {said}; a step of {rehearsal.what} takes {takes}", soft_wrap=True)
        return config.model_copy(update={"training": chosen})
    asked, on_gpu = config.training.preflight, rehearsal.task.accelerator.device.type == "cuda"
    if asked or (asked is None and on_gpu and not config.parallel.splits_model):
        preflight(rehearsal, console)
    return config


def choose(rehearsal: Rehearsal) -> tuple[TrainingConfig, Trial]:
    """Return the first policy that fits, fastest first, and the step that was taken with it.

    Raises:
        UserError: none does.
    """
    training, limit = rehearsal.task.config.training, rehearsal.limit
    whole = rehearsal.trial(training)
    if whole.within(_ROOM, limit):
        return training, whole
    recomputing = _with(training, gradient_checkpointing=True)
    least = rehearsal.trial(recomputing)
    if least.within(_ROOM, limit):
        return _keeping(rehearsal, recomputing, whole, least)
    last = least
    for candidate in _on_the_host(rehearsal, recomputing, least):
        last = rehearsal.trial(candidate)
        if last.within(_ROOM, limit):
            return candidate, last
    raise rehearsal.refuse(last, "set fp8_scaled = true, a smaller batch_size or a lower resolution")


def _keeping(
    rehearsal: Rehearsal, recomputing: TrainingConfig, whole: Trial, least: Trial
) -> tuple[TrainingConfig, Trial]:
    """Return ``recomputing`` with what the free memory can keep, if that is worth it and turns out to fit."""
    assert least.parts is not None
    room = int(_ROOM * rehearsal.limit) - least.parts.total
    if whole.parts is not None:
        room = min(room, whole.parts.activations - least.parts.activations)
    compiled = rehearsal.task.config.accelerate.torch_compile  # a compiled block does not show what it keeps
    if room >= _WORTH_KEEPING and not compiled:
        keeping = _with(recomputing, activation_budget_mb=room // 2**20)
        trial = rehearsal.trial(keeping)
        if trial.within(1.0, rehearsal.limit):
            return keeping, trial
    return recomputing, least


def _on_the_host(rehearsal: Rehearsal, recomputing: TrainingConfig, least: Trial) -> Iterator[TrainingConfig]:
    """Yield policies that use host memory, if that is another memory than the device's; the fastest first."""
    if rehearsal.task.accelerator.device.type == "cpu":
        return
    offloading = _with(recomputing, cpu_offload_checkpointing=True)
    yield offloading
    most = least.swappable
    if least.parts is None or not least.parts.block or not most or rehearsal.task.config.accelerate.torch_compile:
        return
    over = least.parts.total - _ROOM * rehearsal.limit
    swapped = max(1, -(-int(over) // least.parts.block))
    for attempt in range(_SWAP_TRIES):
        swapped = min(most, swapped + attempt * max(1, swapped // 4))
        yield _with(offloading, blocks_to_swap=swapped)
        if swapped == most:
            return


def _with(training: TrainingConfig, **changes: Any) -> TrainingConfig:
    return training.model_copy(update=changes)


def _changes(chosen: TrainingConfig) -> dict[str, Any]:
    """Return the keys of the choice that are not at their defaults, as they are written."""
    keys = ("gradient_checkpointing", "activation_budget_mb", "cpu_offload_checkpointing", "blocks_to_swap")
    values = {key: getattr(chosen, key) for key in keys}
    return {key: value for key, value in values.items() if value}


def _toml(value: Any) -> str:
    return str(value).lower()


def measured_parts(task: Task, blocks: list[nn.Module], activations: int, device: torch.device) -> Parts:
    """Return what a run's parts take after a step; gradients count as when they are there."""
    trained = task.parameters()
    ids = {id(p) for p in trained}
    models = [task.transformer, *task.models[1:]]
    frozen = [
        t
        for model in models
        for t in (*model.parameters(), *model.buffers())
        if id(t) not in ids and t.device.type == device.type
    ]
    optimizer = unwrapped(task.optimizer)
    state = [v for s in optimizer.state.values() if isinstance(s, Mapping) for v in s.values() if isinstance(v, Tensor)]
    lora, kept = tensor_bytes(trained), tensor_bytes(state)
    block = [t for t in (blocks[0].parameters() if blocks else ()) if id(t) not in ids]
    linears = [p for b in blocks for p in b.parameters() if id(p) not in ids and p.ndim == 2 and p.dtype.itemsize > 1]
    average = tensor_bytes(task.average.averages) if task.average is not None else 0
    return Parts(
        weights=tensor_bytes(frozen),
        lora=lora,
        gradients=lora,
        optimizer=kept + average,
        update=lora + kept + average,
        activations=activations,
        block=tensor_bytes(block),
        linears=tensor_bytes(linears),
        width=linears[0].dtype.itemsize if linears else 1,
    )


def suggestions(
    parts: Parts, limit: int, config: TrainConfig, blocks: int, batch_size: int, hidden: int, swappable: int
) -> list[tuple[str, int, bool]]:
    """Return settings that take less, each with its estimated total and whether that fits into ``limit``.

    Estimates: recomputing keeps every block's input (``hidden`` bytes) and one block's activations; a swapped block's
    weights leave the device; fp8 keeps one byte a weight; activations are proportional to the batch; 8-bit optimizers
    keep two bytes a weight where AdamW keeps eight. ``swappable``: the largest ``blocks_to_swap``.
    """
    training, estimates = config.training, list[tuple[str, int]]()

    def less(**changes: int) -> int:
        values = {"weights": parts.weights, "activations": parts.activations, "optimizer": parts.optimizer} | changes
        lasting = values["weights"] + parts.lora + parts.gradients + values["optimizer"]
        return lasting + max(values["activations"], parts.lora + values["optimizer"])

    recomputed = hidden * blocks + parts.activations // max(blocks, 1)
    if not training.gradient_checkpointing and recomputed < parts.activations:
        estimates.append(("gradient_checkpointing = true", less(activations=recomputed)))
    most = swappable
    can_swap = bool(parts.block) and not training.blocks_to_swap and most > 0
    if can_swap:
        over = parts.total - limit
        needed = min(most, max(1, -(-over // parts.block) if over > 0 else 1))
        estimates.append((f"blocks_to_swap = {needed}", less(weights=parts.weights - needed * parts.block)))
    if parts.linears and not (config.precision.fp8_base or config.precision.fp8_scaled):
        saved = parts.linears - parts.linears // parts.width
        estimates.append(("fp8_scaled = true", less(weights=parts.weights - saved)))
    if batch_size > 1:
        estimates.append(("batch_size = 1", less(activations=parts.activations // batch_size)))
    count = parts.lora // (2 if training.full_bf16 else 4)
    if parts.optimizer > 2 * count and "8bit" not in config.optimizer.optimizer_type.lower():
        estimates.append(('optimizer_type = "AdamW8bit"', less(optimizer=2 * count)))
    if len(estimates) > 1:
        low = recomputed if not training.gradient_checkpointing else parts.activations
        together = less(
            activations=low // batch_size,
            weights=max(parts.weights - most * parts.block, 0) if can_swap else parts.weights,
            optimizer=min(parts.optimizer, 2 * count),
        )
        estimates.append(("all of these" + (", and every block swapped" if can_swap else ""), together))
    return [(name, total, total <= limit) for name, total in estimates]
