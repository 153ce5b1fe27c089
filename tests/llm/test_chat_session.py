"""A conversation whose cache is kept says what one without a cache says; what does not fit is left out, and said."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from library.errors import UserError
from library.llm.chat_templates import (
    Message,
    built_in_template,
    common,
    load_chat_template,
    load_prompt_template,
)
from library.llm.generation import SamplingSettings, generate_tokens
from library.llm.tokenizer_files import load_tokenizer
from library.models.llm.files import load_lm
from library.models.llm.model import TransformerLM
from tests.llm.talkers import PAIRS, Talk, write_chat_model, write_story_model

JINJA = "{% for m in messages %}<|start_header_id|>{{ m.role }}: {{ m.content }}<|eot_id|>{% endfor %}"
JINJA += "{% if add_generation_prompt %}<|start_header_id|>assistant: {% endif %}"
GREEDY = SamplingSettings(max_new_tokens=24, temperature=0)
DRAWN = SamplingSettings(max_new_tokens=24, temperature=1.5, top_p=0.95, repetition_penalty=1.2, seed=7)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("models")
    return {
        "chat": write_chat_model(top / "chat"),
        "llama": write_story_model(top / "llama"),
        "gpt2": write_story_model(top / "gpt2", "gpt2", context=160),
    }


def begin(folder: Path, system: str = "", context: int | None = None) -> tuple[TransformerLM, Talk]:
    model = load_lm(folder, torch.float32)
    template = load_prompt_template("auto", load_tokenizer(folder), folder, model.config.eos)
    return model, Talk(replace(model.config, context=context or model.config.context), template, system)


def messages(conversation: Talk) -> list[Message]:
    said = [Message("system", conversation.system)] if conversation.system else []
    for turn in conversation.turns:
        said += [Message("user", turn.question), Message("assistant", turn.answer)]
    return said


def say(model: TransformerLM, conversation: Talk, text: str, settings: SamplingSettings = GREEDY) -> str:
    return "".join(conversation.answer(model, text, settings))


@pytest.mark.parametrize("settings", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("kind", ["chat", "llama", "gpt2"])
def test_a_kept_cache_gives_the_tokens_of_a_fresh_one(
    folders: dict[str, Path], kind: str, settings: SamplingSettings
) -> None:
    model, kept = begin(folders[kind])
    _, fresh = begin(folders[kind])
    computed: list[int] = []  # the tokens whose keys and values there are
    for i in range(4):
        fresh.session.forget_cache()
        question = PAIRS[i % len(PAIRS)][0]
        prompt = kept.session.template.prompt("", kept.turns, question)
        for conversation in (kept, fresh):
            say(model, conversation, question, settings)
        assert fresh.session.stats.cached == 0
        assert kept.session.stats.cached == common(computed, prompt[:-1])
        assert kept.session.stats.cached + kept.session.stats.computed == fresh.session.stats.computed == len(prompt)
        assert i == 0 or settings is DRAWN or kept.session.stats.cached > kept.session.stats.computed
        computed = [*prompt, *kept.turns[-1].tokens[:-1]]
    assert [turn.tokens for turn in kept.turns] == [turn.tokens for turn in fresh.turns]


@pytest.mark.parametrize("name", ["tokenizer", "plain"])
def test_other_templates_keep_their_cache_too(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    model = load_lm(folders["chat"], torch.float32)
    tokenizer = load_tokenizer(folders["chat"])
    (tmp_path / "chat_template.jinja").write_text(JINJA)
    template = load_prompt_template(name, tokenizer, tmp_path, ())
    kept, fresh = (Talk(model.config, template, system="be short") for _ in range(2))
    for question, _ in PAIRS:
        fresh.session.forget_cache()
        for conversation in (kept, fresh):
            say(model, conversation, question)
        assert len(kept.turns) == 1 or kept.session.stats.cached > kept.session.stats.computed
    assert kept.turns == fresh.turns
    said = [Message("system", "be short"), *messages(kept)[1:], Message("user", "and?")]
    expected = load_chat_template(name, tokenizer, tmp_path).prompt_tokens(said)
    assert template.prompt("be short", kept.turns, "and?") == expected


def test_a_chat_is_what_the_template_makes_of_its_messages(folders: dict[str, Path]) -> None:
    model, conversation = begin(folders["chat"], system="be short")
    tokenizer = conversation.session.template.tokenizer
    for i, (question, _) in enumerate(PAIRS):
        before = [*messages(conversation), Message("user", question)]
        expected = generate_tokens(
            model,
            [built_in_template("llama3", tokenizer).prompt_tokens(before)],
            SamplingSettings(24, temperature=0, stop_tokens=tokenizer.stop_tokens),
        )[0]
        answer = say(model, conversation, question)
        assert answer == tokenizer.decode(expected, skip_special=True)
        assert messages(conversation)[-1] == Message("assistant", answer)
        assert len(conversation.turns) == i + 1


def test_the_trained_model_answers_also_in_characters_of_several_tokens(folders: dict[str, Path]) -> None:
    for question, answer in PAIRS:
        model, conversation = begin(folders["chat"])
        pieces = list(conversation.answer(model, question, GREEDY))
        assert "".join(pieces) == answer
        assert not any("�" in piece for piece in pieces)
        assert conversation.session.stats.ending == "model"


def test_a_base_model_continues_and_goes_on(folders: dict[str, Path]) -> None:
    model, conversation = begin(folders["llama"])
    tokenizer = conversation.session.template.tokenizer
    first = say(model, conversation, "the cat sat")
    second = say(model, conversation, "")
    once = generate_tokens(model, [tokenizer.encode("the cat sat")], SamplingSettings(48, 0))[0]
    assert first + second == tokenizer.decode(once)
    assert conversation.session.stats.computed == 1  # the token that was said last


def test_an_answer_may_be_stopped_anywhere_and_the_talk_goes_on(folders: dict[str, Path]) -> None:
    model, conversation = begin(folders["chat"])
    with closing(conversation.answer(model, "hello", GREEDY)) as pieces:
        said = next(pieces) + next(pieces) + next(pieces)
    assert conversation.session.stats.ending == "stopped"
    assert messages(conversation)[-1] == Message("assistant", said)
    tokenizer = conversation.session.template.tokenizer
    stopped = tokenizer.decode(conversation.session.template.prompt("", conversation.turns, "and?"))
    assert f"{said}<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nand?<|eot_id|>" in stopped
    _, fresh = begin(folders["chat"])
    fresh.turns = list(conversation.turns)
    assert say(model, conversation, "what is RoPE?") == say(model, fresh, "what is RoPE?")
    conversation.answer(model, "never begun", GREEDY).close()
    assert len(conversation.turns) == 2


def test_the_oldest_turns_are_left_out_when_the_context_is_full(folders: dict[str, Path]) -> None:
    model, conversation = begin(folders["chat"], system="be short", context=96)
    remarks, known = [], []
    for _ in range(6):
        for question, _ in PAIRS:
            say(model, conversation, question)
            remarks += conversation.remarks
            known.append(conversation.session.stats.cached)
            prompt = conversation.session.stats.cached + conversation.session.stats.computed
            assert prompt + len(conversation.session.stats.tokens) <= 97  # the last token needs no place
    assert "the context of 96 tokens is full; the oldest" in remarks[0]
    assert "turns are left out" in remarks[0]
    assert len(conversation.turns) == 30  # all are remembered, for saving
    template = built_in_template("llama3", conversation.session.template.tokenizer)
    system = len(template.encode(template.render([Message("system", "be short")])[0])[0])
    assert min(known[1:]) >= system - 3  # what precedes the turns is never computed again
    assert sum(count > system + 3 for count in known) > 10  # nor is every turn paid for by computing all anew


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_text_loses_its_beginning_and_never_ends_in_an_error(folders: dict[str, Path], kind: str) -> None:
    model, conversation = begin(folders[kind], context=64)
    remarks = []
    for text in ("the cat", "", "", "", ""):
        assert say(model, conversation, text, SamplingSettings(40, temperature=0))
        remarks += conversation.remarks
    assert any("tokens are left out" in remark for remark in remarks)
    long = say(model, conversation, "the dog was glad " * 40)
    assert long
    assert say(*begin(folders[kind], context=32), "cat", SamplingSettings(90, 0))


def test_an_answer_that_fills_the_context_ends_there(folders: dict[str, Path]) -> None:
    model, conversation = begin(folders["llama"], context=32)
    say(model, conversation, "the cat", SamplingSettings(90, temperature=0))
    assert conversation.session.stats.ending == "context"
    assert conversation.session.stats.computed + len(conversation.session.stats.tokens) == 33


def test_a_restored_conversation_is_what_the_next_answer_sees(folders: dict[str, Path]) -> None:
    model, conversation = begin(folders["chat"])
    say(model, conversation, "hello")
    said = list(conversation.turns)
    for kind, other in (
        ("chat", said),
        ("llama", [replace(said[0], tokens=(7, 10**9))]),  # tokens of another tokenizer
        ("llama", [replace(said[0], tokens=(7, 8))]),
    ):
        (model, conversation), (_, fresh) = begin(folders[kind]), begin(folders[kind])
        conversation.turns, fresh.turns = list(other), [replace(said[0], tokens=())]
        assert say(model, conversation, "what is GQA?", DRAWN) == say(model, fresh, "what is GQA?", DRAWN)


def test_what_the_template_is_follows_from_what_was_published(folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folders["chat"])
    end = tokenizer.special["<|eot_id|>"]
    assert load_prompt_template("auto", tokenizer, tmp_path, (end,)).name == "llama3"
    assert load_prompt_template("auto", tokenizer, tmp_path, ()).name == "text"  # a base model with the same tokenizer
    assert load_prompt_template("auto", tokenizer, tmp_path / "Llama3.2-1B-Instruct", ()).name == "llama3"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": JINJA}))
    assert load_prompt_template("auto", tokenizer, tmp_path, ()).name == "tokenizer"
    assert load_prompt_template("text", tokenizer, tmp_path, (end,)).name == "text"
    with pytest.raises(UserError, match="no llama3 chat"):
        load_prompt_template("llama3", load_tokenizer(folders["gpt2"]), tmp_path, ())


@pytest.mark.parametrize(
    ("kind", "system", "context", "text", "message"),
    [
        ("chat", "", 48, "the cat sat on the mat " * 9, "the context has room for 48; shorten the message"),
        ("chat", "", None, "  ", "the message is empty"),
        ("llama", "be short", None, "x", "a system message: this model only continues text"),
    ],
)
def test_what_cannot_be_is_refused(
    folders: dict[str, Path], kind: str, system: str, context: int | None, text: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        say(*begin(folders[kind], system, context), text)


def test_a_refused_message_changes_nothing(folders: dict[str, Path]) -> None:
    model, conversation = begin(folders["chat"], context=64)
    say(model, conversation, "hello")
    turns = list(conversation.turns)
    with pytest.raises(UserError, match="shorten the message"):
        say(model, conversation, "the cat sat on the mat " * 20)
    _, fresh = begin(folders["chat"], context=64)
    fresh.turns = list(conversation.turns)
    assert conversation.turns == turns
    assert say(model, conversation, "what is GQA?") == say(model, fresh, "what is GQA?")
