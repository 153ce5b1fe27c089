"""What a run of a configuration takes on a card, counted by walking it: the process that ``plan`` starts.

    python -m library.training.memory.walk REQUEST ANSWER

From the configuration to the end of the second step, by the functions that a run calls: the VAE encodes an image of the
largest bucket, the text encoders the longest caption, the transformer is loaded and the LoRA put in, two steps are
taken, and where the run samples, a prompt is sampled. Only that the batch is made of noise is other than in a run.
Validation takes no more than a step.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401  # before the device is one: they look for it as they are imported
import diffusers  # noqa: F401
import peft  # noqa: F401
import torch
import transformers
from torch import Tensor

from library.config.schema import TrainConfig
from library.console import Console
from library.errors import UserError
from library.training.memory.block_swap import swappable
from library.training.memory.dry_run import MemoryProbe, take_steps
from library.training.memory.fake_cuda import Walk, pretend, walking
from library.training.memory.stand_in import with_stand_ins
from library.training.sampling.conditions import PromptImageRules
from library.training.sampling.images import Sampler
from library.training.tasks.image_lora import ImageLora


def walk_run(config: TrainConfig, walk: Walk, folder: Path) -> tuple[int, int]:
    """Go through a run of ``config``, whose files are there; ``walk`` notes what it takes, by phase.

    Returns:
        How many blocks may be swapped, and the bytes of one.
    """
    task = _opened(config, folder)
    probe = MemoryProbe(task)
    width, height = probe.bucket[0].fit.bucket
    with _Phase(walk, "encoding images", "encoders"):
        task.image_encoder.encode(torch.zeros(task.config.dataset.vae_batch_size, 3, height, width))
        task.image_encoder.release()
    with _Phase(walk, "encoding captions", "encoders"):
        text = probe.text
        task.text_encoder.release()
    with _Phase(walk, "loading", "weights"):
        task.load_networks()
        task.wrap_networks()
        walk.relabel(task.parameters(), "LoRA")
    for parameter in task.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: walk.relabel([p.grad], "gradients"))
    with _Phase(walk, "first step"):
        take_steps(task, probe.batch(), steps=1)
        walk.relabel(_state(task), "optimizer")
    with _Phase(walk, "step"):
        take_steps(task, probe.batch(), steps=1)
    if task.prompts:
        prompt = max(task.prompts, key=lambda prompt: prompt.width * prompt.height)
        texts = {prompt.text_key(one): text for one in prompt.texts()}
        rules, own = PromptImageRules.of(task.data), [replace(prompt, steps=2)]
        with _Phase(walk, "sampling"):
            Sampler(task.family, own, task.image_encoder, texts, folder, rules=rules, writes=False).sample(
                task.transformer, 0
            )
    return swappable(task.family.blocks(task.transformer))


def _opened(config: TrainConfig, folder: Path) -> ImageLora:
    """Return the run's task with its data read, that writes nothing but into ``folder``."""
    silent = {"overwrite": True, "output_dir": str(folder / "run"), "save_state": False}
    changes = {
        "saving": config.saving.model_copy(update=silent),
        "training": config.training.model_copy(update={"resume": None, "memory_dry_run": False}),
        "logging": config.logging.model_copy(update={"log_with": None}),
    }
    task = ImageLora(config.model_copy(update=changes))
    task.console = Console(quiet=True)
    task.open()
    task.read()
    return task


def estimated(config: TrainConfig, folder: Path) -> tuple[list[tuple[str, dict[str, int]]], tuple[int, int]]:
    """Return what the estimate says of a step's peak, and of blocks as `walk_run`.

    Raises:
        UserError: it does not know what is trained.
    """
    probe = MemoryProbe(_opened(config, folder))
    found = probe.estimate()
    if found is None:
        raise UserError("without a compiler only LoRAs of plain settings can be estimated; install g++")
    lasting = {part: getattr(found, part.lower()) for part in ("weights", "LoRA", "gradients", "optimizer")}
    return [("step", lasting | {"activations": found.activations})], probe.swappable()


def _state(task: ImageLora) -> Iterable[Tensor]:
    states: Any = task.optimizer.state.values()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


class _Phase:
    """Names what is done, and what is allocated meanwhile."""

    def __init__(self, walk: Walk, name: str, part: str = "activations") -> None:
        self.walk, self.name, self.part = walk, name, part

    def __enter__(self) -> None:
        self.walk.phase, self.walk.part = self.name, self.part

    def __exit__(self, *_: object) -> None:
        self.walk.phase, self.walk.part = "", "activations"


def main() -> None:
    """Answer one request: a configuration, and the memory and compute capability of the card."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    answer: dict[str, Any]
    transformers.logging.set_verbosity_error()
    os.environ["HF_HUB_OFFLINE"] = "1"
    walk, source = Walk(request["traces"]), request["source"]
    try:
        with tempfile.TemporaryDirectory() as scratch:
            config, notes = with_stand_ins(TrainConfig.model_validate(request["config"]), Path(scratch))
            if source == "formulas":
                walk.history, blocks = estimated(config, Path(scratch))
            else:
                pretend(walk, request["memory"], tuple(request["capability"]), runtime=source != "card")
                with walking(walk):
                    blocks = walk_run(config, walk, Path(scratch))
        answer = {"history": walk.history, "notes": notes, "at_peak": _largest(walk), "swappable": blocks}
    except UserError as error:
        answer = {"error": list(map(str, error.args))}
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")


def _largest(walk: Walk) -> list[tuple[int, int, str]]:
    """Return bytes, number and origin of what lived at the peak, the largest first."""
    total, number = Counter[str](), Counter[str]()
    for each in walk.at_peak:
        origin = f"{each.part}: {each.operation.split('.')[1]} {list(each.shape)} {each.where}"
        total[origin] += each.bytes
        number[origin] += 1
    return [(size, number[origin], origin) for origin, size in total.most_common(30)]


if __name__ == "__main__":
    main()
