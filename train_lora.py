"""Train a LoRA for a diffusion transformer or a language model.

    python train_lora.py --config_file configs/flux_lora.toml --dataset_config my_dataset.toml
    python train_lora.py --config_file configs/llm/llama_lora.toml --train_data my_conversations.jsonl
    torchrun --nproc-per-node 2 train_lora.py --config_file ...

``train`` reads from top to bottom: data and its caches, the run (network, optimizer, schedule), and ``complete``: what
happens between steps, the loop, the summary. So does ``train_language_model``, which is the same run on conversations.
What is called from here takes its own section of the configuration; only what checks the whole of it, keeps it or
builds the run from it takes it all.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from library.accelerator import build_accelerator
from library.config import TrainConfig, load_config
from library.config.chat_schema import ChatTrainConfig
from library.config.kohya.translate import Note, summary
from library.config.load import load_language_config, names_language_model
from library.errors import UserError, exit_on_user_error
from library.files import weights_fingerprint
from library.llm.chat_templates import dialogue_template
from library.llm.tokenizers import load_tokenizer
from library.models.llm.files import open_lm
from library.models.registry import lora_targets, model_family
from library.processes import one_of_several
from library.training.checkpoint.export import checked_export, lora_writer, write_config
from library.training.checkpoint.hub import HubUpload, build_upload
from library.training.checkpoint.resume import AUTO, resolve_resume
from library.training.checkpoint.state import OutputNames, Position
from library.training.events import HeldOut, RunEvents, Sampler, SaveLora, run_summary
from library.training.flow import resolve_sampling
from library.training.guard.nonfinite import FaultPolicy, advice
from library.training.guard.signals import resume_hint
from library.training.memory.attention_choice import attention_of_run
from library.training.memory.dry_run import Rehearsal, rehearsed
from library.training.parallel.device_map import devices_to_fill
from library.training.report.metrics import MetricsStream
from library.training.report.progress import TrainingProgress, print_summary
from library.training.run import Run, prepare_run
from library.training.sampling.answers import answer_sampler
from library.training.sampling.conditions import check_pictures
from library.training.sampling.images import build_sampler
from library.training.sampling.prompts import SamplePrompt, check_steering, read_prompts
from library.training.tasks.chat_data import prepare_dialogues
from library.training.tasks.chat_lora import (
    adapter_writer,
    check_family,
    check_split,
    held_out_dialogues,
    prepare_base,
    prepare_instruction_run,
)
from library.training.tasks.distillation import prepare_teacher
from library.training.tasks.image_lora import base_dtype, cache_data, hold_out, prepare_networks, read_data
from library.training.tasks.lora_plan import (
    check_against_model,
    check_before_loading,
    check_saved,
    plan_fp8,
    plan_network,
    text_encoder_recipe,
)
from library.training.trainer import Trainer


@exit_on_user_error
@one_of_several
def main() -> None:
    """Run one training from the command line."""
    if names_language_model(sys.argv[1:]):
        leave(train_language_model(load_language_config(sys.argv[1:])))
        return
    notes: list[Note] = []
    config = load_config(sys.argv[1:], notes)
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(summary(notes)), end="\n" if notes else "")
    leave(train(config))


def leave(events: RunEvents) -> None:
    """End the process with the exit code of a run that was stopped; a finished one just returns."""
    if events.stop_request.stop is not None:
        raise SystemExit(events.stop_request.exit_code)


def train(config: TrainConfig) -> RunEvents:
    """Train a LoRA as ``config`` says; leave LoRA, metrics, samples and plots in ``output_dir``.

    Raises:
        UserError: anything in the configuration, the data or the model files that a user can put right.
    """
    begun = time.time()
    check_before_loading(config)
    accelerator = build_accelerator(config.accelerate, config.training, config.saving, config.logging, config.parallel)
    devices = devices_to_fill(config.parallel, accelerator)
    console = Console(quiet=not accelerator.is_main_process, markup=False)  # paths may hold [brackets]
    asked, auto = config, config.training.resume == AUTO
    config = resolve_resume(config, accelerator, partial(console.print, soft_wrap=True))
    family = model_family(config.model)
    config = config.model_copy(update={"flow": resolve_sampling(config.flow, family)})
    plan = plan_network(config.network, config.optimizer, config.training, lora_targets()[family.name])
    dtype = base_dtype(config.model, config.training)
    image_encoder = family.load_image_encoder(dtype, accelerator.device)
    fp8 = plan_fp8(config.precision, family.fp8_layout(), config.training.seed, accelerator.device)
    text_encoder = family.load_text_encoder(dtype, accelerator.device, recipe=text_encoder_recipe(config.precision))
    usual = SamplePrompt("", guidance=family.sample_guidance)
    prompts = read_prompts(config.sampling.sample_prompts, config.training.seed, image_encoder.pixel_multiple, usual)
    for remark in check_steering(prompts, family.guidance_input, family.sample_guidance):
        console.print(f"note: {remark}")
    check_pictures(prompts, family.conditioning, family.most_references)
    check_against_model(config, family, plan, text_encoder, finished_too=auto)
    upload = build_upload(config.hub, accelerator, console, config.saving.output_dir, bool(config.training.resume))

    data = read_data(
        config.dataset, config.training, config.flow, image_encoder, accelerator, console, family.conditioning,
        family.most_references,
    )  # fmt: skip
    attention = attention_of_run(config, family, data, dtype, accelerator.device)
    console.print(f"attention: {attention}")
    config = rehearsed(Rehearsal(config, family, plan, text_encoder, dtype, accelerator, data), console)
    # The encoders' weights are read only for what is not cached yet, and leave before the transformer comes.
    cache_data(data, config.dataset, image_encoder, text_encoder, accelerator, prompts, console)
    teacher = prepare_teacher(config, data, accelerator, console)
    networks = prepare_networks(
        family, text_encoder, plan, config.network, config.training, dtype, accelerator.device, console, fp8,
        config.parallel.splits_model, devices,
    )  # fmt: skip
    run = prepare_run(config, family, plan, networks, data, accelerator, teacher)
    held_out = hold_out(data, run.step, config.validation)
    names = OutputNames(Path(config.saving.output_dir), config.saving.output_name)
    samples, writes = names.folder / "samples", accelerator.is_main_process
    sampler = build_sampler(family, prompts, image_encoder, data, samples, networks.text_encoders, writes)
    save_lora = lora_writer(config, run, data, networks.base_precision, family.modelspec_architecture, begun, attention)
    facts = {"attention": attention}
    return complete(config, asked, run, names, save_lora, sampler, held_out, upload, console, begun, facts)


def train_language_model(config: ChatTrainConfig) -> RunEvents:
    """Train a LoRA on conversations as ``config`` says; leave an adapter for peft, metrics and samples.

    Raises:
        UserError: as :func:`train`.
    """
    begun, seed = time.time(), config.training.seed
    check_before_loading(config)
    accelerator = build_accelerator(config.accelerate, config.training, config.saving, config.logging, config.parallel)
    console = Console(quiet=not accelerator.is_main_process, markup=False, highlight=False)
    asked, auto = config, config.training.resume == AUTO
    config = resolve_resume(config, accelerator, partial(console.print, soft_wrap=True))
    folder = Path(config.model.pretrained_model_name_or_path).expanduser()
    architecture, weights, _ = open_lm(folder)
    check_family(config.model.model_type, architecture)
    check_split(architecture, config.parallel)
    plan = plan_network(config.network, config.optimizer, config.training, lora_targets()[architecture.family])
    fp8 = plan_fp8(config.precision, weights.fp8, seed, accelerator.device)
    fingerprint = weights_fingerprint(folder)  # reads all of a file that is no safetensors
    check_saved(config, plan.targets, fingerprint, finished_too=auto)
    tokenizer_path = Path(config.model.tokenizer or folder).expanduser()
    template = dialogue_template(config.instructions.chat_template, load_tokenizer(tokenizer_path), tokenizer_path)
    names = OutputNames(Path(config.saving.output_dir), config.saving.output_name, suffix="")
    sampler = answer_sampler(
        config.sampling, template, config.instructions.system_prompt, architecture, seed, names.folder / "samples",
        accelerator, console,
    )  # fmt: skip
    upload = build_upload(config.hub, accelerator, console, config.saving.output_dir, bool(config.training.resume))

    data = prepare_dialogues(config.instructions, template, architecture, seed, console)
    console.print("\n".join(data.remarks), soft_wrap=True)
    dtype = base_dtype(config.model, config.training)
    loaded_to = torch.device("cpu") if config.parallel.splits_model else accelerator.device
    base = prepare_base(config, plan, fp8, weights.fp8, fingerprint, dtype, loaded_to, console)
    run = prepare_instruction_run(config, plan, base, data, accelerator)
    held_out = held_out_dialogues(data.held_out, config.instructions, config.validation)
    save_lora = adapter_writer(config, run, base.precision, template.name, begun)
    return complete(config, asked, run, names, save_lora, sampler, held_out, upload, console, begun)


def complete(
    config: TrainConfig | ChatTrainConfig,
    asked: TrainConfig | ChatTrainConfig,
    run: Run,
    names: OutputNames,
    save_lora: SaveLora,
    sampler: Sampler | None,
    held_out: HeldOut | None,
    upload: HubUpload | None,
    console: Console,
    begun: float,
    facts: Mapping[str, str] | None = None,
) -> RunEvents:
    """Train a prepared run from its start or a state to the last step, with what happens before, between and after.

    Args:
        config, asked: the settings, and as they were before a state and a rehearsal were looked at, to be kept.
        run, names, save_lora, sampler, held_out, upload: what has been prepared.
        console, begun: to speak to, and when training began, seconds since 1970.
        facts: for the summary.

    Raises:
        UserError: see ``Run.resume``, ``Trainer.run`` and :func:`finish`.
    """
    accelerator, training = run.accelerator, config.training
    position = run.resume(training.resume, asked.training.resume == AUTO) if training.resume else Position()
    write_config(names.folder, asked, accelerator)
    metrics = MetricsStream(names.folder / "metrics.jsonl", accelerator, config.logging, position.step)
    faults = FaultPolicy(training.on_nan, training.on_nan_limit, advice(config))
    with TrainingProgress(console, run.total_steps, position.step) as progress:
        events = RunEvents(
            run=run,
            names=names,
            saving=config.saving,
            sampling=config.sampling,
            save_lora=save_lora,
            metrics=metrics,
            progress=progress,
            sampler=sampler,
            held_out=held_out,
            upload=upload,
            begun=begun,
            save_states_to_hub=config.hub.save_state_to_huggingface,
        )
        with events.requests.listening():
            events.at_start(position)
            Trainer(run, position, config.logging.log_every_n_steps, metrics, progress, events, faults).run()
            events.at_end(position)
    finish(events, position, console, begun, facts)
    return events


def finish(
    events: RunEvents, position: Position, console: Console, begun: float, facts: Mapping[str, str] | None = None
) -> None:
    """Show what the run did, and ``facts`` about it; hold the saved LoRA to it, and let go of what it held.

    Raises:
        UserError: the LoRA on disk is not what was trained, or lies elsewhere.
    """
    accelerator, main, wrong, checked = events.run.accelerator, events.run.accelerator.is_main_process, None, None
    with events.run.whole(with_state=False):
        if main and events.stop_request.stop is None and not events.writer.rescued:
            save_format = events.saving.save_format if events.names.suffix else "peft"
            try:
                checked = checked_export(events.run, events.names.lora(events.names.stem()), save_format)
            except UserError as error:
                wrong = error
    if main:
        rows = [*run_summary(events, position, time.time() - begun), *(facts or {}).items()]
        rows += [("LoRA file checked", checked)] if checked is not None else []
        print_summary(console, rows)
        if events.stop_request.stop is not None:
            state = events.names.state(events.names.stem(step=position.step))
            console.print(resume_hint(events.stop_request, position.step, state), soft_wrap=True)
    accelerator.wait_for_everyone()  # a process that leaves early takes the process group from under the others
    events.metrics.close()
    events.writer.report()
    if wrong is not None:
        raise wrong


if __name__ == "__main__":
    main()
