"""Short pretraining runs of a small model on sixteen words."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from pathlib import Path

from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor

from library.config.load import load_for
from library.config.scripts import LLM
from library.training.run import Run
from tests.curves import without_curves
from tests.forked import flags_of
from tools.prepare_text import parser, prepare
from train_llm import train

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "log", "and", "then", "it", "was", "sad", "so"]


def write_corpus(folder: Path) -> Path:
    """Write random sentences of sixteen words as a corpus; return its folder."""
    draw = random.Random(0)
    texts = [json.dumps({"text": " ".join(draw.choices(WORDS, k=40))}) for _ in range(120)]
    (folder / "texts.jsonl").write_text("\n".join(texts))
    words = ["--train_tokenizer", "300", "--validation_share", "0.1"]
    prepare(parser().parse_args([str(folder), *words, "--save_to", str(folder / "tokens")]))
    return folder / "tokens"


def flags(corpus: Path | None, output: Path, **settings: object) -> list[str]:
    """Return the command line of a short run of a small model; ``settings`` override."""
    defaults: dict[str, object] = {
        "preset": "llama-tiny",
        "width": 48,
        "layers": 2,
        "heads": 4,
        "context": 32,
        "data_dir": corpus,
        "train_batch_size": 4,
        "learning_rate": 3e-3,
        "max_train_steps": 6,
        "lr_warmup_steps": 2,
        "output_dir": output,
        "seed": 5,
        "overwrite": True,
    }
    return flags_of(defaults | settings)


def run(corpus: Path | None, output: Path, curves: bool = False, **settings: object) -> Run:
    """Train in this process; ``curves``: with lr.png, which takes longer than the training."""
    AcceleratorState._reset_state(reset_partial_state=True)  # it refuses a second run of other precision otherwise
    with nullcontext() if curves else without_curves():
        return train_flags(flags(corpus, output, **settings))


def train_flags(flags: list[str]) -> Run:
    """Train; as a job of a worker group, too."""
    return train(load_for(LLM, flags))


def weights(output: Path, name: str = "model") -> dict[str, Tensor]:
    return load_file(output / name / "model.safetensors")
