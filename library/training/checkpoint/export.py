"""The LoRA file as it leaves a run: weights, precision, and metadata that says how it was made."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import toml

from library import __version__
from library.files import write_text
from library.training.checkpoint.metadata import save_facts, training_facts, without_folders
from library.training.checkpoint.state import Position
from networks.files.metadata import build_metadata
from networks.files.verify import check_file

if TYPE_CHECKING:
    from accelerate import Accelerator

    from library.config.chat_schema import ChatTrainConfig
    from library.config.schema import TrainConfig
    from library.data.dataset import TrainingData
    from library.training.run import Run


def write_config(folder: Path, config: TrainConfig | ChatTrainConfig, accelerator: Accelerator) -> None:
    """Keep the resolved configuration beside what it makes, as TOML that runs again (main process only)."""
    if accelerator.is_main_process:
        sections = config.model_dump(exclude_unset=True, exclude_none=True)
        text = toml.dumps({name: keys for name, keys in sections.items() if keys})
        write_text(folder / "config.toml", f"# Tandem {__version__}: the settings of this run\n\n{text}")


def lora_writer(
    config: TrainConfig,
    run: Run,
    data: TrainingData,
    base_precision: str,
    architecture: str,
    begun: float,
    attention: str,
) -> Callable[[Path, Position], None]:
    """Return a function that writes the network's present weights as a LoRA file.

    Args:
        config: goes into the metadata, whole and in kohya's ``ss_*`` keys.
        run: whose network's weights are written; its fingerprints let merge and report tell a wrong base.
        data: described in the metadata.
        base_precision: of the base's weights as trained on, in words.
        architecture: of the base model, in ModelSpec's words.
        begun: when training began, seconds since 1970.
        attention: the kernel that it takes, in words.
    """
    saving = config.saving
    precision = saving.save_precision or ("bf16" if config.training.full_bf16 else "fp32")
    facts = training_facts(config, run, data, begun) if run.accelerator.is_main_process else {}  # it alone writes
    targets = run.network.targets
    in_lora_layout = config.network.network_type in ("lora", "dora")
    module = targets.kohya_module if in_lora_layout else "lycoris.kohya"
    facts |= {"network_module": module, "base_model_version": targets.kohya_base}
    config_json = json.dumps(without_folders(config.model_dump(exclude_none=True)))

    def write(path: Path, position: Position) -> None:
        now = time.time()
        metadata = build_metadata(
            facts | save_facts(position, run.total_steps, now),
            title=saving.output_name,
            timestamp=now,
            architecture=architecture,
            implementation=targets.implementation,
            resolution=data.config.datasets[0].resolution,
            description=saving.training_comment,
            base_fingerprint=run.base_fingerprint,
            text_encoder_fingerprint=run.settings.get("text_encoders"),
            base_precision=base_precision,
            attention=attention,
            config_json=config_json,
            version=__version__,
        )
        run.network.save(path, saving.save_format, precision, metadata)

    return write


def checked_export(run: Run, path: Path, save_format: str) -> str:
    """Read the LoRA that a run has saved back and hold it to the live weights; return what came of it in words.

    Args:
        run: its weights are those that were saved.
        path: the file, or the folder of PEFT's.
        save_format: the layout it was to have.

    Raises:
        UserError: the file is not what was trained, or would not be loaded.
    """
    with run.deployed_weights():
        return str(check_file(path, run.network, save_format))
