"""From the configuration to a prepared run: the base with its LoRA, optimizer, schedule, batches, and the writer.

A trained LoRA on a loaded language model.

One training step's forward pass on conversations, and the same on those held out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader

from library import __version__
from library.accelerator import dp_rank_and_size, expect_many_shapes, is_tensor_parallel
from library.config.chat_schema import ChatDataConfig, ChatTrainConfig, InstructionValidationConfig
from library.config.rules import effective_learning_rate
from library.config.schema import ParallelConfig, resume_keys
from library.errors import UserError
from library.llm.chat_batches import Example, InstructionBatch, InstructionSampler, Windows, collate_windows
from library.models.llm.files import load_lm
from library.models.llm.model import Block, TransformerLM, lm_split_plan, separate_projections, shard_heads
from library.models.llm.spec import LMConfig
from library.models.registry import lora_targets
from library.nn.cross_entropy import IGNORED
from library.precision.checkpoint_layouts import Fp8Layout
from library.precision.recipe import Fp8Loader
from library.safetensors_io import read_safetensors_header
from library.training.checkpoint.metadata import save_facts, without_folders
from library.training.checkpoint.state import Position
from library.training.memory.budget import recompute_blocks
from library.training.optim.ema import WeightAverage
from library.training.optim.factory import build_optimizer, describe_optimizer
from library.training.optim.schedules import build_schedule, total_steps
from library.training.parallel.fsdp import lockstep_batches
from library.training.parallel.parallelize import ParallelizableModel, parallelize
from library.training.parallel.pipeline.stages import language_outline
from library.training.run import Run
from library.training.tasks.chat_data import InstructionData
from library.training.tasks.image_lora import attached_lora, base_remark
from library.training.tasks.lora_plan import NetworkPlan, describe_base, leave_frozen_out_of_ddp
from networks.files.metadata import build_metadata
from networks.files.peft import BASE_MODEL, weight_file
from networks.injection import AdapterNetwork, LoraNetwork, attach_file, inject_adapter


def check_family(model_type: str, found: LMConfig) -> None:
    """Raise a UserError if the model's folder holds another family than ``model_type``."""
    if model_type != found.family:
        raise UserError(f'model_type: {model_type}, but the folder holds a {found.family}; set "{found.family}"')


def check_split(architecture: LMConfig, parallel: ParallelConfig) -> None:
    """Raise a UserError if ``tp`` processes cannot have the model together."""
    if parallel.is_tensor_parallel:
        lm_split_plan(architecture, parallel.tp, separate=True)


@dataclass(frozen=True)
class Base:
    """The model with its LoRA, not yet wrapped.

    Attributes:
        model, network: the language model and the LoRA in it.
        fingerprint, precision: of the frozen weights.
    """

    model: TransformerLM
    network: AdapterNetwork
    fingerprint: str
    precision: str


def prepare_base(
    config: ChatTrainConfig,
    plan: NetworkPlan,
    fp8: Fp8Loader,
    layout: Fp8Layout | None,
    fingerprint: str,
    dtype: torch.dtype,
    device: torch.device,
    console: Console,
) -> Base:
    """Load the model, put the LoRA in, set the memory policy.

    ``fingerprint`` is its weights', as ``weights_fingerprint`` gives it.

    Raises:
        UserError: see ``load_lm``, ``inject_adapter`` and ``load_file`` of its network.
    """
    network, lora_dtype = config.network, torch.bfloat16 if config.training.full_bf16 else torch.float32
    folder = Path(config.model.pretrained_model_name_or_path).expanduser()
    model = load_lm(folder, dtype, device, fp8=fp8)
    separate_projections(model)
    fp8.round_inputs(model)
    precision = describe_base(layout, fp8, dtype)
    if layout is not None or fp8.recipe is not None:
        console.print(f"base: {precision}")
    lora: AdapterNetwork
    if network.dim_from_weights:
        lora = attached_lora(model, network, plan, lora_dtype, console)
    else:
        lora = inject_adapter(model, plan.options, plan.targets, config.training.seed, lora_dtype)
    console.print(lora.describe())
    if remark := base_remark(network.network_weights, fingerprint):
        console.print(remark)
    if network.network_weights and not network.dim_from_weights:
        console.print(lora.load_file(network.network_weights, network.allow_partial))
    recompute_blocks(model, model.config.layers, config.training, device)
    leave_frozen_out_of_ddp(model)
    return Base(model, lora, fingerprint, precision)


def prepare_instruction_run(
    config: ChatTrainConfig, plan: NetworkPlan, base: Base, data: InstructionData, accelerator: Accelerator
) -> Run:
    """Build optimizer, schedule and batches, and let accelerate wrap and compile the model."""
    training, lora, (_, world) = config.training, base.network, dp_rank_and_size(accelerator)
    optimizer = build_optimizer(config.optimizer, plan.parameter_groups(lora), training.full_bf16, training.seed)
    accumulation = training.gradient_accumulation_steps
    size = config.instructions.train_batch_size
    batches = InstructionSampler(data.windows, size, training.seed, world, accumulation)
    on_gpu = accelerator.device.type == "cuda"
    loader: DataLoader[Any] = DataLoader(
        Windows(data.windows), batch_sampler=batches, collate_fn=collate_windows, pin_memory=on_gpu
    )
    steps = total_steps(training, batches.batches_per_epoch() // world)
    lr_schedule = build_schedule(config.optimizer, optimizer, steps)
    parallelizable = ParallelizableModel(
        base.model,
        lora,
        lambda: language_outline(base.model),
        [Block.__name__],
        lambda processes: lm_split_plan(base.model.config, processes, separate=True),
        ["next_logits"],  # what samples are made with
    )
    shared = parallelize(
        accelerator, config.parallel, parallelizable, config.optimizer.max_grad_norm, optimizer, loader
    )
    if shared is not None:
        model, optimizer, loader, pipeline = shared
        if is_tensor_parallel(accelerator):
            shard_heads(base.model, config.parallel.tp)
    else:
        pipeline = None
        expect_many_shapes(accelerator)  # a batch is as long as its longest window
        model, optimizer, loader = accelerator.prepare(base.model, optimizer, loader)
    return Run(
        accelerator=accelerator,
        step=InstructionStep(training.seed, accumulation * world),
        transformer=base.model,
        model=model,
        network=lora,
        optimizer=optimizer,
        lr_schedule=lr_schedule,
        loader=loader,
        batches=batches,
        total_steps=steps,
        max_grad_norm=config.optimizer.max_grad_norm,
        base_fingerprint=base.fingerprint,
        average=WeightAverage(lora.parameters(), decay) if (decay := config.saving.ema_decay) else None,
        settings=resume_keys(config),
        pipeline=pipeline,
    )


def adapter_writer(
    config: ChatTrainConfig, run: Run, base_precision: str, template: str, begun: float
) -> Callable[[Path, Position], None]:
    """Return a function that writes the network's present weights as a folder of PEFT's.

    Args:
        config: goes into the metadata, whole and in kohya's ``ss_*`` keys.
        run: whose network's weights are written.
        base_precision: of the base's weights as trained on, in words.
        template: the name of the chat template.
        begun: when training began, seconds since 1970.
    """
    saving, network, optimizer, targets = config.saving, config.network, config.optimizer, run.network.targets
    precision = saving.save_precision or ("bf16" if config.training.full_bf16 else "fp32")
    base = Path(config.model.pretrained_model_name_or_path)
    facts: dict[str, object] = {
        "network_module": targets.kohya_module,
        "base_model_version": targets.kohya_base,
        "network_dim": "Dynamic" if network.dim_from_weights else network.network_dim,
        "network_alpha": "Dynamic" if network.dim_from_weights else network.network_alpha,
        "learning_rate": effective_learning_rate(optimizer),
        "optimizer": describe_optimizer(optimizer),
        "lr_scheduler": optimizer.lr_scheduler,
        "gradient_accumulation_steps": config.training.gradient_accumulation_steps,
        "mixed_precision": config.training.mixed_precision,
        "seed": config.training.seed,
        "max_train_steps": run.total_steps,
        "training_started_at": begun,
        "training_comment": saving.training_comment,
    }
    own = {
        BASE_MODEL: base.name if base.is_absolute() or str(base).startswith("~") else str(base),
        TEMPLATE: template,
    }
    config_json = json.dumps(without_folders(config.model_dump(exclude_none=True)))

    def write(path: Path, position: Position) -> None:
        now = time.time()
        metadata = build_metadata(
            facts | save_facts(position, run.total_steps, now),
            title=saving.output_name,
            timestamp=now,
            architecture=targets.architecture,
            implementation=targets.implementation,
            resolution=None,
            description=saving.training_comment,
            base_fingerprint=run.base_fingerprint,
            base_precision=base_precision,
            config_json=config_json,
            version=__version__,
        )
        run.network.save(path, "peft", precision, own | metadata)

    return write


TEMPLATE = "tandem.chat_template"  # metadata: how the conversations were written that it was trained on


def template_of(path: str | Path) -> str | None:
    """Return the name of the chat template that a LoRA was trained with, None if it does not say.

    Raises:
        UserError: no such file.
    """
    return (read_safetensors_header(weight_file(Path(path))).get("__metadata__") or {}).get(TEMPLATE)


def put_lora_on(
    model: TransformerLM, path: str | Path, strength: float = 1.0, dtype: torch.dtype | None = None
) -> AdapterNetwork:
    """Put a LoRA or DoRA onto ``model`` in place, beside its weights, which may be fp8; return its layers.

    A LoRA's ``set_multiplier(x)`` changes its strength at any time; ``with network.disabled():`` leaves it out.

    Args:
        model: of ``library.models.llm.files.load_lm``; it is frozen, and stays in the mode it is in.
        path: an adapter folder of PEFT's, ``train_lora.py``'s among them, or the safetensors file in it.
        strength: factor on the update.
        dtype: of the LoRA's weights; default: the embedding's.

    Raises:
        UserError: no such file, it is no LoRA of this model, or the model has one already.
    """
    if any(hasattr(module, "lora_A") for module in model.modules()):
        raise UserError(f"{path}: the model has a LoRA already; load the model again, or merge the first one into it")
    separate_projections(model)
    network = attach_file(model, path, lora_targets()[model.config.family], dtype or model.embedding.weight.dtype)
    if isinstance(network, LoraNetwork):
        network.set_multiplier(strength)
    elif strength != 1.0:
        raise UserError(f"{path}: a DoRA rescales whole rows and has no strength; leave it at 1")
    return network


@dataclass(frozen=True)
class InstructionStep:
    """What a forward pass needs besides the batch.

    Attributes:
        seed: of the run.
        batches_in_step: batches of an optimizer step, over all processes.
    """

    seed: int
    batches_in_step: int
    figure: ClassVar[str] = "learnt_tokens"
    text_encoders: ClassVar[None] = None

    def loss(self, model: nn.Module, batch: InstructionBatch, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch's loss (a scalar with gradient), and the number of tokens that it counts, [1].

        The optimizer gets the mean over the batches of a step and over processes. Each batch is therefore weighed by
        its share of what the step learns, so that this mean is the mean over tokens, and not one in which the tokens of
        short answers count more.
        """
        learnt = (batch.targets != IGNORED).sum() * batch.pieces
        mean = model(batch.tokens, batch.targets, documents=batch.documents)
        return mean * (learnt * (self.batches_in_step / batch.learnt_in_step)), learnt[None].float()


@dataclass(frozen=True)
class HeldOutDialogues:
    """Conversations to validate on, in batches, and when."""

    batches: Sequence[InstructionBatch]
    config: InstructionValidationConfig

    @torch.no_grad()
    def loss(self, model: nn.Module, accelerator: Accelerator) -> float:
        """Return the mean cross-entropy over all learnt tokens; dropout is off while this runs."""
        sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
        training = model.training
        model.eval()
        rank, count = dp_rank_and_size(accelerator)
        share = self.batches[rank::count]
        for batch in lockstep_batches(iter(share), accelerator):
            own = (batch or self.batches[0]).to(accelerator.device)
            learnt = (own.targets != IGNORED).sum() * (batch is not None)  # one that is left with none takes part
            sums += torch.stack([model(own.tokens, own.targets).double() * learnt, learnt.double()])
        model.train(training)
        total, learnt = accelerator.reduce(sums, reduction="sum").tolist()
        return total / learnt


def held_out_dialogues(
    examples: Sequence[Example], data: ChatDataConfig, config: InstructionValidationConfig
) -> HeldOutDialogues | None:
    """Return the first held-out conversations in batches of similar length; None where nothing is held out."""
    if not examples:
        return None
    size = data.train_batch_size
    chosen = sorted(examples[: config.max_validation_conversations], key=lambda example: len(example.tokens))
    rows = [[((example,), 1) for example in chosen[i : i + size]] for i in range(0, len(chosen), size)]
    return HeldOutDialogues([collate_windows(row) for row in rows], config)
