"""make demo-llm: a language model from nothing to stories, in a few minutes on two CPU cores.

    python tools/demo_llm.py

Commands that anyone could type, shown before they run: stories are made by a grammar, a tokenizer is trained on them
and turns them into token shards, a small Llama is pretrained, and the model is measured on stories it has never seen,
before and after. What the training begins with is written too (the weights follow from the seed), so that both are
measured by the same command.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from library.config.load import load_llm_config
from library.errors import exit_on_user_error
from library.llm.token_batches import TokenShards
from library.llm.tokenizers import load_tokenizer
from library.models.llm.files import export_hf
from library.training.report.progress import shown_path
from library.training.tasks.pretraining import build_model, name_ends

CONFIG = "configs/demo_llm.toml"
FOLDER = Path("output/demo_llm")
CORPUS, UNTRAINED, TRAINED = FOLDER / "corpus", FOLDER / "untrained", FOLDER / "demo_llm"
PROMPTS = ("Once upon a time there was a", "One rainy morning Lily could not find her red")
_MEASURES = {"perplexity": "perplexity", "bits_per_byte": "bits per byte", "loss": "loss per token"}

Run = Callable[[list[str]], None]


def preparation(stories: int) -> list[list[str]]:
    """Return the commands that make a corpus of ``stories``."""
    texts = str(FOLDER / "stories.jsonl")
    make = ["tools/demo_stories.py", "--count", str(stories), "--save_to", texts]
    prepare = ["tools/prepare_text.py", texts, "--train_tokenizer", "1024", "--validation_share", "0.02"]
    return [make, [*prepare, "--workers", "0", "--save_to", str(CORPUS), "--overwrite"]]


def training(steps: int | None) -> list[str]:
    """Return the command that trains; ``steps`` replaces the configuration's number."""
    return ["train_llm.py", "--config_file", CONFIG, *(["--max_train_steps", str(steps)] if steps else [])]


def evaluation(model: Path) -> list[str]:
    """Return the command that measures ``model`` on the held-out stories and lets it write."""
    what = ["--perplexity", str(CORPUS), "--prompt", *PROMPTS, "--max_new_tokens", "110", "--top_p", "0.9"]
    return ["tools/evaluate_llm.py", "--model", str(model), *what, "--save_to", f"{model}.json"]


def write_untrained() -> None:
    """Write the model that training begins with."""
    config = load_llm_config(["--config_file", CONFIG])
    tokenizer = load_tokenizer(CORPUS)
    model = build_model(config, TokenShards(CORPUS, "train").vocab_size, torch.device("cpu"))
    name_ends(model, tokenizer)
    export_hf(model, UNTRAINED)
    tokenizer.save(UNTRAINED)


def demo(run: Run, steps: int | None = None, stories: int = 10_000) -> None:
    """Run everything in the working folder, which holds ``configs``; print what came of it."""
    for words in preparation(stories):
        run(words)
    write_untrained()
    run(training(steps))
    for model in (UNTRAINED, TRAINED):
        run(evaluation(model))
    summary()


def summary() -> None:
    """Print both models' figures and texts beside each other, and where everything is."""
    console = Console(markup=False, highlight=False)
    before, after = (json.loads(Path(f"{model}.json").read_text(encoding="utf-8")) for model in (UNTRAINED, TRAINED))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="on stories it has never seen")
    for column in ("", "before", "after"):
        table.add_column(column, justify="right" if column else "left")
    for key, name in _MEASURES.items():
        table.add_row(name, *(f"{next(iter(side['perplexity'].values()))[key]:.3f}" for side in (before, after)))
    console.print(table)
    for name, side in (("before", before), ("after", after)):
        for sample in side["samples"]:
            console.print(f"{name}: {sample['prompt']}{sample['text']}\n", soft_wrap=True)
    curves, metrics = FOLDER / "lr.png", FOLDER / "metrics.jsonl"
    for path in (curves, metrics, TRAINED, Path(f"{TRAINED}.json"), FOLDER / "stories.jsonl"):
        console.print(shown_path(path), soft_wrap=True)


def run_shown(words: list[str]) -> None:
    """Show a command and run it; end with it if it fails."""
    print(f"\n$ python {shlex.join(words)}", flush=True)
    done = subprocess.run([sys.executable, *words], check=False)
    if done.returncode:
        sys.exit(done.returncode)


@exit_on_user_error
def main() -> None:
    """Parse the command line and run the demo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps, instead of the configuration's")
    parser.add_argument("--stories", type=int, default=10_000, metavar="N", help="default: %(default)s")
    options = parser.parse_args()
    os.chdir(ROOT)
    demo(run_shown, options.steps, options.stories)


if __name__ == "__main__":
    main()
