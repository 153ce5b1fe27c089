"""Train all weights of a language model, on texts that tools/prepare_text.py prepared or on conversations.

    python train_llm.py --config_file configs/llm/llama_tiny.toml
    python train_llm.py --config_file configs/llm/llama_chat.toml --train_data my_chats.jsonl
    torchrun --nproc-per-node 2 train_llm.py --config_file ...

The configuration is complete and checked before anything heavy is imported: a wrong key answers at once.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from library.config.load import load_and_tell
from library.config.pretrain_schema import PretrainConfig
from library.config.scripts import LLM
from library.errors import exit_on_user_error
from library.processes import one_of_several

if TYPE_CHECKING:
    from library.training.run import Run


@exit_on_user_error
@one_of_several
def main() -> None:
    """Run one training from the command line; a run that was stopped from outside leaves with an exit code."""
    if exit_code := train(load_and_tell(LLM, sys.argv[1:])).stop_request.exit_code:
        raise SystemExit(exit_code)


def train(config: PretrainConfig) -> Run:
    """Train as ``config`` says; leave the model, metrics and samples in ``output_dir``.

    Raises:
        UserError: anything in the configuration, the data or the model files that a user can fix.
    """
    from library.training.tasks.chat_tuning import ChatTuning
    from library.training.tasks.pretraining import Pretraining
    from library.training.trainer import train as train_task

    return train_task(ChatTuning(config) if config.chat.train_data else Pretraining(config))


if __name__ == "__main__":
    main()
