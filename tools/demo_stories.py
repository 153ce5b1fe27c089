"""The stories of make demo-llm: what a small language model learns, from a grammar (``demo_stories.toml``).

    python tools/demo_stories.py --save_to output/demo_llm/stories.jsonl

A story is one of five plots (lost, found, stuck, afraid, shared) with a hero, a friend, a thing and places, which stay
the same to its end. So a model has something to learn at every distance: spelling, grammar, who is "he" or "she", and
that a red kite which was lost is a red kite when it is found. Nobody wrote these stories and nobody owns them; they are
no measure of what a model knows about the world.
"""

from __future__ import annotations

import json
import random
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from library.errors import exit_on_user_error
from library.files import write_text
from library.randomness import python_random
from tools.command import count, tool_parser

_WORDS = tomllib.loads(Path(__file__).with_name("demo_stories.toml").read_text(encoding="utf-8"))


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
    """Write the stories as JSON lines."""
    parser = tool_parser(__doc__)
    parser.add_argument("--save_to", type=Path, required=True, metavar="FILE")
    parser.add_argument("--stories", type=count, default=10_000, metavar="N", help="default: %(default)s")
    options = parser.parse_args()
    lines = (json.dumps({"text": story(number)}) + "\n" for number in range(options.stories))
    write_text(options.save_to, "".join(lines))


if __name__ == "__main__":
    main()
