"""Pretraining: a language model trained in full on a corpus that tools/prepare_text.py made.

The corpus is cut into windows of ``context`` tokens, shuffled anew in each epoch; a step is ``tokens_per_batch`` of
them, in as many forward passes as it takes. Gradients are clipped only after the warm-up (before, norms are large
because the weights are fresh, and small learning rates are caution enough). Validation is the cross-entropy of
held-out documents, and samples are texts that the model goes on with.

How fast training is against what the hardware could do is MFU (PaLM, arXiv 2204.02311, appendix B): the operations that
the model needs, not those that are done. For a token 6 for each weight that it is multiplied with (2 forward, 4
backward), and 12 * layers * width of heads * context for attention. Recomputation under checkpointing does not count,
so it lowers the figure as it lowers the speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import ceil, exp
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from library.accelerator import build_accelerator, dp_rank_and_size
from library.config.markers import resume_keys
from library.config.pretrain_schema import LLMDataConfig, LLMModelConfig, LLMOptimizerConfig, PretrainConfig
from library.config.schema import TrainingConfig
from library.data.batches import DataParallelRank
from library.errors import UserError
from library.files import read_toml
from library.llm.conversion import read_generation_config, read_text_files, with_ends, write_text_files
from library.llm.token_batches import TokenBatches, TokenShards, held_out_batches
from library.llm.tokenizer_files import load_tokenizer
from library.models.hub import find_model
from library.models.llm.files import export_hf, load_lm
from library.models.llm.model import TransformerLM
from library.models.llm.spec import LMConfig, fourth_blocks, preset
from library.randomness import generator
from library.training.checkpoint.output_folder import SETTINGS, describe_settings
from library.training.checkpoint.state import EARLIER, TOKENIZER, Position, load_training_state, start_position
from library.training.memory.budget import recompute_blocks
from library.training.optim.factory import (
    MuonWithAdamW,
    build_optimizer,
    check_arguments,
    check_optimizer,
    has_averaged_weights,
    parse_optimizer_args,
)
from library.training.optim.schedules import build_schedule, resolve_steps
from library.training.parallel.gather import full_shapes, gather_weights, gathered, local_parameters, scatter_weights
from library.training.parallel.parallelize import lm_parallel_spec
from library.training.plan import PretrainPlan, resolve_pretraining
from library.training.sampling.text import TextSampler
from library.training.tasks.task import Task, describe_steps, run_length

_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}


def perplexity(loss: float) -> float:
    """Return exp(loss), and of a run that has left the numbers the largest that there is to show."""
    return exp(min(loss, 700.0))


class Pretraining(Task):
    """See the module's text.

    Attributes:
        shards, tokenizer: of the corpus.
        text_files, generation_config: what is saved beside the weights (``library.llm.conversion``).
        keeps_tokens: whether the corpus was made with the tokenizer of ``init_from``.
        context: tokens of a window.
        held_out_shards: the corpus's documents to validate on.
    """

    verifies: ClassVar[bool] = False
    trained: ClassVar[str] = "model"
    to_hold_out: ClassVar[str] = "prepare the corpus with a larger --validation_share"
    epoch_unit: ClassVar[str] = "windows"
    unit: ClassVar[str] = "window"
    lengths: Literal["one", "some", "many"] = "one"  # that batches have
    from_val_loss: ClassVar = {"perplexity": perplexity}

    plan: PretrainPlan
    transformer: TransformerLM
    batches: Any
    generation_config: Mapping[str, Any] = {}
    keeps_tokens: bool = False

    def __init__(self, config: PretrainConfig) -> None:
        self.plan = resolve_pretraining(config)
        super().__init__(config)

    def _check(self, config: PretrainConfig) -> None:
        if config.optimizer.optimizer_type.lower() == "muon":
            check_arguments(MuonWithAdamW, parse_optimizer_args(config.optimizer.optimizer_args), "Muon")
        else:
            check_optimizer(self.plan.optimizer)

    def _build_accelerator(self, config: PretrainConfig) -> Accelerator:
        if config.training.allow_tf32:
            torch.set_float32_matmul_precision("high")
        training = TrainingConfig(mixed_precision=config.training.mixed_precision)
        return build_accelerator(config.accelerate, training, config.saving, config.logging, config.parallel)

    def open(self, state: str | None = None) -> None:
        self.state, config = state, self.plan.config
        self.corpus = Path(config.data.data_dir or "")
        self.shards = TokenShards(self.corpus, "train")
        self.tokenizer = load_tokenizer(self.corpus)
        self._read_published()
        prints = {TOKENIZER: self.tokenizer.fingerprint(), EARLIER: self.tokenizer.fingerprint(blank=" ")}
        self.resume_keys = resume_keys(config) | prints
        if prompts := config.sampling.sample_prompts:
            self.sampler = TextSampler(
                config.sampling, [self.tokenizer.encode_prompt(prompt) for prompt in prompts],
                self.tokenizer, self.tokenizer.stop_tokens, config.training.seed,
                self.names.folder / "samples", "{:08d}.txt", str.__add__, self.accelerator, self.console,
            )  # fmt: skip

    def _read_published(self) -> None:
        """Read what is saved beside the weights: what was published with ``init_from``, if the corpus is its tokens."""
        source, given = self.corpus, self.plan.config.model.init_from
        if given is not None:
            folder = find_model(given, "init_from", is_pipeline=False)
            with suppress(UserError):  # it has no tokenizer, or one that is not read
                self.keeps_tokens = load_tokenizer(folder).has_same_tokens(self.tokenizer)
            if self.keeps_tokens:
                source, self.generation_config = folder, read_generation_config(folder)
            else:
                line = f"note: the corpus was not made with the tokenizer of {given}: the corpus's is saved, and no "
                self.console.print(f"{line}chat template", soft_wrap=True)
        self.text_files = read_text_files(source)

    def prepare(self) -> None:
        config, training, optimizing = self.plan.config, self.plan.config.training, self.plan.optimizer
        self.transformer = model = self._load_model()
        in_step = self._plan_batches()
        per_epoch = self.batches.batches_per_epoch()
        start = start_position(self.state, per_epoch)
        self.total_steps, self.total_epochs = run_length(training, per_epoch, in_step, start)
        epochs = self.total_steps / ceil(per_epoch / in_step)
        steps = describe_steps(per_epoch, self.batches.dp_rank, in_step, self.unit)
        self.console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters are trained")
        self.console.print(f"{epochs:.2f} epochs; {steps}", soft_wrap=True)

        optimizer = build_pretraining_optimizer(optimizing, model, training.full_bf16, training.seed)
        lr_schedule = build_schedule(optimizing, optimizer, self.total_steps)
        warmup = resolve_steps(optimizing.lr_warmup_steps, self.total_steps)
        spec = lm_parallel_spec(model)
        self._compile(config, spec, self.total_steps - start.step, self.lengths)
        self.engine.prepare(
            config.parallel,
            spec,
            optimizer,
            lr_schedule,
            lambda: list(local_parameters(model).values()),
            max_grad_norm=optimizing.max_grad_norm,
            clips_from=0 if optimizing.clip_during_warmup else warmup,
            ema_decay=config.saving.ema_decay,
        )

    def _load_model(self) -> TransformerLM:
        model = build_model(self.plan.config, self.shards.vocab_size, self._loaded_to())
        own = model.config if self.keeps_tokens else replace(model.config, bos=None, eos=(), pad=None)
        ends = [] if self.tokenizer.eos is None else [self.tokenizer.eos]
        model.config = with_ends(own, self.tokenizer, ends)
        return model

    def _plan_batches(self) -> int:
        """Decide what is trained and validated on; return how many windows, or batches, an optimizer step has."""
        data, accelerator, model = self.plan.config.data, self.accelerator, self.transformer
        self.context = context = self.plan.config.model.context or model.config.context
        self.throughput = ("tokens_per_s", context)
        self.flops_per_token, self.peak_flops = flops_per_token(model, context), peak_flops(accelerator.device)
        accelerator.gradient_accumulation_steps = accumulation_for(data, context, dp_rank_and_size(accelerator)[1])
        dp_rank, on_gpu = DataParallelRank.of(accelerator), accelerator.device.type == "cuda"
        self.batches = self.loader = TokenBatches(
            self.shards, context, data.train_batch_size, self.plan.config.training.seed, dp_rank, pinned=on_gpu
        )
        self._find_held_out()
        in_step = self.batches.windows_in_step
        self.console.print(f"{self.shards.tokens:,} tokens to train on, {in_step * context:,} tokens a step")
        return in_step

    def _find_held_out(self) -> None:
        """Find what to validate on; nothing where the corpus holds nothing out and nothing asks for it."""
        config = self.plan.config.validation
        is_wanted = bool(config.validate_every_n_steps or config.validate_every_n_epochs)
        shards = TokenShards(self.corpus, "validation")
        self.validates, self.validates_first = shards.tokens > self.context, is_wanted
        if is_wanted and not self.validates:
            key = "validate_every_n_steps" if config.validate_every_n_steps else "validate_every_n_epochs"
            raise UserError(
                f"{key}: {self.corpus} holds {shards.tokens} tokens out, less than a window; "
                "prepare it with a larger --validation_share, or remove the key"
            )
        self.held_out_shards = shards

    def loss(self, model: nn.Module, batch: Tensor, step: int) -> tuple[Tensor, Tensor]:
        tokens = batch.to(self.accelerator.device, non_blocking=True)  # [B, context + 1]
        with self.accelerator.autocast():
            loss = model(tokens[:, :-1], tokens[:, 1:])
        return loss, loss.detach()[None]

    def training_metrics(self, values: dict[str, float], position: Position) -> dict[str, float]:
        windows = position.epoch * self.batches.windows + position.batches
        values |= {"perplexity": perplexity(values["loss"]), "tokens": windows * self.context}
        if self.peak_flops is not None:
            possible = self.peak_flops * self.accelerator.num_processes
            values["mfu"] = values["tokens_per_s"] * self.flops_per_token / possible
        return values

    def validate(self, step: int) -> dict[str, float]:
        size, most = self.plan.config.data.train_batch_size, self.plan.config.validation.validation_tokens
        batches = partial(held_out_batches, self.held_out_shards, self.context, size, most)
        (loss,) = self.engine.mean_over(batches, self._held_out_loss)
        return {"val_loss": loss}

    def _held_out_loss(self, batch: Tensor) -> tuple[Tensor, int]:
        count = batch[:, 1:].numel()
        return self.loss(self.transformer, batch, 0)[0].double() * count, count

    def save(self, path: Path, position: Position) -> None:
        settings = {SETTINGS: describe_settings(self.raw_config)}
        export_hf(self.transformer, path, _DTYPES[self.plan.config.saving.save_precision], self._deployed, settings)
        write_text_files(path, self.text_files, self.generation_config, self.transformer.config)

    @contextmanager
    def gathered(self, with_state: bool) -> Iterator[None]:
        self._weights = self._deployed = gather_weights(self.transformer, self.accelerator)
        if has_averaged_weights(self.engine.optimizer):
            with self.engine.deployed_weights():  # what is gathered may be copies, which do not change with the model
                self._deployed = gather_weights(self.transformer, self.accelerator)
        with gathered(self.engine.optimizer, with_state):
            yield
        del self._weights, self._deployed

    def weights(self) -> dict[str, Tensor]:
        return self._weights

    def restore(self, folder: str) -> Position:
        model = self.transformer
        scatter = partial(scatter_weights, model)
        return load_training_state(folder, full_shapes(model), scatter, self.engine.parts(), "", self.resume_keys)

    def memory_advice(self) -> str:
        options = [] if self.plan.config.training.gradient_checkpointing else ["set gradient_checkpointing = true"]
        return ", or ".join([*options, "lower train_batch_size (tokens_per_batch keeps the step's size)"])

    def sample_names(self, batch: Tensor) -> list[str]:
        return [f"{len(batch)} windows of {self.context} tokens"]


def accumulation_for(config: LLMDataConfig, context: int, world: int) -> int:
    """Return how many forward passes of each process make an optimizer step.

    Raises:
        UserError: ``tokens_per_batch`` is no multiple of the tokens of one forward pass of every process.
    """
    once = config.train_batch_size * context * world
    wanted = config.tokens_per_batch or once
    if wanted % once:
        nearest = max(1, round(wanted / once)) * once
        raise UserError(
            f"tokens_per_batch: {wanted} is no multiple of {once} (train_batch_size {config.train_batch_size} x "
            f"context {context} x {world} processes); set {nearest}"
        )
    return wanted // once


def build_model(config: PretrainConfig, vocab_size: int, device: torch.device) -> TransformerLM:
    """Return the model to train, on ``device``, in fp32 (or bf16 with ``full_bf16``).

    Args:
        config: sections ``model`` and ``training`` are read.
        vocab_size: of the corpus; a preset takes it over, a published model must have it.
        device: where it goes; fresh weights are drawn on the CPU, so that they are the same everywhere.

    Raises:
        UserError: the preset is unknown, its changed sizes do not fit together, or the published model has another
            vocabulary or fewer positions.
    """
    dtype = torch.bfloat16 if config.training.full_bf16 else torch.float32
    if config.model.init_from is not None:
        folder = find_model(config.model.init_from, "init_from", is_pipeline=False)
        model = load_lm(folder, dtype, device, pad_vocabulary_to=config.model.pad_vocabulary_to, dequantised=True)
        if model.config.vocab_size < vocab_size:
            raise UserError(
                f"init_from: {config.model.init_from} has {model.config.vocab_size} tokens, the corpus was made with "
                f"{vocab_size}; prepare it with the model's own tokenizer"
            )
        model.requires_grad_(True)
    else:
        model = TransformerLM(fresh_config(config.model, vocab_size))
        model.initialise(generator(config.training.seed, "weights")).to(device, dtype)
    context = config.model.context or model.config.context
    if not model.config.has_rope and context > model.config.context:
        raise UserError(f"context: {context} is more than the model's {model.config.context} positions; lower it")
    recompute_blocks(model, model.config.layers, config.training, device)
    return model.train()


def fresh_config(config: LLMModelConfig, vocab_size: int) -> LMConfig:
    """Return the preset with the keys that change it and the corpus's vocabulary.

    Raises:
        UserError: the preset is unknown, or sizes do not fit together.
    """
    assert config.preset is not None
    base = preset(config.preset)
    changes: dict[str, Any] = {key: value for key in ("width", "layers") if (value := getattr(config, key))}
    heads = config.heads or base.heads
    width = config.width or base.width
    kv_heads = config.kv_heads or (heads if base.kv_heads == base.heads else min(base.kv_heads, heads))
    if base.family == "gpt2" and kv_heads != heads:
        raise UserError(f"kv_heads: {config.preset} has as many as heads; remove it, or choose a llama preset")
    if width % heads and (width, heads) != (base.width, base.heads):
        raise UserError(f"width: {width} does not divide into {heads} heads; change one of them")
    hidden = config.hidden or (base.hidden if width == base.width else round(base.hidden * width / base.width))
    head_dim = base.head_dim if (width, heads) == (base.width, base.heads) else width // heads
    changes |= {"heads": heads, "kv_heads": kv_heads, "hidden": hidden, "head_dim": head_dim}
    changes |= {"context": config.context or base.context, "vocab_size": vocab_size, "padded_vocab_size": 0}
    if base.no_rope:
        changes["no_rope"] = fourth_blocks(config.layers or base.layers)
    return replace(base, **changes).padded(config.pad_vocabulary_to)


def build_pretraining_optimizer(config: LLMOptimizerConfig, model: nn.Module, full_bf16: bool, seed: int) -> Optimizer:
    """Return the optimizer over matrices with weight decay, Muon's own among them, and all others without.

    Raises:
        UserError: as ``library.training.optim.factory.build_optimizer``.
    """
    is_muon = config.optimizer_type.lower() == "muon"
    groups = parameter_groups(model, config.weight_decay, is_muon)
    if not is_muon:
        return build_optimizer(config, groups, full_bf16, seed)
    return MuonWithAdamW(groups, lr=config.learning_rate, **parse_optimizer_args(config.optimizer_args))


def parameter_groups(model: nn.Module, weight_decay: float, for_muon: bool = False) -> list[dict[str, Any]]:
    """Return matrices (embeddings among them) and vectors as torch's parameter groups; tied matrices once.

    ``for_muon``: the matrices within blocks are a group of their own, ``hidden``.
    """
    groups: dict[str, list[nn.Parameter]] = {"hidden": [], "matrices": [], "vectors": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            hidden = for_muon and parameter.ndim == 2 and name.startswith("blocks.")
            groups["hidden" if hidden else "matrices" if parameter.ndim >= 2 else "vectors"].append(parameter)
    decay = {"hidden": weight_decay, "matrices": weight_decay, "vectors": 0.0}
    return [
        {"params": members, "weight_decay": decay[name], "name": name} for name, members in groups.items() if members
    ]


def flops_per_token(model: TransformerLM, context: int) -> float:
    """Return the operations that forward and backward of one token need."""
    config: LMConfig = model.config
    blocks = sum(parameter.numel() for parameter in model.blocks.parameters() if parameter.ndim == 2)
    head = config.padded_vocab_size * config.width
    return 6 * (blocks + head) + 12 * config.layers * config.heads * config.head_dim * context


def peak_flops(device: torch.device) -> float | None:
    """Return the device's bf16 peak in FLOP/s; None where it is not known, as for CPUs."""
    if device.type != "cuda":
        return None
    name, peaks = torch.cuda.get_device_name(device), read_toml(Path(__file__).with_name("gpus.toml"))[0]
    return next((peak for known, peak in peaks.items() if known in name), None)
