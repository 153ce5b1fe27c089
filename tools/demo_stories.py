"""Short stories in simple English, made by a grammar: the text that make demo-llm trains on.

    python tools/demo_stories.py --count 8000 --save_to output/demo_llm/stories.jsonl

A story is one of five plots (lost, found, stuck, afraid, shared) with a hero, a friend, a thing and places, which stay
the same to its end. So a model has something to learn at every distance: spelling, grammar, who is "he" or "she", and
that a red kite which was lost is a red kite when it is found. Nobody wrote these stories and nobody owns them; they are
no measure of what a model knows about the world.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.errors import UserError, exit_on_user_error
from library.files import write_text
from library.randomness import python_random

_GIRLS = ("Anna", "Clara", "Emma", "Ida", "Lily", "Mia", "Nora", "Rosa", "Sara", "Zoe")
_BOYS = ("Ben", "Carl", "Finn", "Hugo", "Jack", "Leo", "Max", "Oscar", "Paul", "Tom")
_CHILDREN = {"she": ("girl",), "he": ("boy",)}
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


class _Cast:
    """What one story is about: drawn once, the same in every sentence."""

    def __init__(self, draw: random.Random) -> None:
        self.she = draw.choice(("she", "he"))
        self.hers = "her" if self.she == "she" else "his"
        names = _GIRLS if self.she == "she" else _BOYS
        self.name = draw.choice(names)
        self.kind = draw.choice([*_CHILDREN[self.she] * len(_ANIMALS), *_ANIMALS])  # children half of the time
        self.nature = draw.choice(_NATURES)
        self.friend = draw.choice([name for name in (*_GIRLS, *_BOYS) if name != self.name])
        self.animal = draw.choice([animal for animal in _ANIMALS if animal != self.kind])
        self.thing = f"{draw.choice(_COLOURS)} {draw.choice(_THINGS)}"
        self.food, self.home, self.place = draw.choice(_FOODS), draw.choice(_HOMES), draw.choice(_PLACES)
        self.spot, self.empty = draw.sample(_SPOTS, 2)
        self.trap, self.tool, self.fear = draw.choice(_TRAPS), draw.choice(_TOOLS), draw.choice(_FEARS)
        self.game = draw.choice([game for game in _GAMES if game != "fly" or self.kind in ("duck", "owl", "hen")])
        self.weather, self.time = draw.choice(_WEATHER), draw.choice(_TIMES)


def story(number: int, seed: int = 0) -> str:
    """Return story ``number``: a function of number and seed."""
    draw = python_random(seed, "story", number)
    cast = _Cast(draw)
    plot = draw.choice((_lost, _found, _stuck, _afraid, _shared))
    return " ".join([*_opening(cast, draw), *plot(cast, draw), _ending(cast, draw)])


def _a(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _opening(c: _Cast, draw: random.Random) -> list[str]:
    first = (
        f"Once upon a time there was {_a(c.nature)} {c.kind} named {c.name}.",
        f"{c.name} was {_a(c.nature)} {c.kind} who lived {c.home}.",
        f"There once lived {_a(c.nature)} {c.kind} {c.home}, and {c.hers} name was {c.name}.",
    )
    second = (
        f"{c.name} loved to {c.game}.",
        f"Every day {c.she} went to {c.place} to {c.game}.",
        f"Nothing made {c.name} as happy as a walk to {c.place}.",
    )
    return [draw.choice(first), draw.choice(second)]


def _friend_comes(c: _Cast, draw: random.Random) -> str:
    return draw.choice(
        (
            f"Then {c.friend} the {c.animal} came along.",
            f"Just then {_a(c.animal)} named {c.friend} walked by.",
            f"Soon {c.she} met {_a(c.animal)} whose name was {c.friend}.",
        )
    )


def _lost(c: _Cast, draw: random.Random) -> list[str]:
    return [
        draw.choice(
            (
                f"One {c.weather} {c.time} {c.name} could not find {c.hers} {c.thing}.",
                f"But one {c.weather} {c.time} {c.hers} {c.thing} was gone.",
            )
        ),
        draw.choice((f'"Where is my {c.thing}?" {c.she} cried.', f'"I have lost my {c.thing}," {c.she} said sadly.')),
        _friend_comes(c, draw),
        draw.choice((f'"I will help you," said {c.friend}.', f'"Do not cry," said {c.friend}. "We will look for it."')),
        f"They looked {c.empty}, but there was nothing.",
        draw.choice((f"At last they found the {c.thing} {c.spot}.", f"Then they looked {c.spot}, and there it was!")),
        draw.choice((f'"Thank you, {c.friend}!" said {c.name}.', f"{c.name} hugged {c.friend} and laughed.")),
    ]


def _found(c: _Cast, draw: random.Random) -> list[str]:
    return [
        f"One {c.weather} {c.time} {c.name} found {_a(c.thing)} {c.spot}.",
        draw.choice((f'"Whose {c.thing} is this?" {c.she} asked.', f'"What a nice {c.thing}!" {c.she} said.')),
        f"{c.name} wanted to keep it, but {c.she} knew that someone had lost it.",
        draw.choice((f"So {c.she} took the {c.thing} to {c.place}.", f"So {c.she} carried it to {c.place}.")),
        f"There sat {_a(c.animal)} named {c.friend} and cried.",
        draw.choice((f'"Is this your {c.thing}?" asked {c.name}.', f'"I think this is yours," said {c.name}.')),
        draw.choice(
            (
                f'"Yes, that is my {c.thing}! Thank you!" said {c.friend}.',
                f"{c.friend} took the {c.thing} and jumped for joy.",
            )
        ),
    ]


def _stuck(c: _Cast, draw: random.Random) -> list[str]:
    return [
        f"One {c.weather} {c.time} {c.she} heard a voice near {c.place}.",
        draw.choice((f'"Help! Help!" cried {_a(c.animal)}.', f'"Please help me!" called {_a(c.animal)}.')),
        f"It was {c.friend} the {c.animal}, who was stuck in {c.trap}.",
        draw.choice((f'"Do not be afraid," said {c.name}.', f'"I will get you out," said {c.name}.')),
        f"{c.name} ran home and came back with {c.tool}.",
        draw.choice(
            (
                f"{c.name} pulled and pulled until {c.friend} was free.",
                f"With {c.tool} {c.she} pulled {c.friend} out of {c.trap}.",
            )
        ),
        draw.choice((f'"You saved me!" said {c.friend}.', f'"Thank you, {c.name}!" said {c.friend}.')),
    ]


def _afraid(c: _Cast, draw: random.Random) -> list[str]:
    return [
        f"But {c.name} was afraid of {c.fear}.",
        f"One {c.weather} {c.time} {c.she} had to go to {c.place} alone.",
        draw.choice(
            (f'"I am so afraid of {c.fear}," {c.she} said.', f"{c.name} thought of {c.fear} and began to shake.")
        ),
        _friend_comes(c, draw),
        draw.choice((f'"Take my hand," said {c.friend}.', f'"I was afraid of {c.fear} too," said {c.friend}.')),
        f"They walked to {c.place} together and sang a song.",
        f"And {c.name} was not afraid of {c.fear} any more.",
    ]


def _shared(c: _Cast, draw: random.Random) -> list[str]:
    return [
        f"One {c.weather} {c.time} {c.name} had a basket full of {c.food}.",
        f"{c.name} sat down {c.spot} and wanted to eat.",
        _friend_comes(c, draw),
        draw.choice((f'"I am so hungry," said {c.friend}.', f'"I have not eaten all day," said {c.friend}.')),
        f"{c.name} looked at the {c.food} and thought for a while.",
        draw.choice(
            (
                f'"You can have half of my {c.food}," {c.she} said.',
                f"Then {c.she} gave {c.friend} half of the {c.food}.",
            )
        ),
        draw.choice((f"They ate the {c.food} and told jokes.", f"The {c.food} had never tasted so good.")),
    ]


def _ending(c: _Cast, draw: random.Random) -> str:
    return draw.choice(
        (
            f"From that day on {c.name} and {c.friend} were best friends.",
            f"{c.name} and {c.friend} played together until it was dark.",
            f"That night {c.name} went to bed and was very happy.",
            f"And every {c.time} since then {c.friend} has come to visit {c.name}.",
            f"{c.name} learned that it is good to help and to be helped.",
        )
    )


@exit_on_user_error
def main() -> None:
    """Parse the command line and write the stories, one a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=8000, metavar="N", help="stories (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--save_to", type=Path, required=True, metavar="FILE", help="a .jsonl file")
    options = parser.parse_args()
    if options.count < 1:
        raise UserError(f"--count: {options.count} stories are none; give at least 1")
    lines = (json.dumps({"text": story(number, options.seed)}) + "\n" for number in range(options.count))
    write_text(options.save_to, "".join(lines))
    print(f"{options.save_to}: {options.count:,} stories")


if __name__ == "__main__":
    main()
