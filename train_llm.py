"""Pretrain a language model on a corpus that tools/prepare_text.py made.

    python train_llm.py --config_file configs/llm/llama_tiny.toml
    torchrun --nproc-per-node 2 train_llm.py --config_file ...

``train`` reads from top to bottom: corpus and model, optimizer and schedule, what happens between steps, the loop, the
summary.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

import toml
import torch
from rich.console import Console

from library.accelerator import dp_rank_and_size
from library.config.load import load_llm_config
from library.config.pretrain_schema import PretrainConfig
from library.config.schema import resume_keys
from library.errors import exit_on_user_error
from library.files import write_text
from library.llm.token_batches import TokenBatches, TokenShards
from library.llm.tokenizers import load_tokenizer
from library.processes import one_of_several
from library.training.checkpoint.resume import AUTO, resolve_resume
from library.training.guard.signals import resume_hint
from library.training.optim.schedules import build_schedule, resolve_steps
from library.training.parallel.parallelize import parallelize
from library.training.report.metrics import MetricsStream
from library.training.report.progress import TrainingProgress, print_summary
from library.training.tasks.pretraining import (
    accumulation_for,
    build_model,
    build_pretraining_optimizer,
    check_corpus,
    flops_per_token,
    name_ends,
    parallel_spec,
    peak_flops,
    pretraining_accelerator,
    training_context,
)
from library.training.tasks.pretraining_events import (
    PretrainingEvents,
    PretrainingPosition,
    held_out_source,
    load_state,
    summary,
)
from library.training.tasks.pretraining_loop import Pretrainer, StepPlan


@exit_on_user_error
@one_of_several
def main() -> None:
    """Run one training from the command line."""
    events = train(load_llm_config(sys.argv[1:]))
    if events.stopped:
        raise SystemExit(events.stop_request.exit_code)


def train(config: PretrainConfig) -> PretrainingEvents:
    """Train as ``config`` says; leave the model, metrics and samples in ``output_dir``.

    Raises:
        UserError: anything in the configuration, the corpus or the model files that a user can put right.
    """
    begun, seed = time.time(), config.training.seed
    shards, tokenizer = TokenShards(config.data.data_dir, "train"), load_tokenizer(config.data.data_dir)
    accelerator = pretraining_accelerator(config)
    device, (rank, world) = accelerator.device, dp_rank_and_size(accelerator)
    console = Console(quiet=not accelerator.is_main_process, markup=False, highlight=False)
    asked, auto = config, config.training.resume == AUTO
    config = resolve_resume(config, accelerator, partial(console.print, soft_wrap=True))
    # Split weights go to their device as they are split: the whole model need not fit there.
    bare = build_model(config, shards.vocab_size, torch.device("cpu") if config.parallel.splits_model else device)
    check_corpus(shards, bare.config)
    name_ends(bare, tokenizer)
    context = training_context(config.model, bare.config)
    batches = TokenBatches(shards, context, config.data.train_batch_size, seed, rank, world)
    plan = step_plan(config, context, world)
    console.print(f"{sum(p.numel() for p in bare.parameters()):,} parameters, {shards.tokens:,} tokens to train on")
    console.print(f"{plan.tokens:,} tokens a step, {plan.total * plan.windows / batches.windows:.2f} epochs")

    optimizer = build_pretraining_optimizer(config.optimizer, bare, config.training.full_bf16, seed)
    schedule = build_schedule(config.optimizer.shared(), optimizer, plan.total)
    speed = flops_per_token(bare, context), peak_flops(device)
    model, optimizer, _, _, pipeline = parallelize(
        accelerator, config.parallel, parallel_spec(bare), optimizer, accumulation=plan.accumulation
    )
    parts, settings = {"optimizer": optimizer, "schedule": schedule}, resume_keys(config)
    position = PretrainingPosition()
    if config.training.resume:
        position = load_state(config.training.resume, bare, parts, settings, plan.total, auto)
    folder = Path(config.saving.output_dir)
    if accelerator.is_main_process:
        write_text(folder / "config.toml", toml.dumps(asked.model_dump(exclude_none=True)))
    metrics = MetricsStream(folder / "metrics.jsonl", accelerator, config.logging, position.step)

    with TrainingProgress(console, plan.total, position.step) as progress:
        events = PretrainingEvents(
            accelerator=accelerator,
            model=bare,
            tokenizer=tokenizer,
            parts=parts,
            settings=settings,
            saving=config.saving,
            sampling=config.sampling,
            validate_every=config.validation.validate_every_n_steps,
            held_out=held_out_source(config, context, rank, world),
            metrics=metrics,
            progress=progress,
            console=console,
            seed=seed,
            begun=begun,
            total_steps=plan.total,
        )
        with events.requests.listening():
            events.at_start(position)
            Pretrainer(
                accelerator, model, optimizer, schedule, batches, position, plan, metrics, progress, events, *speed,
                pipeline,
            ).run()  # fmt: skip
            events.at_end(position)
    if accelerator.is_main_process:
        print_summary(console, summary(events, position, time.time() - begun))
        if events.stopped:
            stopped = events.folder / f"{events.stem(position.step)}-state"
            console.print(resume_hint(events.stop_request, position.step, stopped), soft_wrap=True)
    accelerator.wait_for_everyone()  # a process that leaves early takes the process group from under the others
    metrics.close()
    events.writer.report()
    return events


def step_plan(config: PretrainConfig, context: int, world: int) -> StepPlan:
    """Return what an optimizer step consists of, and how many there are."""
    accumulation, optimizer = accumulation_for(config.data, context, world), config.optimizer
    windows, total = accumulation * config.data.train_batch_size * world, config.training.max_train_steps
    warmup = resolve_steps(optimizer.shared().lr_warmup_steps, total)
    return StepPlan(
        total=total,
        accumulation=accumulation,
        windows=windows,
        tokens=windows * context,
        max_grad_norm=optimizer.max_grad_norm,
        clip_from=0 if optimizer.clip_during_warmup else warmup,
        log_every=config.logging.log_every_n_steps,
    )


if __name__ == "__main__":
    main()
