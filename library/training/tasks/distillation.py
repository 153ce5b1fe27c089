"""Distillation: a LoRA on an fp8 base learns the velocities of a *teacher*, the bf16 model with the LoRA trained on it.

Training on the fp8 file the ordinary way teaches the images again, and with few or noisy images that drifts from the
LoRA one already liked. Here the target is the teacher's velocity at the same noisy latents, noise level and caption, so
that nothing is left to learn but fp8's own error. Two hundred steps are enough to see it.

Noise and noise levels are functions of (seed, step, sample), so every input of the coming run is known before it
starts. The teacher is loaded first, predicts the velocities of all of them, and is freed; they are cached on disk, half
a megabyte a sample of 1024 x 1024, and training needs no more memory than without a teacher. Which of them are cached
is decided by names, of all that a sample is in its step (mirrored, cropped, with which caption): a resumed or repeated
run finds them without reading its dataset, and of those that are missing one batch at a time is in memory.

With the squared error, learning from a mixture of both is learning the mixed velocity:

    (1 - w) |v - data|^2 + w |v - teacher|^2  =  |v - ((1 - w) data + w teacher)|^2 + what does not depend on v

Trained on a distilled model (Z-Image-Turbo) with its base as the teacher, the teacher's velocities would undo what the
model was distilled to. There the target is the LoRA's effect (``distill_effect``): what the base answers with the LoRA
less what it answers without, added to what the model in training answers without one. That model is loaded first, for
its own answers, and freed before the teacher comes. A step of a distilled model stands for many small ones, so with
``timestep_sampling = "steps"`` the base's answers are means over these, too (:func:`step_velocity`): the effect at the
noise level where a step begins is another (on the built-in pair a cosine of 0.84 apart in the first step), and a LoRA
that learns that one makes images that are further from the base's.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from library.accelerator import model_parallel_rank_and_size, release
from library.checksums import fingerprint
from library.config.schema import TrainConfig, TrainingConfig
from library.console import Console
from library.data.batches import Batch, DataParallelRank, collate
from library.data.cache import discard_damaged
from library.data.dataset import TrainingData
from library.errors import UserError
from library.files import clear_leftovers
from library.models.family import Family
from library.models.family_by_name import model_family, with_transformer
from library.models.layer_names import LoraTargets
from library.precision.recipe import WeightLoader, plan_base
from library.processes import agreed
from library.safetensors_io import is_complete, write_safetensors
from library.training.checkpoint.state import start_position
from library.training.flow import STEP_PARTS, noisy_latents, step_levels, step_velocity
from library.training.plan import base_dtype
from library.training.report.progress import counting
from library.training.tasks.image_step import Teacher
from library.training.tasks.task import run_length
from networks.files.adapters import load_trainable
from networks.files.weights import AdapterWeights, AddedWeights
from networks.merging.merge import read_base_weights
from networks.network import attach_lora


def prepare_teacher(
    config: TrainConfig, state: str | None, data: TrainingData, accelerator: Accelerator, console: Console
) -> Teacher | None:
    """Let the teacher predict the velocities of all coming steps; return where they are, None without a teacher.

    ``state`` is what the run goes on from. ``data`` is cached. Each process has its own samples' predicted.

    Raises:
        UserError: the teacher or its LoRA cannot be read or is of another architecture; the disk is full.
    """
    settings = config.distillation
    if settings.distill_from is None:
        return None
    student = model_family(config.model)
    family = model_family(with_transformer(config.model, Path(settings.distill_from).expanduser()))
    lora = settings.distill_lora or config.network.network_weights
    assert lora is not None, "the config's rules ask for one"
    if family.quantized_file() is not None:
        raise UserError(f"distill_from: {settings.distill_from} is in fp8; give the bf16 model")
    weights = _lora_weights(lora, family.targets)
    if settings.distill_effect and all(map(_is_zero, weights.values())):
        raise UserError(f"distill_lora: {lora} is zero and changes nothing, so it has no effect to learn; give another")
    folder = Path(settings.distill_cache or Path(config.saving.output_dir) / "teacher")
    teacher = Teacher(folder / _key(config, family, lora, data, accelerator), settings.distill_weight)
    rank, size = model_parallel_rank_and_size(accelerator)  # of those that see the same batches and share the work
    coming = [*islice(_coming_batches(config.training, state, data, accelerator), rank, None, size)]
    without_lora = (
        Teacher(teacher.folder.with_name(f"{teacher.folder.name}-own"), 1.0) if settings.distill_effect else None
    )
    for answers in filter(None, (teacher, without_lora)):
        made = (answers.path(step, data.train.key(item)) for step, items in coming for item in items)
        discard_damaged(made, partial(console.print, soft_wrap=True))
    missing = [(step, items) for step, items in coming if not _is_cached(teacher, step, items, data)]
    passes = [(without_lora, None), (teacher, without_lora)] if without_lora else [(teacher, None)]
    with agreed("predicting the teacher's velocities"):
        for answers, plain_answers in passes if missing else ():
            todo = [(step, items) for step, items in missing if not _is_cached(answers, step, items, data)]
            if not todo:
                continue
            clear_leftovers(answers.path(todo[0][0], "").parent)  # where an interrupted run stopped
            if answers is without_lora:
                runs, network = student, None
                loader = plan_base(config.precision, runs.quantized_file(), config.training.seed, accelerator.device)
                transformer = _load_base(config, runs, loader, accelerator.device)
            else:
                runs, transformer = family, _load_base(config, family, WeightLoader(), accelerator.device)
                network = attach_lora(transformer, weights, family.targets, lora)
            with counting(console) as progress:
                advance = progress(
                    "velocities without a LoRA" if answers is without_lora else "velocities of the teacher", len(todo)
                )
                for step, items in todo:
                    batch = collate([data.train[item] for item in items]).to(accelerator.device)
                    predict = partial(_velocity, runs, student, transformer, batch, step, config, accelerator)
                    velocity = predict()
                    if plain_answers is not None and network is not None:
                        with network.bypassed():
                            plain = predict()
                        velocity = plain_answers.blend(velocity, batch.keys, step) + velocity - plain
                    _write(answers, batch, step, velocity)
                    advance(1)
            del transformer, network, predict
            release()
    if without_lora:  # only now, when no process reads it any more
        shutil.rmtree(without_lora.folder, ignore_errors=True)
    return teacher


def _load_base(config: TrainConfig, family: Family, loader: WeightLoader, device: torch.device) -> nn.Module:
    """Load a transformer as the training is going to, its base LoRAs merged into it, without another beside it."""
    merged = read_base_weights(config.network.base_weights, config.network.base_weights_multiplier, family.targets)
    loader.changes = merged.changes(family.targets)
    dtype, backend = base_dtype(config.model, config.training), config.training.attention
    transformer = family.load_transformer(dtype, device, backend, fp8=loader)
    loader.round_inputs(transformer)
    return transformer.requires_grad_(False).eval()


def _is_zero(weights: AdapterWeights) -> bool:
    return isinstance(weights, AddedWeights) and not all(factor.any() for factor in weights.tensors.values())


def _lora_weights(lora: str, targets: LoraTargets) -> dict[str, AdapterWeights]:
    """Return layer of the transformer -> weights."""
    weights = targets.by_component(load_trainable(lora, targets).weights).get(targets.file_prefix, {})
    if not weights:
        raise UserError(f"distill_lora: {lora} has nothing for the transformer; give the LoRA that was trained in bf16")
    return weights


def _coming_batches(
    training: TrainingConfig, state: str | None, data: TrainingData, accelerator: Accelerator
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield step and items (epoch, index) of this process's batches as the training loop is going to see them."""
    dp_rank = DataParallelRank.of(accelerator)
    sampler = data.batch_sampler(dp_rank)
    per_epoch = sampler.batches_per_epoch()
    position = start_position(state, per_epoch)
    steps, _ = run_length(training, per_epoch, dp_rank.step_batches, position)
    step, epoch, first = position.step, position.epoch, position.batches
    while step < steps:
        sampler.set_position(epoch, first)
        for items, micro in zip(sampler, sampler.micro_steps(), strict=True):
            if micro.weight:  # else another process's
                yield step, items
            step += micro.ends_step
            if step == steps:
                return
        epoch, first = epoch + 1, 0


def _is_cached(teacher: Teacher, step: int, items: list[tuple[int, int]], data: TrainingData) -> bool:
    return all(is_complete(teacher.path(step, data.train.key(item))) for item in items)


@torch.no_grad()
def _velocity(
    family: Family,
    student: Family,
    transformer: nn.Module,
    batch: Batch,
    step: int,
    config: TrainConfig,
    accelerator: Accelerator,
) -> Tensor:
    """Return the velocities at the noise and noise levels of the ``student``'s ``FlowStep.loss`` at ``step``."""
    flow = config.flow
    noisy, _, sigmas = noisy_latents(flow, student, batch.latents, batch.sample_ids, config.training.seed, step)

    def velocity(latents: Tensor, sigmas: Tensor) -> Tensor:
        given = latents, sigmas.to(noisy.device), batch.text, flow.guidance_scale, batch.conditions
        with accelerator.autocast():
            return family.predict_velocity(transformer, *given)

    levels = step_levels(flow, student, noisy.shape[-2] * noisy.shape[-1] // student.patch_size**2)
    if family is student or not (levels and config.distillation.distill_effect):
        return velocity(noisy, sigmas)
    following = torch.tensor([*levels[1:], 0.0])[torch.searchsorted(-torch.tensor(levels), -sigmas)]
    return step_velocity(velocity, noisy, sigmas, following, STEP_PARTS)


def _write(teacher: Teacher, batch: Batch, step: int, velocity: Tensor) -> None:
    for key, target in zip(batch.keys, velocity.cpu(), strict=True):
        if not torch.isfinite(target).all():
            raise UserError(f"distill_from: its velocity at step {step} is not finite; check the teacher and its LoRA")
        write_safetensors(teacher.path(step, key), {"velocity": target}, checked=True)


def _key(config: TrainConfig, family: Family, lora: str, data: TrainingData, accelerator: Accelerator) -> str:
    """Return a name for all that the velocities depend on besides the step and what a sample is in it.

    In low precision an answer depends in its last digits on the batch that it is made in.
    """
    merged, training = config.network, config.training
    parts: list[object] = [
        family.identity(),
        fingerprint(Path(lora)),
        [fingerprint(Path(path).expanduser()) for path in merged.base_weights],
        merged.base_weights_multiplier,
        (training.seed, training.mixed_precision, base_dtype(config.model, training)),
        sorted(config.flow.model_dump().items()),
        (data.train.batch_sizes, DataParallelRank.of(accelerator).step_batches),
    ]
    if config.distillation.distill_effect:  # its answers follow from the model in training, too
        parts += [model_family(config.model).identity(), sorted(config.precision.model_dump().items())]
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
