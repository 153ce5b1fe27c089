"""Memory dry run: whether a training step fits, found out before thousands of images are cached.

Real steps at the largest bucket. The model is loaded as for the run, with LoRA, optimizer and memory policy; latents
are noise of the right shape, one caption (the longest) is encoded for its text. Two steps are taken, the second with
the optimizer's state in place and, with accumulation, gradients held beside the activations. First at a sixteenth and a
quarter of the area: from what these take the full step is extrapolated, so that a CPU run that would be killed for its
memory is not started. Then everything is freed. Nothing of it reaches the run: it loads its networks anew, all its
random numbers are functions of seed and step, and the global generator and the loss scaler are put back.

The price is loading the model twice. Where the option ``memory_dry_run`` is not set, a GPU run pays it only if it is in
doubt: ``estimator`` says from the files' headers what a step holds, and what clearly fits, or clearly does not, is not
tried; where that is not clear, the step is counted on fake tensors (``plan``), and only within a GiB of the limit real
ones decide.

``memory = "auto"``: the fastest memory policy with which the largest batch fits. From the fastest on: nothing is
recomputed; everything is, but for as much as the free memory keeps; the inputs of blocks wait in host memory; frozen
blocks do too. On a GPU each is counted on fake tensors (``plan``), a minute or two for a model at full depth the first
time; on a CPU and with several processes real steps are taken. None of it changes a number of the training, so a run
may be resumed under another choice. A twentieth of the memory is left free for what the allocator wastes.
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
from torch import Tensor

from library.conditions import NO_CONDITIONS, Conditions
from library.config.schema import ParallelConfig, TrainConfig, TrainingConfig
from library.console import Console
from library.data.batches import Batch
from library.data.cache import TextJob
from library.data.dataset import TrainingData
from library.data.samples import Sample
from library.errors import UserError
from library.models.family import Family
from library.models.text import TextEncoder
from library.randomness import generator
from library.safetensors_io import DamagedFile
from library.training.engine import Engine
from library.training.memory.block_swap import most_swapped, swappable
from library.training.memory.budget import (
    MemoryEstimate,
    available_bytes,
    in_words,
    is_out_of_memory,
    release,
    tensor_bytes,
)
from library.training.memory.estimator import ModelMemory, ModelShape, StepOptions, estimate, model_memory
from library.training.memory.plan import RESERVE, plan_memory
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
_CHOICES = ("gradient_checkpointing", "activation_budget_mb", "cpu_offload_checkpointing", "blocks_to_swap")


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
        accelerator, own = self.task.accelerator, available_bytes(self.task.accelerator.device)
        if accelerator.num_processes == 1:
            return own
        limits = torch.tensor([own], dtype=torch.int64, device=accelerator.device)
        return int(accelerator.gather(limits).min())  # all processes decide alike

    @cached_property
    def bucket(self) -> tuple[Sample, int]:
        """A sample of the largest bucket, and the batch size there."""
        return largest(self.task.data)

    @property
    def what(self) -> str:
        """The batch in words."""
        sample, size = self.bucket
        width, height = sample.fit.bucket
        return f"{size} at {width}x{height}"

    @cached_property
    def text(self) -> dict[str, Tensor]:
        """The embeddings of the longest caption: from the cache where they are, else encoded."""
        encoder, data = self.task.text_encoder, self.task.data
        caption = max(data.captions(), key=len)
        path = TextJob(caption).path(data.text_folder, encoder.fingerprint)
        if path.exists() and not encoder.sees_references:
            data.missing_text(encoder.fingerprint)
            with suppress(DamagedFile):  # it is encoded here, and again with the others
                return data.text_embeddings(caption)
        images = [Image.new("RGB", control.fit.encoded) for control in self.bucket[0].control_images]
        (embeddings,) = encoder.encode([caption], [images] if encoder.sees_references else None)
        encoder.release()
        return embeddings

    @cached_property
    def model(self) -> ModelMemory | None:
        """The model's numbers from its files' headers; None where the estimate does not know what is trained."""
        config, family = self.task.config, self.task.family
        if config.optimizer.text_encoder_lr or config.network.network_type != "lora" or config.network.dim_from_weights:
            return None
        (height, width), *references = self._sides(1)
        if sum(h * w for h, w in references) > height * width:  # the estimate has one reference of the image's size
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
            fp8=bool(config.precision.fp8_base or config.precision.fp8_scaled or self.task.family.quantized_file()),
            checkpointing=training.gradient_checkpointing,
            batch=size,
            base_bytes=self.task.dtype.itemsize,
            lora_bytes=2 if training.full_bf16 else 4,
            optimizer_bytes=2 if eight_bit else 8,
            swapped=training.blocks_to_swap,
            inputs_on_host=training.cpu_offload_checkpointing,
        )

    def estimate(self) -> MemoryEstimate | None:
        """Return what a step holds, from headers alone; None where that is not known."""
        return None if self.model is None else estimate(self.model, ParallelConfig(), self.options)

    @property
    def can_count(self) -> bool:
        """Whether this process has a GPU for itself, and is no walk on fake tensors."""
        device = self.task.accelerator.device
        on_card = device.type == "cuda" and type(torch.empty(0, device=device)) is Tensor
        return on_card and self.task.accelerator.num_processes == 1

    def counted(self, training: TrainingConfig) -> Measured | None:
        """Return what a step takes under the memory policy of ``training``, walked on fake tensors; None if not known.

        A policy that cannot run, as compiled blocks with some others, is not known either.
        """
        if not self.can_count:
            return None
        with suppress(UserError):
            config = self.task.config.model_copy(update={"training": _with(training, memory="manual")})
            plan = plan_memory(config, self.limit)
            memory = plan.step()
            return Measured(memory, memory.total + RESERVE <= self.limit, *plan.swappable)
        return None

    def swappable(self) -> tuple[int, int]:
        """How many blocks may be swapped, and bytes of one, by the files' headers; zeros where these do not say."""
        if self.model is None:
            return 0, 0
        sizes = [(part.count, part.weights) for part in self.model.blocks]
        return most_swapped(sizes), _swapped_bytes(self.model, self.options)

    def policy(self, training: TrainingConfig) -> Measured:
        """Return what a step takes under the memory policy of ``training``: counted where it can be, else taken."""
        return self.counted(training) or self.measure(training)

    def measure(self, training: TrainingConfig) -> Measured:
        """Take real steps under the memory policy of ``training``; everything is freed again."""
        family, accelerator = self.task.family, self.task.accelerator
        memory: MemoryEstimate | None = None
        with _restored(accelerator):
            try:
                task = self.task.trial(training)
                small, memory = (take_steps(task, self.batch(share)) for share in _SHARES)
                memory = replace(memory, activations=self._extrapolated(small, memory))
                # a GPU says itself when it is full
                fits = memory.total <= self.limit * (1.2 if accelerator.device.type == "cuda" else 1.0)
                if fits:
                    memory = take_steps(task, self.batch())
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                fits = False
            swaps = memory is not None and accelerator.device.type != "cpu"
            most, size = swappable(family.blocks(task.transformer)) if swaps else (0, 0)
            task = None  # type: ignore[assignment]
        return Measured(memory, fits, most, size)

    def takes(self, memory: MemoryEstimate) -> str:
        """Return in words what a step takes, and of how much."""
        return f"a step of {self.what} takes {memory.describe()}, of {in_words(self.limit)}"

    def refuse(self, memory: MemoryEstimate | None, remedy: str) -> UserError:
        """Return the error with which a run ends whose step does not fit."""
        room = in_words(self.limit)
        if memory is None:
            return UserError(
                f"memory dry run: not even the model fits into {room}; set fp8_scaled = true or blocks_to_swap"
            )
        return UserError(
            f"memory dry run: a step of {self.what} needs about {in_words(memory.total)} of {room}; {remedy}"
        )

    def _sides(self, share: int) -> list[tuple[int, int]]:
        """Height and width in latents of the image and its references, sides ``share`` times shorter, whole patches."""
        (sample, _), unit, factor = self.bucket, self.task.family.patch_size, self.task.data.latent_factor
        sizes = [sample.fit.bucket, *(control.fit.encoded for control in sample.control_images)]
        cut = [[max(1, side // factor // unit // share) * unit for side in size] for size in sizes]
        return [(height, width) for width, height in cut]

    def _extrapolated(self, small: MemoryEstimate, middle: MemoryEstimate) -> int:
        """The activations of the full area, on the line through those of two smaller ones; the text's are constant."""
        areas = [sum(h * w for h, w in self._sides(share)) for share in (*_SHARES, 1)]
        if areas[1] == areas[0]:
            return middle.activations
        slope = (middle.activations - small.activations) / (areas[1] - areas[0])
        return round(middle.activations + max(slope, 0.0) * (areas[2] - areas[1]))

    def batch(self, share: int = 1) -> Batch:
        """A batch as the data loader gives it, of noise; with sides ``share`` times shorter."""
        data, (_, size), noise = self.task.data, self.bucket, generator("memory dry run")
        channels, factor = self.task.family.latent_channels, data.latent_factor
        (height, width), *references = self._sides(share)

        def latents(h: int, w: int) -> Tensor:
            return torch.randn(size, channels, h, w, generator=noise)

        conditions = NO_CONDITIONS
        if data.conditioning == "fill":
            conditions = Conditions(latents(height, width), torch.ones(size, 1, height * factor, width * factor))
        elif data.conditioning == "references":
            conditions = Conditions(references=tuple(latents(*side) for side in references))
        masks = torch.ones(size, 1, height, width) if data.has_regions else None
        text = {name: tensor[None].expand(size, *tensor.shape).contiguous() for name, tensor in self.text.items()}
        captions = [max(data.captions(), key=len)] * size
        return Batch(latents(height, width), text, torch.ones(size), masks, list(range(size)), captions, conditions)


def fit_memory(probe: MemoryProbe, console: Console) -> TrainingConfig:
    """Return the section ``training`` after a memory dry run, if one is due: as it was, or with memory's choice made.

    Raises:
        UserError: a step does not fit, whatever is chosen.
    """
    config = probe.task.config
    if config.training.memory == "auto":
        chosen, measured = choose(probe)
        assert measured.memory is not None
        values = ((key, getattr(chosen, key)) for key in _CHOICES)
        said = ", ".join(f"{key} = {str(value).lower()}" for key, value in values if value) or "nothing recomputed"
        console.print(f"memory: {said}; {probe.takes(measured.memory)}", soft_wrap=True)
        return chosen
    asked, on_gpu = config.training.memory_dry_run, probe.task.accelerator.device.type == "cuda"
    if asked or (asked is None and on_gpu and not config.parallel.splits_model and _in_doubt(probe, console)):
        _check_fits(probe, console)
    return config.training


def _in_doubt(probe: MemoryProbe, console: Console) -> bool:
    """Whether only real steps can tell if a step fits; say so where the estimate can.

    Raises:
        UserError: it clearly does not.
    """
    memory, limit, how = probe.estimate(), probe.limit, "estimated"
    if memory is None or _CLEARLY_FITS * limit < memory.total < _CLEARLY_TOO_MUCH * limit:
        found = probe.counted(probe.task.config.training)
        if found is None or found.memory is None or found.memory.total <= limit < found.memory.total + RESERVE:
            return True
        memory, how = found.memory, "counted"
    console.print(
        f"memory dry run: a step of {probe.what} is {how} at {memory.describe()}, of {in_words(limit)}; no dry run",
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
    console.print(f"memory dry run: {probe.takes(measured.memory)}", soft_wrap=True)
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


def suggestions(
    measured: MemoryEstimate, model: ModelMemory, options: StepOptions, limit: int, swappable: int
) -> list[tuple[str, int, bool]]:
    """Return settings that take less than a step that was measured, each with its total and whether that fits.

    A setting's total is the measured one and the difference of two estimates. ``swappable``: blocks that may be.
    """

    def total(**change: Any) -> int:
        return measured.total + estimate(model, ParallelConfig(), replace(options, **change)).total - now.total

    now = estimate(model, ParallelConfig(), options)
    block = 0 if options.swapped else _swapped_bytes(model, options)
    changes: dict[str, dict[str, Any]] = {"gradient_checkpointing = true": {"checkpointing": True}}
    swaps = bool(swappable and block)
    if swaps:
        needed = min(swappable, max(1, -(-(measured.total - limit) // block)))
        changes[f"blocks_to_swap = {needed}"] = {"swapped": needed}
    changes["fp8_scaled = true"] = {"fp8": True}
    changes["batch_size = 1"] = {"batch": 1}
    changes['optimizer_type = "AdamW8bit"'] = {"optimizer_bytes": 2}
    changes = {name: change for name, change in changes.items() if replace(options, **change) != options}
    if len(changes) > 1:
        together = {key: value for change in changes.values() for key, value in change.items()}
        together |= {"swapped": swappable} if swaps else {}
        changes["all of these" + (", and every block swapped" if swaps else "")] = together
    totals = {name: total(**change) for name, change in changes.items()}
    return [(name, total, total <= limit) for name, total in totals.items() if total < measured.total]


def _swapped_bytes(model: ModelMemory, options: StepOptions) -> int:
    """Return how much smaller the weights become with the first block that is swapped."""
    none, one = (estimate(model, ParallelConfig(), replace(options, swapped=count)).weights for count in (0, 1))
    return none - one


def largest(data: TrainingData) -> tuple[Sample, int]:
    """Return a sample of the bucket whose batches have most tokens, and the batch size."""
    sizes = {bucket: min(size, data.train.buckets.count(bucket)) for bucket, size in data.train.batch_sizes.items()}
    bucket = max(sizes, key=lambda bucket: sizes[bucket] * sum(width * height for width, height in bucket[1:]))
    return data.train.samples[data.train.sample_buckets.index(bucket)], sizes[bucket]


def take_steps(task: Task, batch: Batch, steps: int = 2) -> MemoryEstimate:
    """Take ``steps`` on ``batch``; return what they take."""
    device = task.accelerator.device
    engine = Engine(
        task.accelerator, task.optimizer, task.lr_schedule, task.parameters(), task.average, task.after_update
    )
    batch = batch.to(device)
    activations = 0
    for model in task.models:
        model.train()
    for step in range(steps):
        for _ in range(min(2, task.accelerator.gradient_accumulation_steps)):
            with _peak_bytes(device) as peak:
                task.forward_backward(batch, step, engine.nan_if_bad)
            activations = max(activations, peak())
        engine.update(task.clip_gradients(step))
        engine.settle()
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
    scaler, gpus = accelerator.scaler, torch.cuda.device_count()
    before = None if scaler is None else scaler.state_dict()
    with torch.random.fork_rng(range(gpus)):
        try:
            yield
        finally:
            accelerator.free_memory()
            release()
            if scaler is not None:
                scaler.load_state_dict(before)
            if gpus:
                torch.cuda.reset_peak_memory_stats()


def choose(probe: MemoryProbe) -> tuple[TrainingConfig, Measured]:
    """Return the first policy that fits, fastest first, and what a step takes with it.

    Raises:
        UserError: none does.
    """
    training, limit = probe.task.config.training, probe.limit
    fastest = probe.policy(training)
    if fastest.within(_ROOM, limit):
        return training, fastest
    recomputing = _with(training, gradient_checkpointing=True)
    least = probe.policy(recomputing)
    if least.within(_ROOM, limit):
        return _keeping(probe, recomputing, fastest, least)
    last = least
    for candidate in _on_the_host(probe, recomputing, least):
        last = probe.policy(candidate)
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
        measured = probe.policy(keeping)
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
        yield _with(offloading, blocks_to_swap=swapped)
        if swapped == most:
            return


def _with(training: TrainingConfig, **changes: Any) -> TrainingConfig:
    return training.model_copy(update=changes)


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
        activations=activations,
    )
