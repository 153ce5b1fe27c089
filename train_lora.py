"""Train a LoRA for a diffusion transformer or a language model.

    python train_lora.py --config_file configs/flux_lora.toml --dataset_config my_dataset.toml
    python train_lora.py --config_file configs/llm/llama_lora.toml --train_data my_chats.jsonl
    torchrun --nproc-per-node 2 train_lora.py --config_file ...

The configuration is complete and checked before anything heavy is imported: a wrong key answers at once.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from library.config import TrainConfig
from library.config.chat_schema import ChatTrainConfig
from library.config.load import load_and_tell, names_language_model
from library.config.scripts import LANGUAGE_LORA, LORA, Script
from library.errors import exit_on_user_error
from library.models.hub import index_on_hub
from library.processes import one_of_several

if TYPE_CHECKING:
    from library.training.run import Run


@exit_on_user_error
@one_of_several
def main() -> None:
    """Run one training from the command line; a run that was stopped from outside leaves with an exit code."""
    script: Script[Any] = LANGUAGE_LORA if names_language_model(sys.argv[1:]) else LORA
    if exit_code := train(load_and_tell(script, sys.argv[1:], index_on_hub)).stop_request.exit_code:
        raise SystemExit(exit_code)


def train(config: TrainConfig | ChatTrainConfig) -> Run:
    """Train a LoRA as ``config`` says; leave it with metrics, samples and plots in ``output_dir``.

    Raises:
        UserError: anything in the configuration, the data or the model files that a user can fix.
    """
    from library.training.trainer import train as train_task

    if not isinstance(config, ChatTrainConfig):
        from library.training.tasks.image_lora import ImageLora

        return train_task(ImageLora(config))
    from library.training.tasks.chat_lora import ChatLora, PreferenceLora

    return train_task(PreferenceLora(config) if config.chat.train_on == "preferences" else ChatLora(config))


if __name__ == "__main__":
    main()
