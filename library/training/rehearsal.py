"""Whether a training step fits, found out before thousands of images are cached: real steps at the largest bucket.

The model is loaded as for the run, with LoRA, optimizer and memory policy; latents are noise of the right shape, one
caption (the longest) is encoded for its text. Two steps are taken, the second with the optimizer's state in place and,
with accumulation, gradients held beside the activations. First at a sixteenth and a quarter of the area: from what
these take the full step is estimated, so that a CPU run that would be killed for its memory is not started.

Then everything is let go of. Nothing of it reaches the run: it loads its networks anew, all its random numbers are
functions of seed and step, and the global generator and the loss scaler are put back. The price is loading the model
twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

from library.conditions import NO_CONDITIONS, Conditions
from library.data.batches import Batch
from library.data.order import Bucket
from library.data.samples import Sample
from library.data.text_cache import TextJob
from library.errors import UserError
from library.randomness import generator
from library.training.base_precision import plan_fp8
from library.training.block_swap import kinds_of, most_swapped
from library.training.checkpoint import Position
from library.training.memory import (
    Parts,
    available_bytes,
    in_words,
    is_out_of_memory,
    measured_parts,
    release,
    suggestions,
)
from library.training.prepare import Networks, prepare_networks
from library.training.run import Run, prepare_run
from library.training.update_guard import UpdateGuard

if TYPE_CHECKING:
    from accelerate import Accelerator

    from library.config.schema import TrainConfig, TrainingConfig
    from library.data.dataset import TrainingData
    from library.models.protocol import Family, TextEncoder
    from library.training.network_plan import NetworkPlan

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


@dataclass(frozen=True)
class Rehearsal:
    """Takes steps ahead of a run, at its largest bucket.

    Attributes:
        config, family, plan, text_encoder, dtype, accelerator, data: of the run.
    """

    config: TrainConfig
    family: Family
    plan: NetworkPlan
    text_encoder: TextEncoder
    dtype: torch.dtype
    accelerator: Accelerator
    data: TrainingData

    @cached_property
    def limit(self) -> int:
        """Bytes that there are, for this and every other process."""
        device = self.accelerator.device
        limits = torch.tensor([available_bytes(device)], dtype=torch.int64, device=device)
        return int(self.accelerator.gather(limits).min())  # all processes decide alike

    @cached_property
    def bucket(self) -> tuple[Sample, int]:
        """A sample of the largest bucket, and the batch size there."""
        return largest(self.data, self.family)

    @property
    def what(self) -> str:
        """The batch in words."""
        sample, size = self.bucket
        width, height = sample.fit.bucket
        return f"{size} at {width}x{height}"

    @cached_property
    def _text(self) -> Stub:
        return _text(self.text_encoder, self.data, self.bucket[0])

    def trial(self, training: TrainingConfig) -> Trial:
        """Take real steps under the memory policy of ``training``; everything is let go of again."""
        config, family, data, accelerator = self.config, self.family, self.data, self.accelerator
        device, (sample, size) = accelerator.device, self.bucket
        config = config.model_copy(update={"training": training})
        parts: Parts | None = None
        with _unnoticed(accelerator):
            try:
                text = self._text
                fp8 = plan_fp8(config.precision, family.fp8_layout(), training.seed, device)
                networks = prepare_networks(
                    family, self.text_encoder, self.plan, config.network, training, self.dtype, device,
                    Console(quiet=True), fp8,
                )  # fmt: skip
                run = prepare_run(config, family, self.plan, networks, data, accelerator)
                small, parts = (
                    _measured(run, family, networks, _batch(data, family, sample, text, size, share))
                    for share in _SHARES
                )
                parts = replace(parts, activations=_extrapolated(data, family, sample, small, parts))
                # a GPU says itself when it is full
                fits = parts.total <= self.limit * (1.2 if device.type == "cuda" else 1.0)
                if fits:
                    parts = _measured(run, family, networks, _batch(data, family, sample, text, size, 1))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                fits = False
            blocks = family.blocks(networks.transformer) if parts is not None else []
            swappable = most_swapped([len(kind) for kind in kinds_of(blocks)]) if device.type != "cpu" else 0
            trial = Trial(parts, fits, len(blocks), swappable)
            run = networks = blocks = None  # type: ignore[assignment]
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
    config, limit = rehearsal.config, rehearsal.limit
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


def _measured(run: Run, family: Family, networks: Networks, batch: Batch) -> Parts:
    """Take two steps on ``batch``; return what they take."""
    device, position, guard = run.accelerator.device, Position(), UpdateGuard(run)
    batch = batch.to(device)
    activations = 0
    for model in run.models:
        model.train()
    for _ in range(2):
        guard.begin(position, None)
        for _ in range(min(2, run.accelerator.gradient_accumulation_steps)):
            with _held(device) as held:
                loss, _ = run.step.loss(run.model, batch, position.step)
                run.accelerator.backward(guard.poisoned(loss))
            activations = max(activations, held())
            del loss
        norm = run.accelerator.clip_grad_norm_(run.network.parameters(), run.max_grad_norm or float("inf"))
        guard.update(norm, run.optimizer.step)
        run.optimizer.zero_grad()
        position.step += 1
        guard.end(position)
    return measured_parts(run, family.blocks(networks.transformer), activations, device)


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
