"""Between steps: validation, samples, saved models and states, each where its interval says so.

A pretraining state on disk: weights, optimizer, schedule and position; from it a run goes on bit for bit.

The position says which tokens come next, what is random is a function of it, so nothing else needs saving. A folder is
written under a temporary name and renamed when it is whole.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from math import exp
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from library.accelerator import is_model_parallel
from library.config.pretrain_schema import LLMSamplingConfig, LLMSavingConfig, PretrainConfig
from library.errors import UserError
from library.files import atomic_folder, write_text
from library.llm.generation import SamplingSettings
from library.llm.token_batches import TokenShards, held_out_batches
from library.llm.tokenizers import Tokenizer
from library.models.llm.files import export_hf
from library.models.llm.model import TransformerLM
from library.safetensors_io import write_safetensors
from library.training.checkpoint.saving import CheckpointWriter, fallback_folder
from library.training.checkpoint.state import Stateful, read_state, write_state
from library.training.guard.signals import NOTHING, SignalHandler
from library.training.parallel.gather import full_shapes, gather_weights, gathered, scatter_weights
from library.training.report.metrics import MetricsStream, peak_memory_bytes
from library.training.report.plots import plot_runs
from library.training.report.progress import TrainingProgress, duration, shown_path
from library.training.tasks.pretraining import held_out_loss, write_samples

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
    begun: float  # seconds since 1970
    total_steps: int

    def __post_init__(self) -> None:
        self.folder = Path(self.saving.output_dir)
        self.val_losses: list[float] = []
        self.stop_request = NOTHING  # that stopped the run
        fallback = fallback_folder(self.saving.save_fallback_dir, self.saving.output_name)
        self.writer = CheckpointWriter(self.folder, fallback, self.saving.save_retries, self.progress.note)
        self.requests = SignalHandler(self.folder, self.accelerator, self.begun, is_owed=lambda: self.writer.is_due)

    @property
    def stopped(self) -> bool:
        """Whether training is to end here."""
        return self.stop_request.stop is not None

    def is_due(self, step: int) -> bool:
        """Return whether anything is done after ``step``."""
        if self.requests.look(step):
            return True
        intervals = (self.saving.save_every_n_steps, self.sampling.sample_every_n_steps, self.validate_every)
        return any(_due(step, interval) for interval in intervals)

    def after_step(self, position: PretrainingPosition) -> None:
        """Do what is due."""
        step = position.step
        stop_request = self.requests.look(step)
        if stop_request.stop is not None and step < self.total_steps:
            in_a_hurry = stop_request.stop != "STOP"
            self._save(self.stem(step), position, True, last=lambda: in_a_hurry or self.requests.signalled)
            self.requests.answered(stop_request)
            self.stop_request = stop_request
            return
        if _due(step, self.validate_every):
            self._validate(step)
        if _due(step, self.sampling.sample_every_n_steps) or (stop_request.sample and self.sampling.sample_prompts):
            self._sample(step)
        if _due(step, self.saving.save_every_n_steps) or stop_request.save or stop_request.again:
            with_state = self.saving.save_state or stop_request.save
            self._save(self.stem(step), position, with_state)
        self.requests.answered(stop_request)

    def at_start(self, position: PretrainingPosition) -> None:
        """Measure and sample what training begins with; a resumed run did so already."""
        if position.step == 0:
            if self.validate_every:
                self._validate(0)
            if self.sampling.sample_every_n_steps:
                self._sample(0)

    def at_end(self, position: PretrainingPosition) -> None:
        """Save what came out, measure it, and sample."""
        if self.stopped:
            return
        self._save(self.saving.output_name, position, False, last=lambda: self.requests.signalled)
        if self.held_out is not None and not _due(position.step, self.validate_every):
            self._validate(position.step)
        if self.sampling.sample_prompts and not _due(position.step, self.sampling.sample_every_n_steps):
            self._sample(position.step)

    def stem(self, step: int) -> str:
        """Return the name of what is saved after ``step``."""
        return f"{self.saving.output_name}-step{step:08d}"

    def _validate(self, step: int) -> None:
        assert self.held_out is not None
        with self.progress.phase("validating"):
            loss = held_out_loss(self.model, self.held_out(), self.accelerator)
        self.val_losses.append(loss)
        self.metrics.write({"step": step, "val_loss": loss, "val_perplexity": exp(min(loss, 700.0))})

    def _sample(self, step: int) -> None:
        if not self.accelerator.is_main_process and not is_model_parallel(self.accelerator):
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
        # Of split weights every process has to take part; all write the same text, one of them to disk.
        path = self.folder / "samples" / f"{step:08d}.txt" if self.accelerator.is_main_process else None
        with self.progress.phase("sampling"):
            model, tokenizer, prompts = self.model, self.tokenizer, chosen.sample_prompts

            def sample() -> None:
                texts = write_samples(model, tokenizer, prompts, settings, path, self.accelerator)
                self.console.print(f"step {step}: {texts[0]!r}", soft_wrap=True)

            self.writer.tolerate(sample)

    def _save(
        self,
        stem: str,
        position: PretrainingPosition,
        with_state: bool,
        last: Callable[[], bool] | None = None,
    ) -> None:
        """Save the model, and a state; ``last`` as in ``library.training.events``."""
        weights = gather_weights(self.model, self.accelerator)
        with gathered(self.parts["optimizer"], with_state):
            states = {name: part.state_dict() for name, part in self.parts.items()} if with_state else {}
        if not self.accelerator.is_main_process:
            return

        def write(folder: Path) -> list[Path]:
            with atomic_folder(folder / stem) as target:
                export_hf(self.model, target, _DTYPES[self.saving.save_precision], weights)
                self.tokenizer.save(target)
            if with_state:
                save_state(folder / f"{stem}-state", weights, states, position, self.settings)
            return [folder / stem]

        with self.progress.phase("saving"):
            if last is None:
                self.writer.attempt(write)
            else:
                self.writer.insist(write, last)


def held_out_source(
    config: PretrainConfig, context: int, rank: int, world: int
) -> Callable[[], Iterator[Tensor]] | None:
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
    plots: list[Path] = []
    if position.step > 1:
        events.writer.tolerate(lambda: plots.extend(plot_runs([events.folder], events.folder / "lr.png")))
    if events.stopped:
        rows.append(("stopped", f"by {events.stop_request.stop} before step {events.total_steps}"))
    stem = events.stem(position.step) if events.stopped else events.saving.output_name
    files = [events.folder / stem, events.folder / "metrics.jsonl", *plots]
    return rows + [(path.name, shown_path(path)) for path in files]


def _due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0


_WEIGHTS, _POSITION = "weights.safetensors", "position.json"


@dataclass
class PretrainingPosition:
    """Where a run stands."""

    step: int = 0  # optimizer steps done
    windows: int = 0  # training windows seen, over all processes
    loss_ema: float = 0.0


def save_state(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    states: Mapping[str, Any],
    position: PretrainingPosition,
    settings: Mapping[str, Any],
) -> None:
    """Write a state folder in one step, replacing an older one of the same name; raises a WriteError if it cannot.

    ``weights`` and ``states`` (of optimizer and schedule) are full, whatever layout the run has.
    """
    with atomic_folder(folder) as temporary:
        write_safetensors(temporary / _WEIGHTS, weights)
        for name, state in states.items():
            write_state(temporary / name, state)
        about = {**asdict(position), "settings": dict(settings), "saved": time.time()}
        write_text(temporary / _POSITION, json.dumps(about))


@torch.no_grad()
def load_state(
    folder: str | Path,
    model: nn.Module,
    parts: Mapping[str, Stateful],
    settings: Mapping[str, Any],
    total_steps: int,
    finished_too: bool = False,
) -> PretrainingPosition:
    """Put a saved state back into ``model`` and ``parts``; return the position to go on from.

    ``finished_too`` allows a state at the run's last step, whose end is yet to come.

    Raises:
        UserError: ``folder`` is no state or damaged, has no step left, or was written by a run with other settings or
            another model.
    """
    folder = Path(folder)
    try:
        saved = json.loads((folder / _POSITION).read_text(encoding="utf-8"))
        then, _ = saved.pop("settings"), saved.pop("saved", None)
        position = PretrainingPosition(**saved)
        weights = load_file(folder / _WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise UserError(f"resume: {folder} is no pretraining state ({error}); give a folder save_state wrote") from None
    if position.step > total_steps or (position.step == total_steps and not finished_too):
        raise UserError(f"resume: {folder} is at step {position.step} of {total_steps}; raise max_train_steps")
    for key in sorted(then.keys() & settings.keys()):
        if then[key] != settings[key]:
            raise UserError(
                f"resume: {folder} was trained with {key} = {json.dumps(then[key])}, now it is "
                f"{json.dumps(settings[key])}; set that again, or start a new run with init_from"
            )
    shapes = full_shapes(model)
    found = {name: tensor.shape for name, tensor in weights.items()}
    differing = [n for n in found.keys() | shapes.keys() if found.get(n) != shapes.get(n)]
    if differing:
        raise UserError(f"resume: {folder} holds another model ({sorted(differing)[0]} differs); use its settings")
    scatter_weights(model, weights)
    for name, part in parts.items():
        state = read_state(folder / name)
        try:
            part.load_state_dict(state)
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"resume: {folder}: the saved {name} does not fit this run's ({error})") from error
    return position
