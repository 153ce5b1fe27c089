"""make demo-llm: a language model from nothing to stories, in a few minutes on two CPU cores.

    python tools/demo_llm.py

Stories are made by a grammar (``demo_stories.toml``); then commands that anyone could type, shown before they run: a
tokenizer is trained on them and turns them into token shards, a small Llama is pretrained, and the model is measured on
stories it has never seen, before and after. What the training begins with is written too (the weights follow from the
seed), so that both are measured by the same command.

A story is one of five plots (lost, found, stuck, afraid, shared) with a hero, a friend, a thing and places, which stay
the same to its end. So a model has something to learn at every distance: spelling, grammar, who is "he" or "she", and
that a red kite which was lost is a red kite when it is found. Nobody wrote these stories and nobody owns them; they are
no measure of what a model knows about the world.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from rich.text import Text

from library.errors import exit_on_user_error
from library.files import read_json_lines, write_text
from library.training.report.progress import plain_table, shown_path
from tools.command import answer_early, count, show_and_run, tool_console, tool_parser


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    parser = tool_parser(__doc__)
    parser.add_argument("--steps", type=count, metavar="N", help="optimizer steps, instead of the configuration's")
    parser.add_argument("--stories", type=count, default=10_000, metavar="N", help="default: %(default)s")
    return parser


answer_early(__name__, lambda: parser().parse_args())

from library.randomness import python_random

ROOT = Path(__file__).resolve().parent.parent


CONFIG = "configs/demo_llm.toml"
FOLDER = Path("output/demo_llm")
STORIES = FOLDER / "stories.jsonl"
CORPUS, UNTRAINED, TRAINED = FOLDER / "corpus", FOLDER / "untrained", FOLDER / "demo_llm"
PROMPTS = ("Once upon a time there was a", "One rainy morning Lily could not find her red")
_MEASURES = {"perplexity": "perplexity", "bits_per_byte": "bits per byte", "loss": "loss per token"}

_WORDS = tomllib.loads(Path(__file__).with_name("demo_stories.toml").read_text(encoding="utf-8"))

Run = Callable[[list[str]], None]


def write_untrained() -> None:
    """Write the model that training begins with."""
    import torch

    from library.config.load import load_for
    from library.config.scripts import LLM
    from library.llm.token_batches import TokenShards
    from library.llm.tokenizer_files import load_tokenizer
    from library.models.llm.files import export_hf
    from library.training.tasks.pretraining import build_model, name_ends

    config = load_for(LLM, ["--config_file", CONFIG])
    tokenizer = load_tokenizer(CORPUS)
    model = build_model(config, TokenShards(CORPUS, "train").vocab_size, torch.device("cpu"))
    name_ends(model, tokenizer)
    export_hf(model, UNTRAINED)
    tokenizer.save(UNTRAINED)


def demo(run: Run, steps: int | None = None, stories: int = 10_000) -> None:
    """Run everything in the working folder, which holds ``configs``; print what came of it."""
    lines = (json.dumps({"text": story(number)}) + "\n" for number in range(stories))
    write_text(STORIES, "".join(lines))
    prepare = ["tools/prepare_text.py", str(STORIES), "--train_tokenizer", "1024", "--validation_share", "0.02"]
    run([*prepare, "--workers", "0", "--save_to", str(CORPUS), "--overwrite"])
    write_untrained()
    run(["train_llm.py", "--config_file", CONFIG, *(["--max_train_steps", str(steps)] if steps else [])])
    how = ["--max_new_tokens", "110", "--temperature", "0.8", "--top_p", "0.9"]
    for model in (UNTRAINED, TRAINED):  # measured on the held-out stories, and let write
        measured = ["--perplexity", str(CORPUS), "--save_to", f"{model}.json"]
        run(["tools/evaluate_llm.py", "--model", str(model), *measured])
        written = ["--prompt", *PROMPTS, *how, "--save_to", f"{model}.jsonl"]
        run(["tools/generate.py", "text", "--model", str(model), *written])
    summary()


def summary() -> None:
    """Print both models' metrics and texts beside each other, and where everything is."""
    console = tool_console()
    before, after = (json.loads(Path(f"{model}.json").read_text(encoding="utf-8")) for model in (UNTRAINED, TRAINED))
    table = plain_table("", "before", "after", title="on stories it has never seen")
    for key, name in _MEASURES.items():
        table.add_row(name, *(f"{next(iter(side['perplexity'].values()))[key]:.3f}" for side in (before, after)))
    console.print(table)
    for name, model in (("before", UNTRAINED), ("after", TRAINED)):
        for _, sample in read_json_lines(f"{model}.jsonl"):
            console.print(Text(f"{name}: {sample['prompt']}{sample['text']}\n"))
    curves, metrics = FOLDER / "lr.png", FOLDER / "metrics.jsonl"
    for path in (curves, metrics, TRAINED, Path(f"{TRAINED}.json"), STORIES):
        console.print(shown_path(path))


def story(number: int, seed: int = 0) -> str:
    """Return story ``number``: a function of number and seed."""
    draw = python_random(seed, "story", number)
    frame, plots = _WORDS["frame"], _WORDS["plots"]
    cast = _cast(draw, _WORDS["cast"])
    plot = draw.choice(list(plots.values()))
    alternatives = (line.split(" | ") for line in (*frame["opening"], *plot, *frame["ending"]))
    chosen = (lines[0] if len(lines) == 1 else draw.choice(lines) for lines in alternatives)
    return " ".join(line.format_map(cast) for line in chosen)


def _cast(draw: random.Random, words: dict[str, list[str]]) -> dict[str, str]:
    """Return what one story is about: drawn once, the same in every sentence."""
    she = draw.choice(("she", "he"))
    cast = {"she": she, "hers": "her" if she == "she" else "his"}
    name = draw.choice(words["girls" if she == "she" else "boys"])
    child = "girl" if she == "she" else "boy"
    kind = draw.choice([*[child] * len(words["animals"]), *words["animals"]])  # children half of the time
    cast |= {"name": name, "kind": kind, "nature": draw.choice(words["natures"])}
    cast["friend"] = draw.choice([other for other in (*words["girls"], *words["boys"]) if other != name])
    cast["animal"] = draw.choice([animal for animal in words["animals"] if animal != kind])
    cast["thing"] = f"{draw.choice(words['colours'])} {draw.choice(words['things'])}"
    cast |= {key: draw.choice(words[f"{key}s"]) for key in ("food", "home", "place")}
    cast["spot"], cast["empty"] = draw.sample(words["spots"], 2)
    cast |= {key: draw.choice(words[f"{key}s"]) for key in ("trap", "tool", "fear")}
    cast["game"] = draw.choice([game for game in words["games"] if game != "fly" or kind in ("duck", "owl", "hen")])
    cast |= {"weather": draw.choice(words["weather"]), "time": draw.choice(words["times"])}
    for key, word in (("a_nature", "nature"), ("an_animal", "animal"), ("a_thing", "thing")):
        cast[key] = f"an {cast[word]}" if cast[word][0] in "aeiou" else f"a {cast[word]}"
    return cast


@exit_on_user_error
def main() -> None:
    """Parse the command line and run the demo."""
    options = parser().parse_args()
    os.chdir(ROOT)
    demo(show_and_run, options.steps, options.stories)


if __name__ == "__main__":
    main()
