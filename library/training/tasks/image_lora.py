"""From files to something that can be trained: data with its caches, and the networks with their LoRA.

The order is the memory plan. First the VAE encodes what is not cached yet and leaves; then the text encoders; only
then is the transformer loaded, so the peak is the largest of the three and not their sum. A text encoder that is
trained comes back beside the transformer, and what it gave the cache is computed anew in every step. Each step after
loading is a function on the model: inject the LoRA, set the memory policy, and let accelerate compile and wrap it.

Loss on held-out images at fixed noise and fixed sigmas: the one loss that can be compared between steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader

from library.accelerator import dp_rank_and_size
from library.data.batches import Bucket, CachedDataset, EpochBatchSampler, collate
from library.data.dataset import TrainingData, build_dataset
from library.data.lint import check, summarise
from library.errors import UserError
from library.precision.fp8_linear import make_cpu_kernels
from library.precision.recipe import Fp8Loader
from library.safetensors_io import read_safetensors_header
from library.training.checkpoint.resume import tidy
from library.training.guard.signals import ignore_signals
from library.training.memory.block_swap import swap_blocks
from library.training.memory.budget import recompute_blocks
from library.training.parallel.device_map import place_blocks
from library.training.parallel.fsdp import lockstep_batches
from library.training.report.progress import counting
from library.training.sampling.conditions import PictureRules, text_jobs
from library.training.tasks.image_step import FlowStep, TrainingStep, check_seam
from library.training.tasks.lora_plan import NetworkPlan, describe_base, leave_frozen_out_of_ddp
from networks.files.lora import load_lora
from networks.files.metadata import base_mismatch
from networks.files.peft import weight_file
from networks.injection import AdapterNetwork, attach_lora, inject_adapter

if TYPE_CHECKING:
    from library.conditions import ConditionKind
    from library.config.chat_schema import LanguageModelConfig
    from library.config.schema import (
        DatasetArguments,
        FlowConfig,
        ModelConfig,
        NetworkConfig,
        TrainingConfig,
        ValidationConfig,
    )
    from library.models.family import Family, ImageEncoder, TextEncoder
    from library.training.sampling.prompts import SamplePrompt


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def base_dtype(model: ModelConfig | LanguageModelConfig, training: TrainingConfig) -> torch.dtype:
    """Return the dtype of the frozen weights: as asked, or the dtype of the forward pass."""
    name = model.base_dtype
    return _DTYPES[{"no": "fp32"}.get(training.mixed_precision, training.mixed_precision) if name == "auto" else name]


def read_data(
    arguments: DatasetArguments,
    training: TrainingConfig,
    flow: FlowConfig,
    image_encoder: ImageEncoder,
    accelerator: Accelerator,
    console: Console,
    conditioning: ConditionKind = "none",
    most_references: int | None = None,
) -> TrainingData:
    """Read the dataset and look it over; nothing is encoded yet.

    Args:
        arguments, training, flow: settings.
        image_encoder: its sizes are asked for, its weights are not read.
        accelerator: rank and barrier.
        console: where the dataset is described.
        conditioning: what the model is given besides a caption.
        most_references: control pictures that it takes at most; None for any number.

    Raises:
        UserError: see ``build_dataset``; a seam without masks; more control pictures than the model takes.
    """
    data = build_dataset(
        arguments,
        seed=training.seed,
        pixel_multiple=image_encoder.pixel_multiple,
        latent_factor=image_encoder.latent_factor,
        prior_loss_weight=training.prior_loss_weight,
        masked_loss=flow.masked_loss,
        conditioning=conditioning,
    )
    check_seam(flow, data)
    check_references(data, most_references)
    console.print(data.describe())
    look_over(data, arguments.strict_dataset, accelerator, console)
    return data


def cache_data(
    data: TrainingData,
    arguments: DatasetArguments,
    image_encoder: ImageEncoder,
    text_encoder: TextEncoder,
    accelerator: Accelerator,
    prompts: Sequence[SamplePrompt],
    console: Console,
) -> None:
    """Make sure that every latent and text embedding that ``data`` and ``prompts`` need is cached.

    With several processes each encodes its share. An encoder's weights are read only if something is missing, and
    are let go before this returns.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    if accelerator.is_main_process:
        tidy(data.cache_folders, console.print)
    with counting(console) as progress:
        data.cache_latents(image_encoder, arguments.vae_batch_size, progress, rank, world)
        image_encoder.release()
        rules, sees = PictureRules.of(data), text_encoder.sees_references
        texts = [job for prompt in prompts for job in text_jobs(prompt, sees, rules).values()]
        data.cache_text(text_encoder, texts, arguments.text_encoder_batch_size, progress, rank, world)
        text_encoder.release()
    accelerator.wait_for_everyone()


def look_over(data: TrainingData, strict: bool, accelerator: Accelerator, console: Console) -> None:
    """Say what is known to be odd about the dataset; with ``strict`` look at every file and refuse any finding.

    Raises:
        UserError: something was found.
    """
    for line in summarise(data.listed):
        console.print(f"note: {line}", soft_wrap=True)
    if not strict:
        return
    with accelerator.main_process_first(), counting(console) as start:  # the others find what it remembered
        report = check(data.config, data.pixel_multiple, data.conditioning, start)
    if report.findings:
        raise UserError(
            f"strict_dataset: {data.config.path}: {'; '.join(report.lines())}; put them right "
            "(tools/check_dataset.py shows all), or remove strict_dataset"
        )


def check_references(data: TrainingData, most: int | None) -> None:
    """Raise a UserError for the first image with more than ``most`` control pictures; None allows any number."""
    for dataset in filter(None, (data.train, data.validation)):
        for sample in dataset.samples:
            if most is not None and len(sample.controls) > most:
                found = f"{len(sample.controls)} control pictures"
                raise UserError(f"{sample.image.path}: {found}, this model takes {most}; remove the others")


@dataclass(frozen=True)
class Networks:
    """The networks of a run with their LoRA, not yet wrapped.

    Attributes:
        transformer: takes part in every run; without a LoRA where only text encoders are trained.
        text_encoders: those that are trained, as one module; None where none is.
        lora: the LoRA of both.
        base_precision: of the transformer's frozen weights, in words.
        text_fingerprint: of the text encoders, their precision and token lengths; None where none is trained.
    """

    transformer: nn.Module
    text_encoders: nn.Module | None
    lora: AdapterNetwork
    base_precision: str
    text_fingerprint: str | None


def prepare_networks(
    family: Family,
    text_encoder: TextEncoder,
    plan: NetworkPlan,
    network: NetworkConfig,
    training: TrainingConfig,
    dtype: torch.dtype,
    device: torch.device,
    console: Console,
    fp8: Fp8Loader | None = None,
    to_be_split: bool = False,
    devices: Sequence[torch.device] = (),
) -> Networks:
    """Load what takes part in a step, put the LoRA in, set the memory policy.

    ``fp8`` says which of the transformer's weights become fp8. ``to_be_split`` leaves it in host memory; its blocks are
    dealt out to ``devices``, if there are any.

    Raises:
        UserError: see ``inject_adapter`` and ``load_file`` of its network; an fp8 file is damaged, or does not suit
            ``fp8``.
    """
    lora_dtype = torch.bfloat16 if training.full_bf16 else torch.float32
    fp8, layout = fp8 or Fp8Loader(), family.fp8_layout()
    loaded_to = torch.device("cpu") if training.blocks_to_swap or to_be_split else device
    transformer, text_encoders = family.load_transformer(dtype, loaded_to, training.attention, fp8=fp8), None
    fp8.round_inputs(transformer)
    if device.type == "cpu":
        make_cpu_kernels(transformer, dtype)
    base_precision = describe_base(layout, fp8, dtype)
    if layout is not None:
        console.print(layout.describe())
    if layout is not None or fp8.recipe is not None:
        console.print(f"base: {base_precision}")
    loras: list[AdapterNetwork] = []
    if network.dim_from_weights:
        loras.append(attached_lora(transformer, network, plan, lora_dtype, console))
    elif plan.trains_transformer:
        loras.append(inject_adapter(transformer, plan.options, plan.targets, training.seed, lora_dtype))
    if plan.text_encoders:
        text_encoders = text_encoder.load_modules(plan.text_encoders)
        options = plan.options.for_text_encoders()
        loras.append(inject_adapter(text_encoders, options, plan.targets, training.seed, lora_dtype))
    lora = functools.reduce(AdapterNetwork.joined, loras)
    console.print(lora.describe())
    if remark := base_remark(network.network_weights, family.fingerprint()):
        console.print(remark)
    if network.network_weights and not network.dim_from_weights:
        console.print(lora.load_file(network.network_weights, network.allow_partial))
    if plan.options.train_t5xxl:
        console.print("note: diffusers passes over T5's part of a LoRA file; ComfyUI and sd-scripts load it")
    recompute_blocks(transformer, len(family.blocks(transformer)), training, device)
    if training.gradient_checkpointing and text_encoders is not None:
        text_encoders.enable_gradient_checkpointing()  # type: ignore[operator]
    if training.blocks_to_swap:
        swap = swap_blocks(transformer, family.blocks(transformer), training.blocks_to_swap, device)
        console.print(swap.describe())
    if devices:
        console.print(place_blocks(transformer, family.blocks(transformer), devices))
    for module in filter(None, (transformer, text_encoders)):
        leave_frozen_out_of_ddp(module)
    fingerprint = text_encoder.fingerprint if plan.text_encoders else None
    return Networks(transformer, text_encoders, lora, base_precision, fingerprint)


def base_remark(network_weights: str | None, base: str) -> str | None:
    """Return what to say if the LoRA to go on from was trained on another base than that with fingerprint ``base``."""
    if network_weights is None:
        return None
    metadata = read_safetensors_header(weight_file(Path(network_weights))).get("__metadata__") or {}
    return f"note: {network_weights}: {remark}" if (remark := base_mismatch(metadata, base)) else None


def attached_lora(
    transformer: nn.Module, network: NetworkConfig, plan: NetworkPlan, dtype: torch.dtype, console: Console
) -> AdapterNetwork:
    """Put the transformer's part of ``network_weights`` in, layer by layer as the file has it, to be trained on."""
    source = network.network_weights
    assert source is not None, "the config's rules ask for one"
    parts = plan.targets.by_component(load_lora(source, plan.targets).weights)
    own = parts.pop(plan.targets.file_prefix, {})
    if not own:
        raise UserError(f"dim_from_weights: {source} has nothing for the transformer; give a LoRA that has")
    if parts:
        console.print(f"note: {source}: its layers of {' and '.join(sorted(parts))} are not trained and not saved")
    return attach_lora(transformer, own, plan.targets, source, dtype)


def training_loader(
    data: TrainingData, arguments: DatasetArguments, accelerator: Accelerator
) -> tuple[EpochBatchSampler, DataLoader[Any]]:
    """Return the loader of training batches, to be prepared by accelerate, and the sampler that orders them."""
    sampler = data.batch_sampler(dp_rank_and_size(accelerator)[1])
    workers = arguments.max_data_loader_n_workers
    loader = DataLoader(
        data.train,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=ignore_signals,
        pin_memory=accelerator.device.type == "cuda",
    )
    return sampler, loader


@dataclass(frozen=True)
class HeldOut:
    """The held-out images and how they are looked at."""

    batches: DataLoader[Any]  # of Batch
    step: FlowStep
    config: ValidationConfig

    def loss(self, model: nn.Module, accelerator: Accelerator) -> float:
        """Return the validation loss of ``model`` as it is; see :func:`validation_loss`."""
        return validation_loss(model, self.batches, self.step, self.config.validation_sigmas, accelerator)


def hold_out(data: TrainingData, step: TrainingStep, config: ValidationConfig) -> HeldOut | None:
    """Return the held-out images, or None where the dataset holds none out.

    Raises:
        UserError: validation was asked for and there is nothing to validate on.
    """
    if data.validation is None:
        if config.model_fields_set:
            key = sorted(config.model_fields_set)[0]
            raise UserError(f"{key}: no images are held out; set validation_split in the dataset TOML, or remove {key}")
        return None
    assert isinstance(step, FlowStep)
    return HeldOut(held_out_loader(data.validation, config.max_validation_images), step, config)


def held_out_loader(images: CachedDataset, most: int) -> DataLoader[Any]:
    """Return the first ``most`` held-out images in batches of one bucket each, always in the same order."""
    by_bucket: dict[Bucket, list[tuple[int, int]]] = {}
    for index, bucket in list(enumerate(images.buckets))[:most]:
        by_bucket.setdefault(bucket, []).append((0, index))  # epoch 0: held-out samples have no random choices
    batches = [
        items[i : i + images.batch_sizes[bucket]]
        for bucket, items in by_bucket.items()
        for i in range(0, len(items), images.batch_sizes[bucket])
    ]
    return DataLoader(images, batch_sampler=batches, collate_fn=collate)


@torch.no_grad()
def validation_loss(
    model: nn.Module, batches: DataLoader[Any], step: FlowStep, sigmas: Sequence[float], accelerator: Accelerator
) -> float:
    """Return the mean loss over the held-out images and ``sigmas``.

    Every process takes its share of the batches; the sums are added up before the division, so the figure does
    not depend on the number of processes.

    Args:
        model: the prepared network; dropout is off while this runs.
        batches: held-out batches, the same on every process, each of one bucket.
        step: the forward pass.
        sigmas: noise levels in (0, 1).
        accelerator: gives device, rank and reduction.
    """
    total = torch.zeros(2, device=accelerator.device, dtype=torch.float64)  # sum of losses, number of them
    modules = [model] if step.text_encoders is None else [model, step.text_encoders]
    were_training = [module.training for module in modules]
    for module in modules:
        module.eval()
    rank, world = dp_rank_and_size(accelerator)
    for own in lockstep_batches(islice(iter(batches), rank, None, world), accelerator):
        batch = (next(iter(batches)) if own is None else own).to(accelerator.device)
        losses = step.validation_losses(model, batch, sigmas)
        if own is None:  # only to take part
            continue
        total += torch.stack([losses.double().sum(), torch.tensor(float(len(losses)), device=losses.device)])
    for module, was_training in zip(modules, were_training, strict=True):
        module.train(was_training)
    total = accelerator.reduce(total, reduction="sum")
    return float(total[0] / total[1])
