"""Between steps: validation, samples, saved models and states, each where its interval says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import exp
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor

from library.config.llm_schema import LLMConfig, LLMSamplingConfig, LLMSavingConfig
from library.errors import UserError
from library.llm.generation import SamplingSettings
from library.llm.token_batches import held_out_batches
from library.llm.token_shards import TokenShards
from library.llm.tokenizers import Tokenizer
from library.models.lm_files import export_hf
from library.models.transformer_lm import TransformerLM
from library.training.checkpoint import Stateful
from library.training.lr_plot import plot_runs
from library.training.metrics import MetricsStream, peak_memory_bytes
from library.training.pretraining.evaluation import held_out_loss, write_samples
from library.training.pretraining.state import PretrainingPosition, save_state
from library.training.progress import TrainingProgress, duration, shown_path

_DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class PretrainingEvents:
    """What is done between steps.

    Attributes:
        held_out: makes the batches to validate on; None where there are none.
        settings: that a state goes on with.
        val_losses: every validation loss so far.
    """

    accelerator: Accelerator
    model: TransformerLM
    tokenizer: Tokenizer
    parts: Mapping[str, Stateful]
    settings: Mapping[str, Any]
    saving: LLMSavingConfig
    sampling: LLMSamplingConfig
    validate_every: int | None
    held_out: Callable[[], Iterator[Tensor]] | None
    metrics: MetricsStream
    progress: TrainingProgress
    console: Console
    seed: int

    def __post_init__(self) -> None:
        self.folder = Path(self.saving.output_dir)
        self.val_losses: list[float] = []

    def is_due(self, step: int) -> bool:
        """Return whether anything is done after ``step``."""
        intervals = (self.saving.save_every_n_steps, self.sampling.sample_every_n_steps, self.validate_every)
        return any(_due(step, interval) for interval in intervals)

    def after_step(self, position: PretrainingPosition) -> None:
        """Do what is due."""
        step = position.step
        if _due(step, self.validate_every):
            self._validate(step)
        if _due(step, self.sampling.sample_every_n_steps):
            self._sample(step)
        if _due(step, self.saving.save_every_n_steps):
            self._save(f"{self.saving.output_name}-step{step:08d}", position)

    def at_start(self, position: PretrainingPosition) -> None:
        """Measure and sample what training begins with; a resumed run did so already."""
        if position.step == 0:
            if self.validate_every:
                self._validate(0)
            if self.sampling.sample_every_n_steps:
                self._sample(0)

    def at_end(self, position: PretrainingPosition) -> None:
        """Measure, sample and save what came out."""
        if self.held_out is not None and not _due(position.step, self.validate_every):
            self._validate(position.step)
        if self.sampling.sample_prompts and not _due(position.step, self.sampling.sample_every_n_steps):
            self._sample(position.step)
        self._write_model(self.folder / self.saving.output_name)

    def _validate(self, step: int) -> None:
        assert self.held_out is not None
        with self.progress.phase("validating"):
            loss = held_out_loss(self.model, self.held_out(), self.accelerator)
        self.val_losses.append(loss)
        self.metrics.write({"step": step, "val_loss": loss, "val_perplexity": exp(min(loss, 700.0))})

    def _sample(self, step: int) -> None:
        if not self.accelerator.is_main_process:
            return
        chosen = self.sampling
        greedy = chosen.sample_temperature == 0
        settings = SamplingSettings(
            max_new_tokens=chosen.sample_tokens,
            temperature=chosen.sample_temperature,
            top_p=None if greedy else chosen.sample_top_p,
            seed=self.seed,
            stop_tokens=self.tokenizer.stop_tokens,
        )
        path = self.folder / "samples" / f"{step:08d}.txt"
        with self.progress.phase("sampling"):
            texts = write_samples(self.model, self.tokenizer, chosen.sample_prompts, settings, path, self.accelerator)
        self.console.print(f"step {step}: {texts[0]!r}", soft_wrap=True)

    def _save(self, stem: str, position: PretrainingPosition) -> None:
        with self.progress.phase("saving"):
            self._write_model(self.folder / stem)
            if self.saving.save_state and self.accelerator.is_main_process:
                save_state(self.folder / f"{stem}-state", self.model, self.parts, position, self.settings)

    def _write_model(self, folder: Path) -> None:
        if self.accelerator.is_main_process:
            export_hf(self.model, folder, _DTYPES[self.saving.save_precision])
            self.tokenizer.save(folder)


def held_out_source(config: LLMConfig, context: int, rank: int, world: int) -> Callable[[], Iterator[Tensor]] | None:
    """Return what makes the batches to validate on; None where the corpus holds nothing out and nothing asks for it.

    Raises:
        UserError: ``validate_every_n_steps`` is set, and nothing or less than a window is held out.
    """
    shards = TokenShards(config.data.data_dir, "validation")
    if shards.tokens <= context:
        if config.validation.validate_every_n_steps:
            raise UserError(
                f"validate_every_n_steps: {config.data.data_dir} holds {shards.tokens} tokens out, less than a window; "
                "prepare it with a larger --validation_share, or remove the key"
            )
        return None
    size, most = config.data.train_batch_size, config.validation.validation_tokens
    return partial(held_out_batches, shards, context, size, most, rank, world)


def summary(events: PretrainingEvents, position: PretrainingPosition, seconds: float) -> list[tuple[str, str]]:
    """Return the rows that a run ends with: what it did, how well, and where its files are."""
    losses = events.val_losses
    rows = [
        ("steps", f"{position.step} in {duration(seconds)}"),
        ("loss", f"{position.loss_ema:.4f} (mean of the last steps)"),
        *events.progress.summary(),
        ("peak memory", f"{peak_memory_bytes() / 2**30:.2f} GiB"),
    ]
    if losses:
        before = f"{losses[0]:.4f} before -> " if len(losses) > 1 else ""
        perplexity = f"{exp(losses[0]):.1f} -> " if len(losses) > 1 else ""
        rows.insert(2, ("validation loss", f"{before}{losses[-1]:.4f} after"))
        rows.insert(3, ("perplexity", f"{perplexity}{exp(losses[-1]):.1f}"))
    plots = plot_runs([events.folder], events.folder / "lr.png") if position.step > 1 else []
    files = [events.folder / events.saving.output_name, events.folder / "metrics.jsonl", *plots]
    return rows + [(path.name, shown_path(path)) for path in files]


def _due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
