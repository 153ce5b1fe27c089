"""Chat templates: messages to tokens, as a model was, or is to be, trained with.

    tokenizer the Jinja template beside the tokenizer (``chat_template.jinja``, or in ``tokenizer_config.json``), or in
              the GGUF file
    llama3    <|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>...
    llama2    <s>[INST] <<SYS>>\nsystem\n<</SYS>>\n\nHello [/INST] Hi </s><s>[INST] ...
    chatml    <|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n
    plain     system\n\nUser: Hello\nAssistant: Hi<|endoftext|>User: ...             for base models without marks
    text      no messages at all: a base model continues what was typed, and what it wrote itself

A :class:`PromptTemplate` makes the prompt that a model goes on from. One with messages is a :class:`ChatTemplate`;
training uses it too: it tells of every token which message of the assistant it belongs to (the mark that ends the
answer included), which is what an assistant has to learn to say. Only a template's own marks become special tokens.
Some templates end a turn by ordinary text (``[/INST]``, ``\nAssistant:``, ``### Response:``): a message that holds it
is refused, as Meta's own code does with Llama 2's. So in no template can the text of a message end its turn.

In a prompt, earlier answers are the tokens that the model said, not their text encoded again: the same text can be
other tokens, and keys and values computed for the first ones would be of no use.

All but ``text`` are Jinja, which transformers, vLLM and llama.cpp's converter read from a model's folder too: the
built-in ones, in ``templates/`` beside this module, can be written there (:func:`write_jinja_template`).

Sources: Llama 3: https://www.llama.com/docs/model-cards-and-prompt-formats/meta-llama-3/; Llama 2: meta-llama/llama
``llama/generation.py``; ChatML: openai-python ``chatml.md`` as Qwen publishes it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from library.errors import UserError
from library.files import read_json, read_text, write_text
from library.gguf_header import gguf_file
from library.llm.tokenizer_files import read_gguf_template
from library.llm.tokenizers import Tokenizer

NO_ANSWER = -1
JINJA_FILE = "chat_template.jinja"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE = "26 Jul 2024"  # Llama 3.1's default; it writes today's if not told, and a run resumed tomorrow would be another
_BREAK = "\ue000"  # private use: put into special tokens' names in messages, and taken out again before encoding


class Message(NamedTuple):
    """What one side says; roles are system, user, assistant and tool."""

    role: str
    content: str


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    Attributes:
        question, answer: as text.
        tokens: the answer as generated; empty if another model generated it.
        ended: the model itself ended its answer, by the last one of ``tokens``.
    """

    question: str
    answer: str
    tokens: tuple[int, ...]
    ended: bool


class PromptTemplate(ABC):
    """Makes prompts, with one tokenizer.

    Attributes:
        name: as a user writes it.
        has_turns: whether there are messages (else one text that is continued).
    """

    name: str
    has_turns: bool

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end an answer, besides those that end a text."""
        return ()

    @abstractmethod
    def prompt(self, system: str, turns: Sequence[Turn], text: str) -> list[int]:
        """Return the tokens of turns, and of what is said now, up to where the model goes on."""


class TextTemplate(PromptTemplate):
    """One text, which the model continues."""

    name = "text"
    has_turns = False

    @property
    def beginning(self) -> list[int]:
        """Return the token that begins a text, where there is one."""
        return [] if self.tokenizer.bos is None else [self.tokenizer.bos]

    def prompt(self, system: str, turns: Sequence[Turn], text: str) -> list[int]:
        """Return the prompt; what is typed begins a new line if there is text before. Nothing typed means: go on."""
        if system:
            raise UserError("a system message: this model only continues text; remove it, or choose another template")
        tokens, open_end = self.beginning, False
        for turn in turns:
            tokens += self._typed(turn.question, open_end)
            tokens += turn.tokens or self.tokenizer.encode(turn.answer)
            open_end = not turn.ended
        return tokens + self._typed(text, open_end)

    def _typed(self, text: str, after_text: bool) -> list[int]:
        return self.tokenizer.encode(f"\n{text}" if text and after_text else text)


class ChatTemplate(PromptTemplate):
    """A Jinja template, rendered by transformers.

    Answers are where the template marks them (``{% generation %}``), else found by rendering the chat up to each.
    """

    has_turns = True

    def __init__(self, name: str, tokenizer: Tokenizer, source: str, names: dict[str, str]) -> None:
        """Take the template's text, and the special tokens that it may name (``bos_token``)."""
        super().__init__(tokenizer)
        self.name, self.source, self.names = name, source, names

    def tokens(self, messages: Sequence[Message], answer_next: bool = False) -> tuple[list[int], list[int]]:
        """Return the tokens of ``messages``, and for each the index of the assistant's message that it ends or says.

        That index is ``NO_ANSWER`` for what the assistant did not say. With ``answer_next`` the tokens end where the
        assistant's next answer begins. A role or an order that the template has no place for is a ``UserError``.
        """
        if self.name in ("llama2", "plain") and not answer_next and messages[-1].role == "user":
            messages = messages[:-1]  # it would end in the words that call for an answer, and then none
        for number, (role, content) in enumerate(messages, 1):
            mark = self._text_marks.get(role)
            if mark and mark in content and not (answer_next and role == "assistant"):  # a model may say what it likes
                raise UserError(
                    f"message {number} ({role}): holds {mark!r}, by which the chat template {self.name} ends such "
                    "messages; write it otherwise, or choose a template whose marks are special tokens"
                )
        safe = [Message(message.role, self._broken(message.content)) for message in messages]
        text, spans = self._render(safe, answer_next)
        spoken = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if len(spans) != len(spoken):
            spans = [self._span(safe, index, text) for index in spoken]
        tokens, places = self._encode(text, [place for span in spans for place in span])
        owners = [NO_ANSWER] * len(tokens)
        for index, first, last in zip(spoken, places[::2], places[1::2], strict=True):
            owners[first:last] = [index] * (last - first)
        return tokens, owners

    @property
    def ends(self) -> tuple[int, ...]:
        """The token that ends an answer, if it is a special one."""
        example = self.tokens([Message("user", "?"), Message("assistant", "!")])
        answer = [token for token, owner in zip(*example, strict=True) if owner != NO_ANSWER]
        return tuple(answer[-1:]) if answer[-1] in self.tokenizer.special.values() else ()

    def prompt(self, system: str, turns: Sequence[Turn], text: str) -> list[int]:
        """Return the prompt; an answer that was stopped or cut off ends as the template ends answers."""
        if not text.strip():
            raise UserError("the message is empty; write something")
        messages = [Message("system", system)] if system else []
        first = len(messages)
        for turn in turns:
            messages += [Message("user", turn.question), Message("assistant", turn.answer)]
        tokens, owners = self.tokens([*messages, Message("user", text)], answer_next=True)
        prompt: list[int] = []
        for owner, run in groupby(zip(owners, tokens, strict=True), key=lambda pair: pair[0]):
            encoded = [token for _, token in run]
            answered = None if owner == NO_ANSWER else turns[(owner - first) // 2]
            prompt += self._answer_tokens(answered, encoded) if answered is not None and answered.tokens else encoded
        return prompt

    def _answer_tokens(self, turn: Turn, encoded: list[int]) -> list[int]:
        """Return the tokens of an answer, with the mark by which the template ends it in ``encoded``."""
        marks = encoded[-1:] if encoded[-1] in self.tokenizer.special.values() else []
        return [*turn.tokens[:-1], *(marks or turn.tokens[-1:])] if turn.ended else [*turn.tokens, *marks]

    @cached_property
    def _text_marks(self) -> dict[str, str]:
        """The ordinary text that ends messages of a role, by role; those that end with a special token have none."""
        for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user")):
            messages = [Message(role, f"{_BREAK}{number}{_BREAK}") for number, role in enumerate(roles)]
            try:
                text = self._render(messages, answer_next=False)[0]
            except UserError:  # without a system message, then
                continue
            marks = {}
            for one, other in pairwise(messages):
                between = text.partition(one.content)[2].partition(other.content)[0]
                if between.strip() and not any(name in between for name in self.tokenizer.special):
                    marks[one.role] = between.strip(" ")
            return marks
        return {}

    def _render(self, messages: Sequence[Message], answer_next: bool) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and where the template says that answers are."""
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        marked = _GENERATION.search(self.source) is not None
        try:
            texts, spans = render_jinja_template(
                [[message._asdict() for message in messages]],
                chat_template=self.source,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=answer_next,
                date_string=_DATE,
                **self.names,
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"chat_template: {self.name} refuses the conversation ({error}); correct it or choose another template"
            ) from None
        return texts[0], list(spans[0]) if marked else []

    def _span(self, messages: Sequence[Message], index: int, text: str) -> tuple[int, int]:
        """Return where in ``text`` the answer ``index`` begins and ends, its closing mark included."""
        before = self._render(messages[:index], answer_next=True)[0]
        after = self._render(messages[: index + 1], answer_next=False)[0]
        if not (text.startswith(before) and text.startswith(after)):
            raise UserError(
                "the tokenizer's chat template writes earlier turns differently once others follow, so answers cannot "
                f"be told apart in it; set chat_template to one of {', '.join(BUILT_IN)}"
            )
        answer = after[len(before) :].rstrip()
        ended = any(answer.endswith(name) for name in self.tokenizer.special)
        return len(before), len(before) + len(answer) if ended else len(after)

    def _broken(self, text: str) -> str:
        """Return ``text`` with the names of special tokens cut in two."""
        for name in self.tokenizer.special:
            text = text.replace(name, f"{name[:1]}{_BREAK}{name[1:]}")
        return text

    def _encode(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the tokens of ``text``, and how many of them come before each of ``cuts``, characters in order.

        Special tokens divide the text, so only the part that a cut falls into is encoded a second time, up to there.
        Tokenizers that strip blanks beside special tokens, or treat a text's first word alone as one, have one part.
        """
        special, encode = self.tokenizer.special, self.tokenizer.encode
        parts = [part for part in re.split(f"({'|'.join(map(re.escape, special)) or '$^'})", text) if part]
        encoded = [encode(part.replace(_BREAK, ""), special=part in special) for part in parts]
        tokens = [*chain.from_iterable(encoded)]
        divided = _BREAK in text or tokens == (together := encode(text, special=True))
        if not divided:
            parts, encoded, tokens = [text], [together], together
        counts, part, begin, count = [], 0, 0, 0
        for cut in cuts:
            while part < len(parts) and begin + len(parts[part]) <= cut:
                part, begin, count = part + 1, begin + len(parts[part]), count + len(encoded[part])
            before = parts[part][: cut - begin].replace(_BREAK, "") if begin < cut else ""
            counts.append(count + (common(encode(before, special=not divided), encoded[part]) if before else 0))
        return tokens, counts


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    for place, (one, other) in enumerate(zip(first, second)):
        if one != other:
            return place
    return min(len(first), len(second))


# The templates beside this module, and the special tokens that each cannot do without.
BUILT_IN = {
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "llama2": ("bos_token", "eos_token"),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "plain": ("eos_token",),
}
CHAT_TEMPLATES = ("auto", "tokenizer", *BUILT_IN)


def built_in_template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Return the built-in template called ``name``; raises a UserError where the tokenizer lacks a token of it."""
    spelled = {number: token for token, number in tokenizer.special.items()}
    ends = {"bos_token": tokenizer.bos, "eos_token": tokenizer.eos}
    names = {key: spelled[number] for key, number in ends.items() if number is not None}
    if missing := [token for token in BUILT_IN[name] if token not in (*names, *tokenizer.special)]:
        raise UserError(
            f"chat_template: the tokenizer has no {missing[0]}, so no {name} chat; choose another template, or the "
            "tokenizer of an instruct model"
        )
    return ChatTemplate(name, tokenizer, _source(name), names)


def _source(name: str) -> str:
    return Path(__file__).with_name("templates").joinpath(f"{name}.jinja").read_text(encoding="utf-8")


def load_chat_template(name: str, tokenizer: Tokenizer, folder: str | Path) -> ChatTemplate:
    """Return the template called ``name`` for the tokenizer that was read from ``folder``.

    "auto" is the tokenizer's own where there is one; else the one whose marks it has; else Llama 2's for a vocabulary
    with <s> and </s>, and plain.
    """
    source, names = jinja_source(Path(folder).expanduser()) if name in ("auto", "tokenizer") else (None, {})
    if source:
        return ChatTemplate("tokenizer", tokenizer, source, names)
    if name == "tokenizer":
        raise UserError(f"chat_template: {folder} has no template of its own; choose {', '.join(BUILT_IN)}")
    if name == "auto":
        name = _fitting(tokenizer)
    return built_in_template(name, tokenizer)


def load_prompt_template(name: str, tokenizer: Tokenizer, folder: Path, ends: Sequence[int]) -> PromptTemplate:
    """Return the template called ``name``; "auto" looks at what was published with the model.

    Base models share the tokenizer, marks included, with the instruct models made from them. What tells an instruct
    model: there is a template beside its tokenizer, its configuration ends texts where turns end, or (Meta's own files
    say nothing) its folder's name. Other models are taken for base models.

    Args:
        name: one of ``CHAT_TEMPLATES``, or "text", which continues what is typed.
        tokenizer: the model's.
        folder: the model's.
        ends: the configuration's tokens that end a text.
    """
    turn_ends = {tokenizer.special.get(mark) for mark in ("<|eot_id|>", "<|im_end|>")}
    instruct = any(word in folder.name.lower() for word in ("instruct", "chat")) or turn_ends.intersection(ends)
    if name == "text" or (name == "auto" and not instruct and not jinja_source(folder)[0]):
        return TextTemplate(tokenizer)
    return load_chat_template(name, tokenizer, folder)


def _fitting(tokenizer: Tokenizer) -> str:
    if all(mark in tokenizer.special for mark in BUILT_IN["llama3"]):
        return "llama3"
    if "<|im_start|>" in tokenizer.special:
        return "chatml"
    return "llama2" if {"<s>", "</s>"} <= tokenizer.special.keys() else "plain"


def jinja_source(folder: Path) -> tuple[str | None, dict[str, str]]:
    """Return the template beside a tokenizer, if any, and the special tokens that it may name (``bos_token``)."""
    if (gguf := gguf_file(folder)) is not None and not (gguf.parent / JINJA_FILE).is_file():
        return read_gguf_template(gguf)
    folder = folder if folder.is_dir() else folder.parent
    config, file = folder / "tokenizer_config.json", folder / JINJA_FILE
    values: dict[str, Any] = {}
    if config.is_file():
        values = read_json(config)
    source = read_text(file) if file.is_file() else values.get("chat_template")
    if isinstance(source, list):  # several by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    named = {key: value for key, value in values.items() if key.endswith("_token") and value}
    texts = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
    return source, {key: text for key, text in texts.items() if isinstance(text, str)}


def write_jinja_template(name: str, folder: Path) -> Path:
    """Write the built-in template called ``name`` into a model's folder, in place of one that is there; return it."""
    path = folder / JINJA_FILE
    write_text(path, _source(name))
    return path
