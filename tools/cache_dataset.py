"""Cache a dataset ahead of training: latents, conditions and text embeddings, the sample prompts' too.

    python tools/cache_dataset.py --config_file configs/flux_lora.toml --dataset_config my_dataset.toml
    torchrun --nproc-per-node 2 tools/cache_dataset.py --config_file ...

Does what train_lora.py does before it loads the transformer to train it; nothing is written but caches, and images
that the base generates ([preservation]). Training with the same settings then finds everything there and loads no
encoder. Run it in one process before a training on several GPUs that split the model: none of those can generate.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from library.config import TrainConfig
from library.config.load import load_and_tell
from library.config.scripts import LORA
from library.errors import exit_on_user_error
from library.models.hub import index_on_hub
from library.processes import one_of_several, watched
from tools.command import training_tool_parser

if TYPE_CHECKING:
    from library.data.dataset import TrainingData


def cache_dataset(config: TrainConfig) -> TrainingData:
    """Encode whatever training as ``config`` says needs and is not cached yet."""
    from library.training.tasks.image_lora import ImageLora

    task = ImageLora(config)
    with watched():
        task.open()
        painted = task.paint()
        task.read(painted)
        task.cache()
    if painted.regularisation and task.accelerator.is_main_process:
        folder = painted.regularisation[0].parent
        task.console.print(f"regularisation images and their captions: {folder}", soft_wrap=True)
    return task.data


@exit_on_user_error
@one_of_several
def main() -> None:
    """Cache one dataset from the command line."""
    _, flags = training_tool_parser(__doc__).parse_known_args()
    config = load_and_tell(LORA, flags, index_on_hub)
    from library.training.signals import interruptible

    with interruptible("what is cached is kept, and the same command goes on from it"):
        cache_dataset(config)


if __name__ == "__main__":
    main()
