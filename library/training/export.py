"""The LoRA file as it leaves a run: weights, precision, and metadata that says how it was made."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import toml

from library import __version__
from library.files import write_text
from library.training.checkpoint import Position
from networks.formats import save_lora
from networks.metadata import build_metadata

if TYPE_CHECKING:
    from accelerate import Accelerator

    from library.config.schema import TrainConfig
    from library.data.dataset import TrainingData
    from networks.injection import LoraNetwork


def write_config(folder: Path, config: TrainConfig, accelerator: Accelerator) -> None:
    """Keep the resolved configuration beside what it makes, as TOML that runs again (main process only)."""
    if accelerator.is_main_process:
        sections = config.model_dump(exclude_unset=True, exclude_none=True)
        text = toml.dumps({name: keys for name, keys in sections.items() if keys})
        write_text(folder / "config.toml", f"# Tandem {__version__}: the settings of this run\n\n{text}")


def lora_writer(
    config: TrainConfig,
    network: LoraNetwork,
    data: TrainingData,
    base_fingerprint: str,
    base_precision: str,
    architecture: str,
    begun: float,
) -> Callable[[Path, Position], None]:
    """Return a function that writes the network's present weights as a LoRA file.

    Args:
        config: goes into the metadata, whole and in kohya's ``ss_*`` keys.
        network: whose weights are written.
        data: counted for the metadata.
        base_fingerprint: of the base model, so that merge and report can tell a wrong base.
        base_precision: of its weights as trained on, in words.
        architecture: of the base model, in ModelSpec's words.
        begun: when training began, seconds since 1970.
    """
    saving = config.saving
    precision = saving.save_precision or ("bf16" if config.training.full_bf16 else "fp32")
    facts = _kohya_facts(config, data) | {"training_started_at": begun}
    config_json = json.dumps(_without_folders(config.model_dump(exclude_none=True)))

    def write(path: Path, position: Position) -> None:
        now = time.time()
        metadata = build_metadata(
            facts | {"steps": position.step, "epoch": position.epoch, "training_finished_at": now},
            title=saving.output_name,
            timestamp=now,
            architecture=architecture,
            resolution=data.config.datasets[0].resolution,
            description=saving.training_comment,
            base_fingerprint=base_fingerprint,
            base_precision=base_precision,
            config_json=config_json,
            version=__version__,
        )
        save_lora(path, network.weights(), network.targets, saving.save_format, precision, metadata)

    return write


_PATHS = {
    "pretrained_model_name_or_path",
    "ae",
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
}


def _without_folders(sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the configuration with paths cut to their last part: a published LoRA shows nobody's home folder."""
    return {
        name: {key: Path(value).name if key in _PATHS else value for key, value in keys.items()}
        for name, keys in sections.items()
    }


def _kohya_facts(config: TrainConfig, data: TrainingData) -> dict[str, object]:
    """Return the training facts under the names sd-scripts gives them, without its ``ss_``."""
    network, optimizer, training, flow = config.network, config.optimizer, config.training, config.flow
    return {
        "network_dim": network.network_dim,
        "network_alpha": network.network_alpha,
        "network_dropout": network.network_dropout,
        "network_args": json.dumps(dict(pair.split("=", 1) for pair in network.network_args)),
        "sd_model_name": Path(config.model.pretrained_model_name_or_path).name,
        "learning_rate": optimizer.learning_rate,
        "text_encoder_lr": optimizer.text_encoder_lr or None,
        "optimizer": optimizer.optimizer_type
        + (f"({','.join(optimizer.optimizer_args)})" if optimizer.optimizer_args else ""),
        "lr_scheduler": optimizer.lr_scheduler,
        "lr_warmup_steps": optimizer.lr_warmup_steps,
        "max_grad_norm": optimizer.max_grad_norm,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "gradient_checkpointing": training.gradient_checkpointing,
        "max_train_steps": training.max_train_steps,
        "mixed_precision": training.mixed_precision,
        "full_bf16": training.full_bf16,
        "seed": training.seed,
        "prior_loss_weight": training.prior_loss_weight,
        "timestep_sampling": flow.timestep_sampling,
        "weighting_scheme": flow.weighting_scheme,
        "sigmoid_scale": flow.sigmoid_scale,
        "discrete_flow_shift": flow.discrete_flow_shift,
        "guidance_scale": flow.guidance_scale,
        "loss_type": flow.loss_type,
        "masked_loss": flow.masked_loss,
        "num_train_images": len(data.train),
        "num_validation_images": len(data.validation or ()),
        "training_comment": config.saving.training_comment,
    }
