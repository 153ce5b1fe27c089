"""One option of a TOML text set to any of its values: it reads back equal, and all else stays as it was."""

from __future__ import annotations

import contextlib
import random
import time
from typing import Any, get_args, get_origin

import pytest
import toml
from pydantic import ValidationError

pytest.importorskip("tomlkit")

from library.config.edit import edited, kinds_of, lacks, shown
from library.config.family_defaults import FAMILY, KIND
from library.config.load import read_keys
from library.config.markers import words_of
from library.config.scripts import LANGUAGE_LORA, LLM, LORA, Script, fields, sections
from library.errors import UserError
from library.files import toml_text

SCRIPTS = [LORA, LANGUAGE_LORA, LLM]
named = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.training)


# ---- every option


def valid(key: str, script: Script[Any], draw: random.Random) -> Any:
    """Return a value of a key that its section takes by itself, found by trying."""
    section, field = fields(script)[key]
    schema = sections(script)[section]
    texts = ["a/b c.safetensors", 'q"uo\\te', "#no comment", "[x]", "schön = 1", "1", "true", "'"]
    words, is_list = words_of(field.annotation), get_origin(field.annotation) is list
    anything = [True, False, draw.randint(1, 9), draw.randint(10, 900), round(draw.uniform(0.01, 0.99), 4),
                round(draw.uniform(0.01, 0.49), 4), draw.choice([1e-4, 3.5, 1e-12]), draw.choice(texts), "plain",
                *words]  # fmt: skip
    candidates = [[draw.choice(anything) for _ in range(draw.randint(1, 2))] for _ in range(80)]
    candidates = [one for one in candidates if len(set(map(type, one))) == 1]  # as toml wants it
    candidates += [[], ["weight_decay=0.01"]] if is_list else []
    draw.shuffle(anything)
    required = {
        k: f.get_default() if not f.is_required() else (words_of(f.annotation) or ("x",))[0]
        for k, f in schema.model_fields.items()
        if f.default not in (FAMILY, KIND)
    }
    required = {
        k: [v] if get_origin(schema.model_fields[k].annotation) is list and v == "x" else v for k, v in required.items()
    }
    if "list" in kinds_of(field):  # of lists alone, or of a file of them too
        anything = candidates if is_list else [*candidates, "prompts.txt"]
    for value in anything:
        try:
            kept = getattr(schema.model_validate(required | {key: value}, strict=False), key)
        except ValidationError:
            continue
        if kept == value and type(kept) in (type(value), *get_args(field.annotation)):
            return value
    raise AssertionError(f"no value of {key} was found")


@named
def test_each_option_alone_goes_through_the_form(script: Script[Any]) -> None:
    draw = random.Random(7)
    for key, (section, field) in fields(script).items():
        for _ in range(3):
            value = valid(key, script, draw)
            content = shown(value)
            assert content is not None
            text = edited("# mine\n", key, content, script)
            assert text.startswith("# mine\n")
            if field.is_required() or value != field.get_default() or key == "learning_rate":
                assert toml.loads(text) == {section: {key: value}}
            else:
                assert toml.loads(text) == {}
            assert edited(text, key, "", script).count(f"{key} =") == 0


@named
@pytest.mark.parametrize("seed", range(3))
def test_each_option_in_a_full_text_changes_alone(script: Script[Any], seed: int) -> None:
    draw = random.Random(seed)
    tables: dict[str, Any] = {}
    for key, (section, _) in fields(script).items():
        if draw.random() < 0.5:
            tables.setdefault(section, {})[key] = valid(key, script, draw)
    text = toml_text(tables).replace("\n[", "\n# of the next\n[")
    before = read_keys(text, "text", script).values
    for key in draw.sample(list(fields(script)), 25):
        field, value = fields(script)[key][1], valid(key, script, draw)
        content = shown(value)
        assert content is not None
        changed = edited(text, key, content, script)
        is_default = not field.is_required() and value == field.get_default() and key != "learning_rate"
        assert read_keys(changed, "text", script).values == {
            **{other: kept for other, kept in before.items() if other != key}, **({} if is_default else {key: value})
        }  # fmt: skip
        assert changed.count("# of the next") == text.count("# of the next")


def test_where_a_list_or_a_file_is_taken_a_line_that_ends_as_a_file_is_one() -> None:
    assert edited("", "sample_prompts", "my/Prompts.TXT", LORA) == '[sampling]\nsample_prompts = "my/Prompts.TXT"\n'
    assert edited("", "sample_prompts", "a hat", LORA) == '[sampling]\nsample_prompts = ["a hat"]\n'
    two = edited("", "sample_prompts", "a.txt\nb.txt", LORA)
    assert toml.loads(two) == {"sampling": {"sample_prompts": ["a.txt", "b.txt"]}}
    chats = edited("", "sample_prompts", "what is a.txt", LANGUAGE_LORA)
    assert toml.loads(chats) == {"sampling": {"sample_prompts": ["what is a.txt"]}}


def test_only_a_newline_ends_an_item_of_a_list() -> None:
    for items in (["a\u2028b --w 64", "c"], ["a\x85b", "c"]):
        text = edited("", "sample_prompts", shown(items) or "", LORA)
        assert toml.loads(text)["sampling"]["sample_prompts"] == items


def test_a_long_list_has_a_line_for_each() -> None:
    prompts = [f"""a cat, [{n}] "sits" # on {"a mat " * 12}--d {n}""" for n in range(3)]
    text = edited("# mine\n", "sample_prompts", "\n".join(prompts), LORA)
    assert toml.loads(text) == {"sampling": {"sample_prompts": prompts}}
    assert text.count("\n") == 8
    assert edited(text, "sample_prompts", "", LORA) == "# mine\n\n[sampling]\n"


# ---- one line


MINE = """# first words
model_type = "flux"   # whose

[network] # the LoRA
network_dim = 16      # rank # not 8
  network_args = [ # several
  "rank_dropout=0.1", # with ] in a comment
  "x = [y]",
]
# said of the next

[optimizer]
"learning_rate" = 1e-4
optimizer_args = []
"""


def test_a_changed_field_changes_its_line_alone() -> None:
    one = edited(MINE, "network_dim", "32", LORA)
    assert one == MINE.replace("network_dim = 16 ", "network_dim = 32 ")
    more = edited(one, "network_args", "a=1\nb=2", LORA)
    before, _, rest = one.partition("  network_args")
    assert more == before + '  network_args = ["a=1", "b=2"]\n' + rest[rest.index("# said") :]
    assert edited(MINE, "learning_rate", "2e-3", LORA) == MINE.replace(
        '"learning_rate" = 1e-4', '"learning_rate" = 2e-3'
    )


def test_a_new_key_stands_with_its_section_and_an_unset_one_goes_with_what_is_said_of_it() -> None:
    added = edited(MINE, "network_alpha", "8", LORA)
    assert added == MINE.replace("]\n# said", "]\nnetwork_alpha = 8\n# said")
    assert edited(MINE, "seed", "3", LORA) == MINE + "\n[training]\nseed = 3\n"
    assert edited(MINE, "network_dim", "", LORA) == MINE.replace("network_dim = 16      # rank # not 8\n", "")
    assert edited(added, "network_alpha", "", LORA) == MINE
    assert edited("", "network_dim", "4", LORA) == "[network]\nnetwork_dim = 4\n"


def test_the_default_is_not_written_but_a_learning_rate_is() -> None:
    assert edited("", "caption_variants", "8", LORA) == ""
    assert "network_dim = 16" in edited("", "network_dim", "16", LORA)  # another family's default is another
    assert edited("", "sample_at_end", "true", LORA) == ""
    assert "sample_at_end = false" in edited("", "sample_at_end", "false", LORA)
    # Prodigy takes 1.0 where none is given, so that 1e-4 must be said to be refused
    assert "learning_rate = 1e-4" in edited("", "learning_rate", "1e-4", LORA)


def test_a_key_is_found_wherever_it_stands_and_never_within_a_text() -> None:
    inside = '[network]\nnetwork_args = ["""\nnetwork_dim = 3\n"""]\n'
    assert edited(inside, "network_dim", "32", LORA) == inside + "network_dim = 32\n"
    assert edited("network = { network_dim = 4 }\n", "network_dim", "32", LORA) == "network = { network_dim = 32 }\n"
    assert edited("[mine]\n'network_dim' = 4 # x\n", "network_dim", "32", LORA) == "[mine]\n'network_dim' = 32 # x\n"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("network = 3\n", "4"), ("[[network]]\nx = 1\n", "4"), ("network_dim = \n", "4"), ("x = " + "[" * 1999, "4"),
        ("[a.b]\nnetwork_dim = 3\n", ""), ("network_dim = 3\n[network]\nnetwork_dim = 4\n", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_changed_by_itself_is_left_to_the_text(text: str, content: str) -> None:
    with pytest.raises(UserError, match="configuration|text"):
        edited(text, "network_dim", content, LORA)


@pytest.mark.parametrize(
    "line", ["[a{0}]\nx = 1\n", "a{0} = [[], [ ]]\n", "#{0}\n", "a{0} = {{x = 1}}\n", "a{0}.b = 1\n"]
)
def test_a_long_text_with_as_many_brackets_as_are_taken_is_changed_in_seconds(line: str) -> None:
    text = "".join(map(line.format, range(20_000 if line[0] == "#" else 2000)))
    began = time.monotonic()
    with contextlib.suppress(UserError):
        edited(text, "network_dim", "32", LORA)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("key", "given", "said"),
    [
        ("huber_c", {}, "loss_type = "),
        ("huber_c", {"loss_type": "huber"}, ""),
        ("cpu_offload_checkpointing", {}, "gradient_checkpointing"),
        ("cpu_offload_checkpointing", {"gradient_checkpointing": True}, ""),
        ("t5xxl", {"model_type": "krea2"}, "model_type = "),
        ("t5xxl", {"model_type": "flux"}, ""),
        ("seed", {}, ""),
    ],
)
def test_an_option_says_without_what_it_has_no_effect(key: str, given: dict[str, Any], said: str) -> None:
    found = lacks(key, given, LORA)
    assert found.startswith(said)
    assert bool(found) == bool(said)
