"""Train a LoRA for a diffusion transformer.

    python train_lora.py --config_file configs/flux_lora.toml --dataset_config my_dataset.toml
    torchrun --nproc-per-node 2 train_lora.py --config_file ...

``train`` reads from top to bottom: data and its caches, the run (network, optimizer, schedule), what happens between
steps, the loop, the summary. This is the one place that sees the whole configuration; everything called from here
takes its own section.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from accelerate import Accelerator
from rich.console import Console

from library.accelerator import build_accelerator
from library.config import TrainConfig, load_config
from library.config.kohya import Note, summary
from library.data.dataset import TrainingData
from library.errors import exit_on_user_error
from library.models.protocol import Family
from library.models.registry import model_family
from library.training.base_precision import plan_fp8, text_encoder_recipe
from library.training.checkpoint import OutputNames, Position, lasting_settings
from library.training.events import RunEvents
from library.training.export import lora_writer, write_config
from library.training.hub import build_upload
from library.training.loop import Trainer
from library.training.metrics import MetricsStream
from library.training.network_plan import NetworkPlan, plan_network
from library.training.optimizers import build_optimizer
from library.training.preflight import check_before_loading
from library.training.prepare import Networks, base_dtype, prepare_data, prepare_networks, total_steps, training_loader
from library.training.progress import TrainingProgress, print_summary, run_summary
from library.training.prompts import prompt_texts, read_prompts
from library.training.run import Run
from library.training.sampling import build_sampler
from library.training.schedules import build_schedule
from library.training.step import FlowStep
from library.training.validation import hold_out
from library.training.weight_average import WeightAverage
from networks.targets import TARGETS


@exit_on_user_error
def main() -> None:
    """Run one training from the command line."""
    notes: list[Note] = []
    config = load_config(sys.argv[1:], notes)
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(summary(notes)), end="\n" if notes else "")
    train(config)


def train(config: TrainConfig) -> RunEvents:
    """Train a LoRA as ``config`` says; leave LoRA, metrics, samples and plots in ``output_dir``.

    Raises:
        UserError: anything in the configuration, the data or the model files that a user can put right.
    """
    begun = time.time()
    check_before_loading(config)
    accelerator = build_accelerator(config.accelerate, config.training, config.saving, config.logging)
    console = Console(quiet=not accelerator.is_main_process, markup=False)  # paths may hold [brackets]
    family = model_family(config.model)
    plan = plan_network(config.network, config.optimizer, config.training, TARGETS[family.name])
    dtype = base_dtype(config.model, config.training)
    image_encoder = family.load_image_encoder(dtype, accelerator.device)
    fp8 = plan_fp8(config.precision, family.fp8_layout(), config.training.seed, accelerator.device)
    text_encoder = family.load_text_encoder(dtype, accelerator.device, recipe=text_encoder_recipe(config.precision))
    prompts = read_prompts(config.sampling.sample_prompts, config.training.seed, image_encoder.pixel_multiple)
    texts = prompt_texts(prompts)
    upload = build_upload(config.hub, accelerator, console)

    # The encoders' weights are read only for what is not cached yet, and leave before the transformer comes.
    data = prepare_data(
        config.dataset, config.training, config.flow, image_encoder, text_encoder, accelerator, texts, console
    )
    device, weights = accelerator.device, config.network.network_weights
    networks = prepare_networks(family, text_encoder, plan, weights, config.training, dtype, device, console, fp8)
    run = _prepare_run(config, family, plan, networks, data, accelerator)
    held_out = hold_out(data, run.step, config.validation)
    names = OutputNames(Path(config.saving.output_dir), config.saving.output_name)
    sampler = build_sampler(family, prompts, image_encoder, data, names.folder / "samples", networks.text_encoders)
    position = run.resume(config.training.resume) if config.training.resume else Position()
    write_config(names.folder, config, accelerator)
    metrics = MetricsStream(names.folder / "metrics.jsonl", accelerator, config.logging, position.step)
    base = (run.base_fingerprint, networks.base_precision, family.modelspec_architecture)
    save_lora = lora_writer(config, run.network, data, *base, begun)

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
            save_states_to_hub=config.hub.save_state_to_huggingface,
        )
        events.at_start(position)
        Trainer(run, position, config.logging.log_every_n_steps, metrics, progress, events).run()
        events.at_end(position)
    if accelerator.is_main_process:
        print_summary(console, run_summary(events, position, time.time() - begun))
    accelerator.wait_for_everyone()  # a process that leaves early takes the process group from under the others
    metrics.close()
    return events


def _prepare_run(
    config: TrainConfig,
    family: Family,
    plan: NetworkPlan,
    networks: Networks,
    data: TrainingData,
    accelerator: Accelerator,
) -> Run:
    """Build optimizer and schedule, and let accelerate wrap and compile the networks."""
    training, lora = config.training, networks.lora
    optimizer = build_optimizer(config.optimizer, plan.parameter_groups(lora), training.full_bf16, training.seed)
    batches, loader = training_loader(data, config.dataset, accelerator)
    steps = total_steps(training, batches.batches_per_epoch() // accelerator.num_processes)
    lr_schedule = build_schedule(config.optimizer, optimizer, steps)
    trained = networks.transformer if plan.trains_transformer else None
    parts = (trained, networks.text_encoders, optimizer, loader)
    # The transformer lies where prepare_networks put it; with blocks_to_swap that is not the device alone.
    model, text_encoders, optimizer, loader = accelerator.prepare(*parts, device_placement=[False, True, True, True])
    if model is None:  # DDP refuses a network with nothing to train
        model = accelerator.prepare_model(networks.transformer, device_placement=False, evaluation_mode=True)
    return Run(
        accelerator=accelerator,
        step=FlowStep(family, config.flow, training.seed, text_encoders),
        transformer=networks.transformer,
        model=model,
        network=lora,
        optimizer=optimizer,
        lr_schedule=lr_schedule,
        loader=loader,
        batches=batches,
        total_steps=steps,
        max_grad_norm=config.optimizer.max_grad_norm,
        base_fingerprint=family.fingerprint(),
        average=WeightAverage(lora.parameters(), decay) if (decay := config.saving.ema_decay) else None,
        settings=lasting_settings(config),
    )


if __name__ == "__main__":
    main()
