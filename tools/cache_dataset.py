"""Cache a dataset ahead of training: latents, conditions and text embeddings, the sample prompts' too.

    python tools/cache_dataset.py --config_file configs/flux_lora.toml --dataset_config my_dataset.toml
    torchrun --nproc-per-node 2 tools/cache_dataset.py --config_file ...

Does what train_lora.py does before it loads the transformer; nothing is written but caches. Training with the
same settings then finds everything there and loads no encoder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from library.config import TrainConfig, load_config
from library.config.kohya.translate import Note, summary
from library.console import Console
from library.errors import exit_on_user_error
from tools.command import training_tool_parser

if TYPE_CHECKING:
    from library.data.dataset import TrainingData


def cache_dataset(config: TrainConfig) -> TrainingData:
    """Encode whatever training as ``config`` says needs and is not cached yet."""
    from library.accelerator import build_accelerator
    from library.models.family import model_family
    from library.training.sampling.conditions import read_run_prompts
    from library.training.tasks.image_lora import cache_data, read_data
    from library.training.tasks.lora import base_dtype
    from library.training.tasks.lora_plan import text_encoder_recipe

    accelerator = build_accelerator(config.accelerate, config.training, config.saving, config.logging)
    console = Console(quiet=not accelerator.is_main_process, markup=False)
    family = model_family(config.model)
    dtype = base_dtype(config.model, config.training)
    image_encoder = family.load_image_encoder(dtype, accelerator.device)
    text_encoder = family.load_text_encoder(dtype, accelerator.device, recipe=text_encoder_recipe(config.precision))
    multiple, seed = image_encoder.pixel_multiple, config.training.seed
    prompts = read_run_prompts(config.sampling.sample_prompts, seed, family, multiple, console.print)
    data = read_data(
        config.dataset, config.training, config.flow, image_encoder, accelerator, console, family.conditioning,
        family.most_references,
    )  # fmt: skip
    cache_data(data, config.dataset, image_encoder, text_encoder, accelerator, prompts, console)
    return data


@exit_on_user_error
def main() -> None:
    """Cache one dataset from the command line."""
    notes: list[Note] = []
    _, flags = training_tool_parser(__doc__).parse_known_args()
    config = load_config(flags, notes)
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(summary(notes)), end="\n" if notes else "")
    from library.training.guard.signals import interruptible

    with interruptible("what is cached is kept, and the same command goes on from it"):
        cache_dataset(config)


if __name__ == "__main__":
    main()
