"""make demo-llm: a language model from nothing to stories, in a few minutes on two CPU cores.

    python tools/demo_llm.py

Stories are made by a grammar; then commands that anyone could type, shown before they run: a tokenizer is trained on
them and turns them into token shards, a small Llama is pretrained, and the model is measured on stories it has never
seen, before and after. What the training begins with is written too (the weights follow from the seed), so that both
are measured by the same command.

A story is one of five plots (lost, found, stuck, afraid, shared) with a hero, a friend, a thing and places, which stay
the same to its end. So a model has something to learn at every distance: spelling, grammar, who is "he" or "she", and
that a red kite which was lost is a red kite when it is found. Nobody wrote these stories and nobody owns them; they are
no measure of what a model knows about the world.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from library.errors import exit_on_user_error
from library.files import write_text
from library.randomness import python_random
from library.training.report.progress import plain_table, shown_path
from tools.command import show_and_run, tool_console, tool_parser

ROOT = Path(__file__).resolve().parent.parent


CONFIG = "configs/demo_llm.toml"
FOLDER = Path("output/demo_llm")
STORIES = FOLDER / "stories.jsonl"
CORPUS, UNTRAINED, TRAINED = FOLDER / "corpus", FOLDER / "untrained", FOLDER / "demo_llm"
PROMPTS = ("Once upon a time there was a", "One rainy morning Lily could not find her red")
_MEASURES = {"perplexity": "perplexity", "bits_per_byte": "bits per byte", "loss": "loss per token"}

Run = Callable[[list[str]], None]


def preparation() -> list[str]:
    """Return the command that makes a corpus of the stories."""
    prepare = ["tools/prepare_text.py", str(STORIES), "--train_tokenizer", "1024", "--validation_share", "0.02"]
    return [*prepare, "--workers", "0", "--save_to", str(CORPUS), "--overwrite"]


def training(steps: int | None) -> list[str]:
    """Return the command that trains; ``steps`` replaces the configuration's number."""
    return ["train_llm.py", "--config_file", CONFIG, *(["--max_train_steps", str(steps)] if steps else [])]


def evaluation(model: Path) -> list[str]:
    """Return the command that measures ``model`` on the held-out stories and lets it write."""
    what = ["--perplexity", str(CORPUS), "--prompt", *PROMPTS, "--max_new_tokens", "110", "--top_p", "0.9"]
    return ["tools/evaluate_llm.py", "--model", str(model), *what, "--save_to", f"{model}.json"]


def write_untrained() -> None:
    """Write the model that training begins with."""
    import torch

    from library.config.load import load_llm_config
    from library.llm.token_batches import TokenShards
    from library.llm.tokenizers import load_tokenizer
    from library.models.llm.files import export_hf
    from library.training.tasks.pretraining import build_model, name_ends

    config = load_llm_config(["--config_file", CONFIG])
    tokenizer = load_tokenizer(CORPUS)
    model = build_model(config, TokenShards(CORPUS, "train").vocab_size, torch.device("cpu"))
    name_ends(model, tokenizer)
    export_hf(model, UNTRAINED)
    tokenizer.save(UNTRAINED)


def demo(run: Run, steps: int | None = None, stories: int = 10_000) -> None:
    """Run everything in the working folder, which holds ``configs``; print what came of it."""
    lines = (json.dumps({"text": story(number)}) + "\n" for number in range(stories))
    write_text(STORIES, "".join(lines))
    run(preparation())
    write_untrained()
    run(training(steps))
    for model in (UNTRAINED, TRAINED):
        run(evaluation(model))
    summary()


def summary() -> None:
    """Print both models' metrics and texts beside each other, and where everything is."""
    console = tool_console()
    before, after = (json.loads(Path(f"{model}.json").read_text(encoding="utf-8")) for model in (UNTRAINED, TRAINED))
    table = plain_table("", "before", "after", title="on stories it has never seen")
    for key, name in _MEASURES.items():
        table.add_row(name, *(f"{next(iter(side['perplexity'].values()))[key]:.3f}" for side in (before, after)))
    console.print(table)
    for name, side in (("before", before), ("after", after)):
        for sample in side["samples"]:
            console.print(f"{name}: {sample['prompt']}{sample['text']}\n")
    curves, metrics = FOLDER / "lr.png", FOLDER / "metrics.jsonl"
    for path in (curves, metrics, TRAINED, Path(f"{TRAINED}.json"), STORIES):
        console.print(shown_path(path))


_GIRLS = ("Anna", "Clara", "Emma", "Ida", "Lily", "Mia", "Nora", "Rosa", "Sara", "Zoe")
_BOYS = ("Ben", "Carl", "Finn", "Hugo", "Jack", "Leo", "Max", "Oscar", "Paul", "Tom")
_ANIMALS = ("bear", "cat", "dog", "duck", "fox", "frog", "hen", "horse", "mouse", "owl", "rabbit", "sheep")
_NATURES = ("brave", "clever", "curious", "gentle", "happy", "kind", "little", "quiet", "small", "young")
_COLOURS = ("blue", "brown", "golden", "green", "orange", "purple", "red", "white", "yellow")
_THINGS = ("ball", "bell", "boat", "book", "box", "cup", "drum", "hat", "kite", "lamp", "ring", "scarf", "shoe")
_FOODS = ("apples", "berries", "bread", "carrots", "cheese", "cherries", "nuts", "pears")
_HOMES = (
    "in a house on a hill",
    "near a big forest",
    "in a village by the sea",
    "on a farm",
    "at the end of a long road",
    "beside a river",
)
_PLACES = ("the forest", "the garden", "the lake", "the market", "the meadow", "the old barn", "the park", "the river")
_SPOTS = (
    "under a bush",
    "behind the old wall",
    "in the tall grass",
    "next to a stone",
    "under the bridge",
    "behind a tree",
    "in a hole",
    "between two rocks",
)
_TRAPS = ("a deep hole", "the mud", "a net", "a thorn bush", "the cold water")
_TOOLS = ("a long rope", "a strong branch", "a piece of wood", "an old ladder")
_GAMES = ("climb trees", "dance", "draw pictures", "fly", "play in the snow", "run", "sing", "swim", "tell stories")
_WEATHER = ("sunny", "warm", "windy", "cold", "rainy", "bright")
_FEARS = ("the dark", "the thunder", "the big wave", "the loud wind", "the old house")
_TIMES = ("morning", "afternoon", "evening", "day")


# What is said at one place is a line, its alternatives divided by " | "; a name in braces is of the cast.
_FRIEND_COMES = (
    "Then {friend} the {animal} came along. | Just then {an_animal} named {friend} walked by. | "
    "Soon {she} met {an_animal} whose name was {friend}."
)
_OPENING = (
    "Once upon a time there was {a_nature} {kind} named {name}. | {name} was {a_nature} {kind} who lived {home}. | "
    "There once lived {a_nature} {kind} {home}, and {hers} name was {name}.",
    "{name} loved to {game}. | Every day {she} went to {place} to {game}. | "
    "Nothing made {name} as happy as a walk to {place}.",
)
_PLOTS = {
    "lost": (
        "One {weather} {time} {name} could not find {hers} {thing}. | "
        "But one {weather} {time} {hers} {thing} was gone.",
        '"Where is my {thing}?" {she} cried. | "I have lost my {thing}," {she} said sadly.',
        _FRIEND_COMES,
        '"I will help you," said {friend}. | "Do not cry," said {friend}. "We will look for it."',
        "They looked {empty}, but there was nothing.",
        "At last they found the {thing} {spot}. | Then they looked {spot}, and there it was!",
        '"Thank you, {friend}!" said {name}. | {name} hugged {friend} and laughed.',
    ),
    "found": (
        "One {weather} {time} {name} found {a_thing} {spot}.",
        '"Whose {thing} is this?" {she} asked. | "What a nice {thing}!" {she} said.',
        "{name} wanted to keep it, but {she} knew that someone had lost it.",
        "So {she} took the {thing} to {place}. | So {she} carried it to {place}.",
        "There sat {an_animal} named {friend} and cried.",
        '"Is this your {thing}?" asked {name}. | "I think this is yours," said {name}.',
        '"Yes, that is my {thing}! Thank you!" said {friend}. | {friend} took the {thing} and jumped for joy.',
    ),
    "stuck": (
        "One {weather} {time} {she} heard a voice near {place}.",
        '"Help! Help!" cried {an_animal}. | "Please help me!" called {an_animal}.',
        "It was {friend} the {animal}, who was stuck in {trap}.",
        '"Do not be afraid," said {name}. | "I will get you out," said {name}.',
        "{name} ran home and came back with {tool}.",
        "{name} pulled and pulled until {friend} was free. | With {tool} {she} pulled {friend} out of {trap}.",
        '"You saved me!" said {friend}. | "Thank you, {name}!" said {friend}.',
    ),
    "afraid": (
        "But {name} was afraid of {fear}.",
        "One {weather} {time} {she} had to go to {place} alone.",
        '"I am so afraid of {fear}," {she} said. | {name} thought of {fear} and began to shake.',
        _FRIEND_COMES,
        '"Take my hand," said {friend}. | "I was afraid of {fear} too," said {friend}.',
        "They walked to {place} together and sang a song.",
        "And {name} was not afraid of {fear} any more.",
    ),
    "shared": (
        "One {weather} {time} {name} had a basket full of {food}.",
        "{name} sat down {spot} and wanted to eat.",
        _FRIEND_COMES,
        '"I am so hungry," said {friend}. | "I have not eaten all day," said {friend}.',
        "{name} looked at the {food} and thought for a while.",
        '"You can have half of my {food}," {she} said. | Then {she} gave {friend} half of the {food}.',
        "They ate the {food} and told jokes. | The {food} had never tasted so good.",
    ),
}
_ENDING = (
    "From that day on {name} and {friend} were best friends. | "
    "{name} and {friend} played together until it was dark. | "
    "That night {name} went to bed and was very happy. | "
    "And every {time} since then {friend} has come to visit {name}. | "
    "{name} learned that it is good to help and to be helped."
)


def story(number: int, seed: int = 0) -> str:
    """Return story ``number``: a function of number and seed."""
    draw = python_random(seed, "story", number)
    cast = _cast(draw)
    plot = draw.choice(list(_PLOTS.values()))
    alternatives = (line.split(" | ") for line in (*_OPENING, *plot, _ENDING))
    chosen = (lines[0] if len(lines) == 1 else draw.choice(lines) for lines in alternatives)
    return " ".join(line.format_map(cast) for line in chosen)


def _cast(draw: random.Random) -> dict[str, str]:
    """Return what one story is about: drawn once, the same in every sentence."""
    she = draw.choice(("she", "he"))
    cast = {"she": she, "hers": "her" if she == "she" else "his"}
    name = draw.choice(_GIRLS if she == "she" else _BOYS)
    child = "girl" if she == "she" else "boy"
    kind = draw.choice([*[child] * len(_ANIMALS), *_ANIMALS])  # children half of the time
    cast |= {"name": name, "kind": kind, "nature": draw.choice(_NATURES)}
    cast["friend"] = draw.choice([other for other in (*_GIRLS, *_BOYS) if other != name])
    cast["animal"] = draw.choice([animal for animal in _ANIMALS if animal != kind])
    cast["thing"] = f"{draw.choice(_COLOURS)} {draw.choice(_THINGS)}"
    cast |= {"food": draw.choice(_FOODS), "home": draw.choice(_HOMES), "place": draw.choice(_PLACES)}
    cast["spot"], cast["empty"] = draw.sample(_SPOTS, 2)
    cast |= {"trap": draw.choice(_TRAPS), "tool": draw.choice(_TOOLS), "fear": draw.choice(_FEARS)}
    cast["game"] = draw.choice([game for game in _GAMES if game != "fly" or kind in ("duck", "owl", "hen")])
    cast |= {"weather": draw.choice(_WEATHER), "time": draw.choice(_TIMES)}
    for key, word in (("a_nature", "nature"), ("an_animal", "animal"), ("a_thing", "thing")):
        cast[key] = f"an {cast[word]}" if cast[word][0] in "aeiou" else f"a {cast[word]}"
    return cast


@exit_on_user_error
def main() -> None:
    """Parse the command line and run the demo."""
    parser = tool_parser(__doc__)
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps, instead of the configuration's")
    parser.add_argument("--stories", type=int, default=10_000, metavar="N", help="default: %(default)s")
    options = parser.parse_args()
    os.chdir(ROOT)
    demo(show_and_run, options.steps, options.stories)


if __name__ == "__main__":
    main()
