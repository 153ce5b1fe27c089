"""Make a training adapter: a LoRA with which a distilled model (turbo, klein, schnell) can be trained like a base.

    python tools/make_training_adapter.py --pretrained_model_name_or_path Z-Image-Turbo --output_dir output/adapter
    python train_lora.py --pretrained_model_name_or_path Z-Image-Turbo \\
        --base_weights output/adapter/training_adapter.safetensors --dataset_config my_dataset.toml

Training a LoRA on a distilled model undoes the distillation, and images of few steps become blurred. The adapter undoes
it first, so that the LoRA has only the subject to learn; it is merged into the model while a LoRA is trained
(base_weights), and left out where that LoRA is used. No base and no images of yours are needed: the distilled model
generates images of general prompts in its own few steps, and the adapter is trained on them with the ordinary loss at a
low rate, as ostris' zimage_turbo_training_adapter was (thousands of images, rate 1e-5).

Every option of train_lora.py is taken, too. The same command goes on where it was interrupted; with more --images or
other --prompts it generates only those that are not there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.config import TrainConfig
from library.config.kohya.translate import summary
from library.config.kohya.translation import Note
from library.config.load import checked, read_arguments
from library.config.markers import MOST_STEPS
from library.config.published_models import MODEL, find_published
from library.config.scripts import LORA
from library.errors import UserError, exit_on_user_error
from library.files import read_toml, toml_text, write_text
from library.models.hub import index_on_hub
from library.processes import one_of_several, watched
from tools.command import answer_early, count, training_tool_parser, whole

DEFAULTS = {
    "output_dir": "output/training_adapter",
    "output_name": "training_adapter",
    "learning_rate": 1e-5,  # ostris/zimage_turbo_training_adapter
    "max_train_steps": 4000,
    "save_every_n_steps": 500,
    "save_state": True,
    "resume": "auto",
}
SHAPES = ((1.0, 1.0), (1.25, 0.75), (0.75, 1.25))  # width and height, in sides of the family's usual square


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags that train_lora.py has not."""
    top = training_tool_parser(__doc__)
    top.add_argument("--prompts", metavar="FILE", help="a prompt a line (default: 24 general ones of Tandem's)")
    top.add_argument("--images", type=count, default=480, metavar="N", help="to generate (default: %(default)s)")
    steps = "steps of each image (default: the family's; needed where nothing says that the model is distilled)"
    top.add_argument("--distilled_steps", type=whole(least=1, most=MOST_STEPS), metavar="N", help=steps)
    return top


def read_config(flags: Sequence[str], quiet: bool = False) -> TrainConfig:
    """Return the configuration of the adapter's training; its dataset TOML is in output_dir, written later."""
    given, notes = read_arguments(flags, LORA), list[Note]()
    if "dataset_config" in given.values:
        raise UserError("dataset_config: the model generates the images that its adapter is trained on; remove it")
    if "resolution" in given.values:
        raise UserError("resolution: images have the model's own sizes, or a prompt's --w and --h; remove it")
    given.values = DEFAULTS | given.values
    given.values["dataset_config"] = str(Path(given.values["output_dir"]) / "images" / "dataset.toml")
    config = checked(given, LORA, notes, index_on_hub)
    for line in (
        () if quiet else summary([note for note in notes if note.key != MODEL])
    ):  # of the model: how to do without an adapter
        print(line)
    return config


answer_early(__name__, lambda: read_config(parser().parse_known_args()[1], quiet=True))

from library.models.family_by_name import model_family
from library.training.sampling import painting
from library.training.sampling.prompts import SamplePrompt, read_prompts, usual_prompt
from library.training.signals import interruptible
from library.training.tasks.image_lora import ImageLora
from library.training.trainer import train


def check_distilled(config: TrainConfig, steps: int | None) -> None:
    """Raise a UserError if neither the model nor --distilled_steps says that it is distilled."""
    model = config.model.pretrained_model_name_or_path
    if not (steps or model_family(config.model).distilled or getattr(find_published(model), "train_on", "")):
        raise UserError(
            f"{model}: neither its name nor its files say that it is distilled, and a base is trained without an "
            "adapter; give the distilled model, or --distilled_steps N if this is one"
        )


def prompts_of(source: str | None, images: int, seed: int, task: ImageLora, steps: int | None) -> list[SamplePrompt]:
    """Return ``images`` prompts: those of ``source`` again and again, each time of other seeds and another shape."""
    texts = source or [text for listed in read_toml(painting.GENERAL)[0].values() for text in listed]
    usual, multiple = usual_prompt(task.family), task.image_encoder.pixel_multiple
    found: list[SamplePrompt] = []
    for shape in itertools.cycle(SHAPES):
        width, height = (int(usual.width * side) // multiple * multiple for side in shape)
        default = replace(usual, width=width, height=height, steps=steps or usual.steps)
        read = read_prompts(texts, seed, multiple, default, "prompts")
        if steps and (other := next((prompt for prompt in read if prompt.steps != steps), None)):
            raise UserError(f"--distilled_steps {steps}: {other.prompt!r} has --s {other.steps}; remove one of the two")
        found += [replace(prompt, seed=prompt.seed + len(found)) for prompt in read]
        if len(found) >= images:
            break
    return found[:images]


def generate(config: TrainConfig, options: argparse.Namespace) -> None:
    """Generate the images that are not there yet, and write the dataset's TOML beside their folder."""
    dataset = Path(config.dataset.dataset_config)
    dataset.parent.mkdir(parents=True, exist_ok=True)
    write_dataset(dataset, [], 64)  # until it is known what is generated
    task = ImageLora(config)
    with watched():
        task.open()
        task.family.distilled = True
        prompts = prompts_of(options.prompts, options.images, config.training.seed, task, options.distilled_steps)
        made_with = task.plan.config, task.family, task.base_weights, (task.image_encoder, task.text_encoder)
        images = painting.painted_set(*made_with, dataset.parent, prompts)
        if task.accelerator.is_main_process:
            painting.restore_captions({"prompts": images}, task.console)
            task.console.print(f"training adapter: {painting.describe(prompts)}", soft_wrap=True)
        painting.paint({"prompts": images}, *made_with, task.accelerator, task.console)
    write_dataset(dataset, images.pictures, max(math.isqrt(prompt.width * prompt.height) for prompt in prompts))


def write_dataset(path: Path, pictures: Sequence[tuple[Path, SamplePrompt]], resolution: int) -> None:
    """Write the TOML of a dataset of ``pictures`` with their prompts, and the list of them beside it."""
    listed = path.with_name("images.jsonl")
    lines = [{"image_path": str(file.relative_to(path.parent)), "caption": one.prompt} for file, one in pictures]
    write_text(listed, "".join(json.dumps(line) + "\n" for line in lines))
    general, subset = {"enable_bucket": True, "bucket_no_upscale": True}, {"metadata_file": listed.name}
    write_text(path, toml_text({"general": general, "datasets": [{"resolution": resolution, "subsets": [subset]}]}))


@exit_on_user_error
@one_of_several
def main() -> None:
    """Generate the images, train the adapter, say how it is used."""
    options, flags = parser().parse_known_args()
    config = read_config(flags)
    check_distilled(config, options.distilled_steps)
    with interruptible("what is generated is kept, and the same command goes on from it"):
        generate(config, options)
    if exit_code := train(ImageLora(config)).stop_request.exit_code:
        raise SystemExit(exit_code)
    adapter = Path(config.saving.output_dir) / f"{config.saving.output_name}.safetensors"
    print(f'{adapter}: train LoRAs of this model with base_weights = ["{adapter}"], and use them without it')


if __name__ == "__main__":
    main()
