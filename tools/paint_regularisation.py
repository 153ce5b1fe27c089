"""Let the base paint the images that a run is going to keep to: regularisation images of general prompts.

    python tools/paint_regularisation.py --config_file configs/flux_lora.toml --preserve prior
    python tools/paint_regularisation.py --config_file configs/flux_lora.toml --preserve prior \\
        --preserve_prompts my_prompts.txt --save_to regularisation

Training with the same settings does this itself at its start; ahead of it the images can be looked at, and be painted
on one GPU for a run on several that split the model. They are made with the guidance and steps of the first sample
prompt, and cached beside the dataset (cache_directory). With --save_to they are copied into a folder too, each with its
prompt as caption: look them through, delete what is not worth keeping, and name the folder in the dataset TOML as a
subset with is_reg = true in place of preserve_prompts.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.config import TrainConfig, load_config
from library.errors import UserError, counted, exit_on_user_error
from library.files import atomic_path
from tools.command import training_tool_parser


def paint_regularisation(config: TrainConfig, save_to: Path | None = None) -> list[Path]:
    """Paint what training as ``config`` says needs and is not there yet; return all images to train on.

    Raises:
        UserError: the configuration names no prompts to paint.
    """
    from library.training.tasks.image_lora import ImageLora

    task = ImageLora(config)
    task.open()
    folder = task.paint().regularisation
    if folder is None:
        raise UserError(
            'preserve_prompts: nothing is to be painted to train on; set preserve = "prior" with preserve_prompts = '
            '"general" or a file of prompts'
        )
    images = sorted(folder.glob("*.png"))
    if task.accelerator.is_main_process:
        for file in [*(image.with_suffix(".txt") for image in images), *images] if save_to else ():
            with atomic_path(save_to / file.name) as temporary:  # type: ignore[operator]
                shutil.copyfile(file, temporary)
        task.console.print(f"{counted(len(images), 'image')} in {save_to or folder}", soft_wrap=True)
    return images


@exit_on_user_error
def main() -> None:
    """Paint for one configuration from the command line."""
    parser = training_tool_parser(__doc__)
    parser.add_argument("--save_to", type=Path, metavar="FOLDER", help="copy the images there, with their captions")
    options, flags = parser.parse_known_args()
    config = load_config(flags)
    from library.training.signals import interruptible

    with interruptible("what is painted is kept, and the same command goes on from it"):
        paint_regularisation(config, options.save_to)


if __name__ == "__main__":
    main()
