"""What a LoRA file says about its training, in the keys of kohya's sd-scripts.

The keys and their meaning are those of ``train_network.py`` and ``flux_train_network.py`` (48d368f), here without
their ``ss_``. What sd-scripts can do and Tandem cannot is said to be off, as sd-scripts itself says it.
``docs/lora_formats.md`` lists all of them, and the two that are left out.
"""

from __future__ import annotations

import json
import math
from pathlib import PureWindowsPath
from typing import TYPE_CHECKING

from library.accelerator import data_share
from library.config.optimizer_conflicts import effective_learning_rate
from library.randomness import derive_seed
from library.training.checkpoint import Position
from library.training.dataset_facts import dataset_facts
from library.training.file_hashes import model_file_facts
from library.training.optimizers import describe_optimizer

if TYPE_CHECKING:
    from library.config.schema import TrainConfig
    from library.data.dataset import TrainingData
    from library.training.run import Run

_OFF: dict[str, object] = {  # sd-scripts' own values for what is not used
    "v2": False,
    "clip_skip": None,
    "max_token_length": None,
    "full_fp16": False,
    "lowram": False,
    "face_crop_aug_range": None,
    "noise_offset": None,
    "noise_offset_random_strength": False,
    "multires_noise_iterations": None,
    "adaptive_noise_scale": None,
    "zero_terminal_snr": False,
    "min_snr_gamma": None,
    "debiased_estimation": False,
    "ip_noise_gamma": None,
    "ip_noise_gamma_random_strength": False,
    "scale_weight_norms": None,
    "fp8_base_unet": False,
    "max_validation_steps": None,
}
_FLUX: dict[str, object] = {"model_type": "flux", "model_prediction_type": "raw", "apply_t5_attn_mask": False}


def training_facts(config: TrainConfig, run: Run, data: TrainingData, begun: float) -> dict[str, object]:
    """Return the facts that hold for every file of a run.

    Args:
        config: the whole configuration.
        run: its length and processes.
        data: the images.
        begun: when training began, seconds since 1970; names the session too.
    """
    (_, processes), accumulated = data_share(run.accelerator), config.training.gradient_accumulation_steps
    batches = run.batches.batches_per_epoch() // processes
    memory = data.text_folder / "file_hashes.json"
    return {
        **_OFF,
        **(_FLUX if config.model.model_type.startswith("flux") else {}),
        **_settings(config),
        **dataset_facts(data, processes * accumulated),
        **model_file_facts("sd_model", config.model.pretrained_model_name_or_path, memory),
        **model_file_facts("vae", config.model.ae or config.model.vae, memory),
        "session_id": derive_seed("session", config.training.seed, str(begun)) % 2**32,
        "training_started_at": begun,
        "max_train_steps": run.total_steps,
        "num_batches_per_epoch": batches,
        "num_epochs": math.ceil(run.total_steps * accumulated / batches),
    }


def save_facts(position: Position, total_steps: int, now: float) -> dict[str, object]:
    """Return the facts of one file. Epochs are counted from 1: those done, and at the end of training those begun."""
    at_end = position.step >= total_steps and position.batches > 0
    return {"steps": position.step, "epoch": position.epoch + at_end, "training_finished_at": now}


def _settings(config: TrainConfig) -> dict[str, object]:
    network, optimizer, training, flow = config.network, config.optimizer, config.training, config.flow
    pairs = (pair.partition("=") for pair in network.network_args)
    rate = effective_learning_rate(optimizer)
    facts: dict[str, object] = {
        "network_dim": "Dynamic" if network.dim_from_weights else network.network_dim,
        "network_alpha": "Dynamic" if network.dim_from_weights else network.network_alpha,
        "network_dropout": network.network_dropout or None,
        "learning_rate": rate,
        "unet_lr": None if network.network_train_text_encoder_only else rate,
        "text_encoder_lr": optimizer.text_encoder_lr or None,
        "optimizer": describe_optimizer(optimizer),
        "lr_scheduler": optimizer.lr_scheduler,
        "lr_warmup_steps": optimizer.lr_warmup_steps,
        "max_grad_norm": optimizer.max_grad_norm,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "gradient_checkpointing": training.gradient_checkpointing,
        "mixed_precision": training.mixed_precision,
        "full_bf16": training.full_bf16,
        "fp8_base": config.precision.fp8_base,
        "cache_latents": True,
        "seed": training.seed,
        "prior_loss_weight": training.prior_loss_weight,
        "timestep_sampling": flow.timestep_sampling,
        "sigmoid_scale": flow.sigmoid_scale,
        "discrete_flow_shift": flow.discrete_flow_shift,
        "weighting_scheme": flow.weighting_scheme,
        "logit_mean": flow.logit_mean,
        "logit_std": flow.logit_std,
        "mode_scale": flow.mode_scale,
        "guidance_scale": flow.guidance_scale,
        "loss_type": flow.loss_type,
        "huber_c": flow.huber_c,
        "huber_scale": 1.0,
        "huber_schedule": "constant",
        "masked_loss": flow.masked_loss,
        "validate_every_n_steps": config.validation.validate_every_n_steps,
        "validate_every_n_epochs": config.validation.validate_every_n_epochs,
        "training_comment": config.saving.training_comment,
    }
    if network.network_args:
        facts["network_args"] = json.dumps({key.strip(): value.strip() for key, _, value in pairs})
    return facts


def without_folders(sections: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    """Return the configuration with paths cut to their last part: a published LoRA shows nobody's home folder."""
    return {name: {key: _cut(key, value) for key, value in keys.items()} for name, keys in sections.items()}


_PATHS = {  # may be relative; what is absolute is known by itself
    "pretrained_model_name_or_path",
    "ae",
    "vae",
    "text_encoder",
    "qwen_tokenizer",
    "clip_l",
    "t5xxl",
    "clip_l_tokenizer",
    "t5xxl_tokenizer",
    "dataset_config",
    "cache_directory",
    "network_weights",
    "resume",
    "output_dir",
    "sample_prompts",
    "logging_dir",
    "tokenizer",
    "train_data",
    "validation_data",
}


def _cut(key: str, value: object) -> object:
    if isinstance(value, list):
        return [_cut(key, item) for item in value]
    if not isinstance(value, str):
        return value
    windows = PureWindowsPath(value)  # takes both kinds of slash
    if key in _PATHS or value.startswith(("/", "~")) or windows.is_absolute():
        return windows.name
    return value
