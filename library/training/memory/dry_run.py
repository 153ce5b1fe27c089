"""Memory dry run: whether a training step fits, found out before thousands of images are cached.

Real steps at the largest bucket. The model is loaded as for the run, with LoRA, optimizer and memory policy; latents
are noise of the right shape, one caption (the longest) is encoded for its text. Two steps are taken, the second with
the optimizer's state in place and, with accumulation, gradients held beside the activations. First at a sixteenth and a
quarter of the area: from what these take the full step is extrapolated, so that a CPU run that would be killed for its
memory is not started. Then everything is freed. Nothing of it reaches the run: it loads its networks anew, all its
random numbers are functions of seed and step, and the global generator and the loss scaler are put back.

The price is loading the model twice. Where the option ``preflight`` is not set, a GPU run pays it only if it is in
doubt: ``estimator`` says from the files' headers what a step holds, and what clearly fits, or clearly does not, is not
tried.

``memory = "auto"``: the fastest memory policy with which the largest batch fits, found by real steps. From the fastest
on: nothing is recomputed; everything is, but for as much as the free memory keeps; the inputs of blocks wait in host
memory; frozen blocks do too. None of it changes a number of the training, so a run may be resumed under another choice.
A GPU without other work is what is measured: a twentieth is left free for what the allocator wastes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from PIL import Image
from rich.console import Console
from torch import Tensor

from library.conditions import NO_CONDITIONS, Conditions
from library.config.schema import ParallelConfig, TrainConfig, TrainingConfig
from library.data.batches import Batch, Bucket
from library.data.cache import TextJob
from library.data.dataset import TrainingData
from library.data.samples import Sample
from library.errors import UserError
from library.models.family import Family
from library.models.text import TextEncoder
from library.randomness import generator
from library.training.checkpoint.state import Position
from library.training.guard.update_guard import UpdateGuard
from library.training.memory.block_swap import SWAP_OPTION, kind_sizes, most_swapped, swapped_blocks
from library.training.memory.budget import (
    MemoryEstimate,
    available_bytes,
    in_words,
    is_out_of_memory,
    release,
    tensor_bytes,
)
from library.training.memory.estimator import ModelMemory, ModelShape, StepOptions, estimate, model_memory, suggestions
from library.training.optim.factory import unwrapped
from library.training.tasks.task import Task

_SHARES = (4, 2)  # the first steps have so many times shorter sides
_TEXT_TOKENS = 512  # of a caption, as most: T5's for FLUX
# Of the memory there is. The estimate was within 5 % of what steps held (tests/training/memory/test_estimator.py), and
# knows nothing of the CUDA context, fragments, averages or other processes.
_CLEARLY_FITS, _CLEARLY_TOO_MUCH = 0.75, 1.5
_ROOM = 0.95  # of the memory there is
_WORTH_KEEPING = 64 * 2**20  # bytes; less buys no time
_SWAP_TRIES = 3


@dataclass(frozen=True)
class Measured:
    """What steps under a memory policy took.

    Attributes:
        memory: None if not even small steps could be taken.
        fits: the step was taken, or on a CPU is extrapolated to fit.
        swappable: how many blocks may be swapped; 0 where host memory is the same.
        block: bytes of a block's frozen weights.
    """

    memory: MemoryEstimate | None
    fits: bool
    swappable: int = 0
    block: int = 0

    def within(self, share: float, limit: int) -> bool:
        """Whether the step fits with room to spare: into ``share`` of ``limit``."""
        return self.fits and self.memory is not None and self.memory.total <= share * limit


class ImageTask(Protocol):
    """``library.training.tasks.image_lora.ImageLora``, with its data read and nothing loaded."""

    config: TrainConfig
    accelerator: Accelerator
    family: Family
    dtype: torch.dtype
    text_encoder: TextEncoder
    data: TrainingData

    def trial(self, training: TrainingConfig) -> Task: ...


@dataclass(frozen=True)
class MemoryProbe:
    """Estimates and takes steps ahead of a run, at its largest bucket."""

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
    def _text(self) -> dict[str, Tensor]:
        return _text(self.task.text_encoder, self.task.data, self.bucket[0])

    @cached_property
    def model(self) -> ModelMemory | None:
        """The model's numbers from its files' headers; None where the estimate does not know what is trained."""
        config, family, (sample, _) = self.task.config, self.task.family, self.bucket
        if config.optimizer.text_encoder_lr or config.network.network_type != "lora" or config.network.dim_from_weights:
            return None
        height, width = _sides(self.task.data, family, sample.fit.bucket, 1)
        if _area(self.task.data, family, sample, 1) > 2 * height * width:  # the estimate has one reference of its size
            return None
        tokens = height * width // family.patch_size**2
        shape = ModelShape(family.name, family.files.transformer_config)
        dtype, autocast = self.task.dtype, config.training.mixed_precision != "no"
        if dtype != torch.float32 and not autocast:
            return None
        with suppress(UserError):
            return model_memory(shape, tokens, _TEXT_TOKENS, config.network.network_dim, dtype, autocast)
        return None

    @property
    def options(self) -> StepOptions:
        """The step as the configuration asks for it."""
        config, training, (_, size) = self.task.config, self.task.config.training, self.bucket
        eight_bit = "8bit" in config.optimizer.optimizer_type.lower()
        return StepOptions(
            fp8=bool(config.precision.fp8_base or config.precision.fp8_scaled or self.task.family.fp8_layout()),
            checkpointing=training.gradient_checkpointing,
            batch=size,
            base_bytes=self.task.dtype.itemsize,
            lora_bytes=2 if training.full_bf16 else 4,
            optimizer_bytes=2 if eight_bit else 8,
            swapped=swapped_blocks(training),
            inputs_on_host=training.cpu_offload_checkpointing,
        )

    def estimate(self) -> MemoryEstimate | None:
        """Return what a step holds, from headers alone; None where that is not known."""
        return None if self.model is None else estimate(self.model, ParallelConfig(), self.options)

    def measure(self, training: TrainingConfig) -> Measured:
        """Take real steps under the memory policy of ``training``; everything is freed again."""
        family, data, accelerator = self.task.family, self.task.data, self.task.accelerator
        device, (sample, size) = accelerator.device, self.bucket
        memory: MemoryEstimate | None = None
        with _restored(accelerator):
            try:
                text = self._text
                task = self.task.trial(training)
                small, memory = (_steps(task, _batch(data, family, sample, text, size, share)) for share in _SHARES)
                memory = replace(memory, activations=_extrapolated(data, family, sample, small, memory))
                # a GPU says itself when it is full
                fits = memory.total <= self.limit * (1.2 if device.type == "cuda" else 1.0)
                if fits:
                    memory = _steps(task, _batch(data, family, sample, text, size, 1))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                fits = False
            blocks = family.blocks(task.transformer) if memory is not None else []
            swappable = most_swapped(kind_sizes(blocks)) if device.type != "cpu" else 0
            frozen = [p for p in (blocks[0].parameters() if blocks else ()) if not p.requires_grad]
            measured = Measured(memory, fits, swappable, tensor_bytes(frozen))
            task = blocks = frozen = None  # type: ignore[assignment]
        return measured

    def refuse(self, memory: MemoryEstimate | None, remedy: str) -> UserError:
        """Return the error with which a run ends whose step does not fit."""
        if memory is None:
            return UserError(
                f"preflight: not even the model fits into {in_words(self.limit)}; set fp8_scaled = true or "
                f"{SWAP_OPTION}"
            )
        needed = in_words(memory.total)
        return UserError(f"preflight: a step of {self.what} needs about {needed} of {in_words(self.limit)}; {remedy}")


def fit_memory(probe: MemoryProbe, console: Console) -> TrainingConfig:
    """Return the section ``training`` after a memory dry run, if one is due: as it was, or with memory's choice made.

    Raises:
        UserError: a step does not fit, whatever is chosen.
    """
    config = probe.task.config
    if config.training.memory == "auto":
        chosen, measured = choose(probe)
        assert measured.memory is not None
        said = ", ".join(f"{key} = {_toml(value)}" for key, value in _changes(chosen).items()) or "nothing recomputed"
        takes = f"{measured.memory.describe()}, of {in_words(probe.limit)}"
        console.print(f"memory: {said}; a step of {probe.what} takes {takes}", soft_wrap=True)
        return chosen
    asked, on_gpu = config.training.preflight, probe.task.accelerator.device.type == "cuda"
    if asked or (asked is None and on_gpu and not config.parallel.splits_model and _in_doubt(probe, console)):
        _check_fits(probe, console)
    return config.training


def _in_doubt(probe: MemoryProbe, console: Console) -> bool:
    """Whether only real steps can tell if a step fits; say so where the estimate can.

    Raises:
        UserError: it clearly does not.
    """
    memory, limit = probe.estimate(), probe.limit
    if memory is None or _CLEARLY_FITS * limit < memory.total < _CLEARLY_TOO_MUCH * limit:
        return True
    console.print(
        f"preflight: a step of {probe.what} is estimated at {memory.describe()}, of {in_words(limit)}; no dry run",
        soft_wrap=True,
    )
    if memory.total < limit:
        return False
    raise _too_much(probe, memory, 0, console)


def _check_fits(probe: MemoryProbe, console: Console) -> None:
    """Take real steps at the largest bucket and print what they take, by part.

    Raises:
        UserError: they do not fit; it names the settings that would, by estimate.
    """
    measured = probe.measure(probe.task.config.training)
    if measured.memory is None:
        raise probe.refuse(None, "")
    takes = f"{measured.memory.describe()}, of {in_words(probe.limit)}"
    console.print(f"preflight: a step of {probe.what} takes {takes}", soft_wrap=True)
    if not measured.within(_ROOM, probe.limit):
        error = _too_much(probe, measured.memory, measured.swappable, console)
        if not measured.fits:
            raise error


def _too_much(probe: MemoryProbe, memory: MemoryEstimate, swappable: int, console: Console) -> UserError:
    """Print the settings that take less; return the error that names the first that fits."""
    others = suggestions(memory, probe.model, probe.options, probe.limit, swappable) if probe.model else []
    for name, total, would_fit in others:
        console.print(f"  with {name}: about {in_words(total)}, {'fits' if would_fit else 'does not fit'}")
    fitting = [name for name, _, would_fit in others if would_fit]
    return probe.refuse(memory, f"set {fitting[0]}" if fitting else "lower resolution, or use a larger device")


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
        if (one.group.dataset, one.fit.bucket, *(c.fit.encoded for c in one.control_images)) == bucket
    )
    return sample, min(sizes[bucket], counts[bucket])


def _sides(data: TrainingData, family: Family, size: tuple[int, int], share: int) -> tuple[int, int]:
    """Height and width in latents of an image with ``share`` times shorter sides, in whole patches."""
    unit = family.patch_size
    width, height = (max(1, side // data.latent_factor // unit // share) * unit for side in size)
    return height, width


def _area(data: TrainingData, family: Family, sample: Sample, share: int) -> float:
    sizes = [sample.fit.bucket, *(control.fit.encoded for control in sample.control_images)]
    return float(sum(h * w for h, w in (_sides(data, family, size, share) for size in sizes)))


def _extrapolated(
    data: TrainingData, family: Family, sample: Sample, small: MemoryEstimate, middle: MemoryEstimate
) -> int:
    """The activations of the full area, on the line through those of two smaller ones; the text's part is constant."""
    areas = [_area(data, family, sample, share) for share in (*_SHARES, 1)]
    if areas[1] == areas[0]:
        return middle.activations
    slope = (middle.activations - small.activations) / (areas[1] - areas[0])
    return round(middle.activations + max(slope, 0.0) * (areas[2] - areas[1]))


def _text(text_encoder: TextEncoder, data: TrainingData, sample: Sample) -> dict[str, Tensor]:
    """The embeddings of the longest caption: from the cache where they are, else encoded."""
    caption = max(data.captions(), key=len)
    path = TextJob(caption).path(data.text_folder, text_encoder.fingerprint)
    if path.exists() and not text_encoder.sees_references:
        data.missing_text(text_encoder.fingerprint)
        return data.text_embeddings(caption)
    images = [Image.new("RGB", control.fit.encoded) for control in sample.control_images]
    (embeddings,) = text_encoder.encode([caption], [images] if text_encoder.sees_references else None)
    text_encoder.release()
    return embeddings


def _batch(data: TrainingData, family: Family, sample: Sample, text: dict[str, Tensor], size: int, share: int) -> Batch:
    """A batch as the data loader gives it, of noise."""
    noise = generator("memory dry run")
    height, width = _sides(data, family, sample.fit.bucket, share)

    def latents(h: int, w: int) -> Tensor:
        return torch.randn(size, family.latent_channels, h, w, generator=noise)

    conditions = NO_CONDITIONS
    factor = data.latent_factor
    if data.conditioning == "fill":
        conditions = Conditions(latents(height, width), torch.ones(size, 1, height * factor, width * factor))
    elif data.conditioning == "references":
        sides = [_sides(data, family, control.fit.encoded, share) for control in sample.control_images]
        conditions = Conditions(references=tuple(latents(*side) for side in sides))
    masks = torch.ones(size, 1, height, width) if data.has_regions else None
    batched = {name: tensor[None].expand(size, *tensor.shape).contiguous() for name, tensor in text.items()}
    ids = torch.arange(size)
    captions = [max(data.captions(), key=len)] * size
    return Batch(latents(height, width), batched, torch.ones(size), masks, ids, captions, conditions)


def _steps(task: Task, batch: Batch) -> MemoryEstimate:
    """Take two steps on ``batch``; return what they take."""
    device, position, guard = task.accelerator.device, Position(), UpdateGuard(task)
    batch = batch.to(device)
    activations = 0
    for model in task.models:
        model.train()
    for _ in range(2):
        guard.begin(position, None)
        for _ in range(min(2, task.accelerator.gradient_accumulation_steps)):
            with _peak_bytes(device) as peak:
                loss, _ = task.loss(task.models[0], batch, position.step)
                task.accelerator.backward(guard.nan_if_bad(loss))
            activations = max(activations, peak())
            del loss
        limit = task.config.optimizer.max_grad_norm or float("inf")
        guard.update(task.accelerator.clip_grad_norm_(task.parameters(), limit), lambda _: task.optimizer.step())
        task.optimizer.zero_grad()
        position.step += 1
        guard.end(position)
    return measured_memory(task, activations, device)


@contextlib.contextmanager
def _peak_bytes(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many bytes the block held at most besides what there was before.

    On a GPU the allocator's peak. On a CPU, where nobody counts, what the forward pass keeps for the backward pass.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield lambda: torch.cuda.max_memory_allocated(device) - before
        return
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or not tensor.is_leaf:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield lambda: sum(saved.values())


@contextlib.contextmanager
def _restored(accelerator: Accelerator) -> Iterator[None]:
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


def choose(probe: MemoryProbe) -> tuple[TrainingConfig, Measured]:
    """Return the first policy that fits, fastest first, and the step that was taken with it.

    Raises:
        UserError: none does.
    """
    training, limit = probe.task.config.training, probe.limit
    fastest = probe.measure(training)
    if fastest.within(_ROOM, limit):
        return training, fastest
    recomputing = _with(training, gradient_checkpointing=True)
    least = probe.measure(recomputing)
    if least.within(_ROOM, limit):
        return _keeping(probe, recomputing, fastest, least)
    last = least
    for candidate in _on_the_host(probe, recomputing, least):
        last = probe.measure(candidate)
        if last.within(_ROOM, limit):
            return candidate, last
    raise probe.refuse(last.memory, "set fp8_scaled = true, a smaller batch_size or a lower resolution")


def _keeping(
    probe: MemoryProbe, recomputing: TrainingConfig, fastest: Measured, least: Measured
) -> tuple[TrainingConfig, Measured]:
    """Return ``recomputing`` with what the free memory can keep, if that is worth it and turns out to fit."""
    assert least.memory is not None
    room = int(_ROOM * probe.limit) - least.memory.total
    if fastest.memory is not None:
        room = min(room, fastest.memory.activations - least.memory.activations)
    compiled = probe.task.config.accelerate.torch_compile  # a compiled block does not show what it keeps
    if room >= _WORTH_KEEPING and not compiled:
        keeping = _with(recomputing, activation_budget_mb=room // 2**20)
        measured = probe.measure(keeping)
        if measured.within(1.0, probe.limit):
            return keeping, measured
    return recomputing, least


def _on_the_host(probe: MemoryProbe, recomputing: TrainingConfig, least: Measured) -> Iterator[TrainingConfig]:
    """Yield policies that use host memory, if that is another memory than the device's; the fastest first."""
    if probe.task.accelerator.device.type == "cpu":
        return
    offloading = _with(recomputing, cpu_offload_checkpointing=True)
    yield offloading
    most = least.swappable
    if least.memory is None or not least.block or not most or probe.task.config.accelerate.torch_compile:
        return
    over = least.memory.total - _ROOM * probe.limit
    swapped = max(1, -(-int(over) // least.block))
    for attempt in range(_SWAP_TRIES):
        swapped = min(most, swapped + attempt * max(1, swapped // 4))
        yield _with(offloading, **{SWAP_OPTION: swapped})
        if swapped == most:
            return


def _with(training: TrainingConfig, **changes: Any) -> TrainingConfig:
    return training.model_copy(update=changes)


def _changes(chosen: TrainingConfig) -> dict[str, Any]:
    """Return the keys of the choice that are not at their defaults, as they are written."""
    keys = ("gradient_checkpointing", "activation_budget_mb", "cpu_offload_checkpointing", SWAP_OPTION)
    values = {key: getattr(chosen, key) for key in keys}
    return {key: value for key, value in values.items() if value}


def _toml(value: Any) -> str:
    return str(value).lower()


def measured_memory(task: Task, activations: int, device: torch.device) -> MemoryEstimate:
    """Return what a run's parts take after a step; gradients count as when they are there."""
    trained = task.parameters()
    ids = {id(p) for p in trained}
    models = [task.transformer, *task.models[1:]]
    tensors = (t for model in models for t in (*model.parameters(), *model.buffers()))
    frozen = [t for t in tensors if id(t) not in ids and t.device.type == device.type]
    optimizer = unwrapped(task.optimizer)
    state = [v for s in optimizer.state.values() if isinstance(s, Mapping) for v in s.values() if isinstance(v, Tensor)]
    lora, held = tensor_bytes(trained), tensor_bytes(state)
    average = tensor_bytes(task.average.averages) if task.average is not None else 0
    return MemoryEstimate(
        weights=tensor_bytes(frozen),
        lora=lora,
        gradients=lora,
        optimizer=held + average,
        update=lora + held + average,
        activations=activations,
    )
