"""Memory dry run: whether a training step fits, found out before thousands of images are cached, and what would.

A run is traced from its configuration to the end of the second step on fake tensors (``trace``), in a process of its
own, which may patch what it likes; a minute or two at full depth. By the functions that a run calls: the VAE encodes an
image of the largest bucket, the text encoders the longest caption, the transformer is loaded and the LoRA put in, two
steps are taken, and where the run samples, a prompt is sampled. Only that the batch is made of noise is other than in a
run; validation takes no more than a step. What was found is kept under ``~/.cache/tandem`` by configuration, model,
dataset and code. Without a card it takes a C++ compiler, for the fake device.

    plan_memory(build, config)    what a run takes: a :class:`MemoryPlan`
    fit_memory(task, config, ...) the same of a run that begins: ``memory = "auto"`` chooses, what cannot fit is refused

``build`` makes a task of a configuration (the class ``ImageLora``): nothing here knows the tasks. On a CPU what a card
would take is counted. With several processes one of them counts, and adds what DDP sends: as much as the gradients.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn

from library.checksums import read_checked_json, write_checked_json
from library.conditions import NO_CONDITIONS, Conditions
from library.config.schema import TrainConfig, TrainingConfig
from library.console import Console
from library.data.batches import Batch
from library.data.dataset import TrainingData
from library.data.samples import Sample
from library.errors import UserError, reason_of
from library.models.family import Family
from library.models.text import TextEncoder
from library.models.vae import ImageEncoder
from library.processes import agreed, from_all_processes
from library.randomness import generator
from library.training.engine import Engine
from library.training.memory.block_swap import swappable
from library.training.memory.budget import available_bytes, in_words
from library.training.memory.dummy_checkpoint import with_dummies
from library.training.memory.fake_cuda import cache_folder, has_card, pretend
from library.training.memory.policy import MemoryPlan, Source, choose, describe, remedies, room_in
from library.training.memory.trace import MemoryTrace, device_processes, tracing
from library.training.plan import with_precision
from library.training.sampling.conditions import PromptImageRules
from library.training.sampling.images import Sampler

_HOPPER = (9, 0)
# What a step's memory does not depend on: another learning rate is not counted anew.
_OTHER_SECTIONS = ("saving", "logging", "hub", "validation")
_OTHER_KEYS = ("learning_rate", "lr_scheduler", "lr_warmup_steps", "max_train_steps", "max_train_epochs", "seed")
_CODE = Path(__file__).resolve().parents[3]


class ImageTask(Protocol):
    """``library.training.tasks.image_lora.ImageLora``."""

    accelerator: Accelerator
    console: Console
    family: Family
    dtype: torch.dtype
    image_encoder: ImageEncoder
    text_encoder: TextEncoder
    data: TrainingData
    prompts: Any
    transformer: nn.Module
    engine: Engine

    def open(self) -> None: ...
    def read(self) -> None: ...
    def load_networks(self) -> None: ...
    def wrap_networks(self) -> None: ...
    def loss(self, model: nn.Module, batch: Batch, step: int) -> tuple[Tensor, Tensor]: ...


Build = Callable[[TrainConfig], ImageTask]


def plan_memory(build: Build, config: TrainConfig) -> MemoryPlan:
    """Return what a run of ``config`` takes.

    Args:
        build: makes the task; a class or function of a module.
        config: complete; its model and dataset need not be there: then the published model is counted, on one image.

    Raises:
        UserError: the configuration cannot run; there is neither a card nor a compiler.
    """
    config = with_precision(config, on_cpu=False)
    source: Source = "card" if has_card() else "fake device"
    capability = torch.cuda.get_device_capability() if source == "card" else _HOPPER
    arguments = config.model_dump(mode="json", exclude_unset=True), capability, source
    kept = cache_folder() / "plans" / f"{_key(config, arguments)}.json"
    answer: dict[str, Any] | None = None
    with suppress(OSError, ValueError):  # not counted yet, or damaged: counted again
        answer = read_checked_json(kept)
    if answer is None:
        try:
            with device_processes() as pool:
                counted = pool.submit(_trace_config, build, *arguments).result()
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"the memory could not be counted ({error}); please report it with the configuration"
            ) from error
        write_checked_json(kept, asdict(counted))
        answer = read_checked_json(kept)
    return _as_plan(answer)


def _as_plan(answer: dict[str, Any]) -> MemoryPlan:
    """Return the plan that was written as JSON."""
    return MemoryPlan(**answer | {"swappable": tuple(answer["swappable"])})


def _key(config: TrainConfig, arguments: tuple[dict[str, Any], tuple[int, int], Source]) -> str:
    """Return a name for all that a trace depends on."""
    prompts = config.sampling.sample_prompts  # listed ones stand in the configuration
    files = [config.model.pretrained_model_name_or_path, config.dataset.dataset_config]
    files += [prompts] if isinstance(prompts, str) else []
    sections = ((name, values) for name, values in arguments[0].items() if name not in _OTHER_SECTIONS)
    settings = {name: {k: v for k, v in values.items() if k not in _OTHER_KEYS} for name, values in sections}
    inputs: list[Any] = [settings, arguments[1:], torch.__version__]
    for name in filter(None, files):
        path = Path(name).expanduser()
        inside = [path, *sorted(path.parent.glob("*/"))] if path.suffix == ".toml" else [path]
        found = [(str(p), p.stat()) for p in inside if p.exists()]
        inputs.append([(p, about.st_mtime_ns, about.st_ctime_ns, about.st_size) for p, about in found])
    code = hashlib.sha256(json.dumps(inputs, default=str).encode())
    for folder in ("library", "networks"):
        for file in sorted((_CODE / folder).rglob("*.py")):
            code.update(file.read_bytes())
    return code.hexdigest()[:24]


def opened_task(build: Build, config: TrainConfig, folder: Path) -> ImageTask:
    """Return the run's task with its data read, that writes nothing but into ``folder``."""
    silent = {"overwrite": True, "output_dir": str(folder / "run"), "save_state": False}
    changes = {
        "saving": config.saving.model_copy(update=silent),
        "training": config.training.model_copy(update={"resume": None, "memory": "manual"}),
        "logging": config.logging.model_copy(update={"log_with": None}),
        "accelerate": config.accelerate.model_copy(update={"torch_compile": False}),
    }
    task = build(config.model_copy(update=changes))
    task.console = Console(quiet=True)
    task.open()
    task.read()
    return task


def _trace_config(build: Build, settings: dict[str, Any], capability: tuple[int, int], source: Source) -> MemoryPlan:
    """Return what a run takes; in a process of ``device_processes``."""
    for module in ("accelerate", "diffusers", "peft", "transformers"):
        importlib.import_module(module)  # before the device is one: they look for it as they are imported
    trace = MemoryTrace()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config, notes = with_dummies(TrainConfig.model_validate(settings), folder)
        pretend(trace, capability=capability, runtime=source != "card")
        with tracing(trace):
            task = opened_task(build, config, folder)
            _trace_run(task, config, trace, folder)
            blocks = swappable(task.family.blocks(task.transformer))
    phases = {phase: parts for phase, parts in trace.phases.items() if phase}
    return MemoryPlan(source, phases, _batch_in_words(task.data), blocks, notes)


def _trace_run(task: ImageTask, config: TrainConfig, trace: MemoryTrace, folder: Path) -> None:
    """Go through a run; ``trace`` notes what it takes, by phase."""
    sample, _ = largest(task.data)
    width, height = sample.fit.bucket
    with _phase(trace, "encoding images", "encoders"):
        task.image_encoder.encode(torch.zeros(config.dataset.vae_batch_size, 3, height, width))
        task.image_encoder.release()
    with _phase(trace, "encoding captions", "encoders"):
        images = [Image.new("RGB", control.fit.encoded) for control in sample.control_images]
        caption = max(task.data.captions(), key=len)
        (text,) = task.text_encoder.encode([caption], [images] if task.text_encoder.sees_references else None)
        task.text_encoder.release()
    with _phase(trace, "loading", "weights"):
        task.load_networks()
        task.wrap_networks()
        trace.relabel(task.engine.parameters, "LoRA")
    for model in task.engine.models:
        model.train()
    for parameter in task.engine.parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: trace.relabel([p.grad], "gradients"))
    batch = noise_batch(task, text)
    if task.engine.graphs is not None:
        task.engine.graphs.eager_steps = 0  # captured in the first step, and from then on held
    for step, name in enumerate(("first step", "step")):
        with _phase(trace, name):
            _take_step(task, batch, step)
        states = (value for state in task.engine.optimizer.state.values() for value in state.values())
        trace.relabel([value for value in states if isinstance(value, Tensor)], "optimizer")
    if task.prompts:
        prompt = max(task.prompts, key=lambda prompt: prompt.width * prompt.height)
        texts = {prompt.text_key(one): text for one in prompt.texts()}
        rules, prompts = PromptImageRules.of(task.data), [replace(prompt, steps=2)]
        with _phase(trace, "sampling"):
            task.engine.drop_graphs()
            Sampler(task.family, prompts, task.image_encoder, texts, folder, rules=rules, writes=False).sample(
                task.transformer, 0
            )


def _take_step(task: ImageTask, batch: Batch, step: int) -> None:
    """Take a step as the trainer does, of two batches where gradients are accumulated."""
    batch = batch.to(task.accelerator.device)
    for _ in range(min(2, task.accelerator.gradient_accumulation_steps)):
        task.engine.forward_backward(task.loss, batch, step)
    task.engine.update(task.engine.clip(step))
    task.engine.settle()


@contextmanager
def _phase(trace: MemoryTrace, name: str, part: str = "activations") -> Iterator[None]:
    """Name what is done, and what is allocated meanwhile."""
    trace.phase, trace.part = name, part
    yield
    trace.phase, trace.part = "", "activations"


def largest(data: TrainingData) -> tuple[Sample, int]:
    """Return a sample of the bucket whose batches have most tokens, and the batch size."""
    sizes = {bucket: min(size, data.train.buckets.count(bucket)) for bucket, size in data.train.batch_sizes.items()}
    bucket = max(sizes, key=lambda bucket: sizes[bucket] * sum(width * height for width, height in bucket[1:]))
    return data.train.samples[data.train.sample_buckets.index(bucket)], sizes[bucket]


def _batch_in_words(data: TrainingData) -> str:
    sample, size = largest(data)
    width, height = sample.fit.bucket
    return f"{size} at {width}x{height}"


def noise_batch(task: ImageTask, text: dict[str, Tensor]) -> Batch:
    """Return a batch of the largest bucket as the data loader gives it, of noise."""
    data, (sample, samples), noise = task.data, largest(task.data), generator("memory dry run")
    channels, factor, unit = task.family.latent_channels, data.latent_factor, task.family.patch_size
    pixels = [sample.fit.bucket, *(control.fit.encoded for control in sample.control_images)]
    # in whole patches
    sides = [(high // factor // unit * unit, wide // factor // unit * unit) for wide, high in pixels]
    (height, width), *references = sides
    views = data.train.views_of(sample)
    size = samples * views

    def latents(h: int, w: int) -> Tensor:
        return torch.randn(size, channels, h, w, generator=noise)

    conditions = NO_CONDITIONS
    if data.conditioning == "fill":
        conditions = Conditions(latents(height, width), torch.ones(size, 1, height * factor, width * factor))
    elif data.conditioning == "references":
        conditions = Conditions(references=tuple(latents(*side) for side in references))
    masks = torch.ones(size, 1, height, width) if data.has_regions else None
    batched = {name: tensor[None].expand(size, *tensor.shape).contiguous() for name, tensor in text.items()}
    captions = [max(data.captions(), key=len)] * size
    weights, ids = torch.ones(size), [number for number in range(samples) for _ in range(views)]
    return Batch(latents(height, width), batched, weights, masks, ids, captions, conditions, views=views)


def _is_due(config: TrainConfig, on_cpu: bool) -> bool:
    """Return whether a step is counted: where it is asked for, or by default on a GPU that has all of the model."""
    asked = config.training.memory_dry_run
    in_full = not (on_cpu or config.parallel.splits_model or config.parallel.zero)
    return config.training.memory == "auto" or (in_full if asked is None else asked)


def fit_memory(task: ImageTask, config: TrainConfig, console: Console) -> TrainingConfig:
    """Return the section ``training`` after a memory dry run, if one is due: as it was, or with memory's choice made.

    Raises:
        UserError: a step does not fit, whatever is chosen.
    """
    training, on_cpu = config.training, task.accelerator.device.type == "cpu"
    if not _is_due(config, on_cpu):
        return training
    limit = min(from_all_processes(available_bytes(task.accelerator.device)))  # all processes decide alike
    room, count = room_in(limit, on_cpu), functools.partial(_count, task)
    if training.memory == "auto":
        chosen = choose(config, room, count, on_cpu)
        if chosen.plan.over(room, ("step",)):
            raise _too_much(chosen.plan, limit, "set fp8_scaled = true, a smaller batch_size or a lower resolution")
        choices = ", ".join(chosen.lines.values()) or "nothing recomputed"
        console.print(f"memory: {choices}; {_takes(chosen.plan, limit)}", soft_wrap=True)
        return chosen.config.training
    is_asked = training.memory_dry_run is not None
    try:
        plan = _count(task, config, is_asked)
    except _NotCounted as error:
        console.print(f"memory dry run: left out ({reason_of(error)})", soft_wrap=True)
        return training
    console.print(f"memory dry run: {_takes(plan, limit)}", soft_wrap=True)
    if not plan.over(room, ("step",)):
        return training
    enough = None
    for remedy in remedies(config, plan, room, count, on_cpu=on_cpu):
        fits = not remedy.plan.over(room, ("step",))
        total, line = sum(remedy.plan.step.values()), list(remedy.lines.values())[-1]
        console.print(f"  with {line}: about {in_words(total)}, {'fits' if fits else 'does not fit'}")
        enough = remedy if fits else None
    settings = f"set {', '.join(enough.lines.values())}" if enough else "lower resolution, or use a larger device"
    raise _too_much(plan, limit, settings)


def _takes(plan: MemoryPlan, limit: int) -> str:
    """Return in words what a step takes, and of how much."""
    return f"a step of {plan.batch} takes {describe(plan.step)}, of {in_words(limit)}; counted on fake tensors"


def _too_much(plan: MemoryPlan, limit: int, remedy: str) -> UserError:
    needed = in_words(sum(plan.step.values()))
    return UserError(f"memory dry run: a step of {plan.batch} needs about {needed} of {in_words(limit)}; {remedy}")


class _NotCounted(Exception):
    """A step could not be counted, which nobody had asked for."""


def _count(task: ImageTask, config: TrainConfig, is_asked: bool = True) -> MemoryPlan:
    """Return what the starting run will take; the main process counts for all.

    Raises:
        UserError: the configuration cannot run; on all processes.
        _NotCounted: instead, if it is not ``is_asked`` for.
    """
    found, failed = None, list[Exception]()
    with agreed("counting the memory of a step", None if is_asked else failed.append):
        if task.accelerator.is_main_process:
            found = asdict(plan_memory(type(task), config))
    if failed:
        raise _NotCounted(failed[0])
    plan = _as_plan(from_all_processes(found)[0])
    if task.accelerator.num_processes > 1:
        # DDP reduces in buckets that are a copy of the gradients
        phases = {phase: {**p, "gradients": 2 * p.get("gradients", 0)} for phase, p in plan.phases.items()}
        plan = replace(plan, phases=phases)
    return plan
