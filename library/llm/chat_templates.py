"""Whole conversations as tokens, in the template that a model was, or is to be, trained with.

    own       the Jinja template beside the tokenizer (``chat_template.jinja``, or in ``tokenizer_config.json``)
    llama3    <|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>...
    (library.llm.chat_templates) llama2    <s>[INST] <<SYS>>\nsystem\n<</SYS>>\n\nHello [/INST] Hi </s><s>[INST] ...
    chatml    <|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n
    plain     system\n\nUser: Hello\nAssistant: Hi<|endoftext|>User: ...             for base models without marks

Every template says of every token which message's answer it belongs to, the mark that ends the answer included: that
is what an assistant has to learn to say. In no template can the text of a message become a special token.

Sources: Llama 2: meta-llama/llama ``llama/generation.py``; ChatML: openai-python ``chatml.md`` as Qwen publishes it.

What a model goes on from in a conversation: turns in its template, or one text.

    instruct and tuned models    the template of ``library.llm.chat_templates`` that they were trained with
    base models                  first token, what was typed, what the model wrote, what was typed, ...

A base model knows no turns; it continues the text, so what is typed is simply the next piece of it. What a model said
is put into a prompt as the tokens it said, not encoded again: the same text can be other tokens, and keys and values
computed for the first ones would be of no use.

The built-in templates of ``library.llm.chat_templates`` in Jinja, as other programs read them beside a model.

transformers, vLLM and llama.cpp's converter take ``chat_template.jinja`` from a model's folder. The texts here give the
tokens that the template's class gives, for conversations that it takes.

Conversations as tokens, in the template of Llama 3's instruct models.

    <|begin_of_text|><|start_header_id|>user<|end_header_id|>

    What is RoPE?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

    ...

(https://www.llama.com/docs/model-cards-and-prompt-formats/meta-llama-3/). Only the template's own marks become special
tokens; a mark that stands in a message is encoded as text, so no message can end its turn.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from library.errors import UserError
from library.files import write_text
from library.llm.tokenizers import Tokenizer

NO_ANSWER = -1
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE = "26 Jul 2024"  # Llama 3.1's default; it writes today's if not told, and a run resumed tomorrow would be another
_BREAK = "\ue000"  # private use: put into special tokens' names in messages, and taken out again before encoding


class DialogueTemplate(ABC):
    """Turns messages into tokens.

    Attributes:
        name: as a user writes it.
        tokenizer: of the model.
    """

    name: str

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the token that ends an answer, if it is a special one."""
        last = self.tokens([Message("user", "?"), Message("assistant", "!")])
        said = [token for token, owner in zip(*last, strict=True) if owner != NO_ANSWER]
        return tuple(said[-1:]) if said[-1] in self.tokenizer.special.values() else ()

    @abstractmethod
    def tokens(self, messages: Sequence[Message], answer_next: bool = False) -> tuple[list[int], list[int]]:
        """Return the tokens of ``messages``, and for each the index of the assistant's message that it ends or says.

        That index is ``NO_ANSWER`` for what the assistant did not say. With ``answer_next`` the tokens end where the
        assistant's next answer begins.

        Raises:
            UserError: the template has no place for a message: its role, or the order.
        """


class Llama3Template(DialogueTemplate):
    """Headers and <|eot_id|>."""

    name = "llama3"

    def tokens(self, messages: Sequence[Message], answer_next: bool = False) -> tuple[list[int], list[int]]:
        """Return tokens and answers; see :class:`DialogueTemplate`."""
        tokens, answers = chat_tokens(self.tokenizer, [], answer_next=False)
        owners = [NO_ANSWER] * len(answers)
        for index, message in enumerate(messages):
            role = "ipython" if message.role == "tool" else message.role
            new, said = chat_tokens(self.tokenizer, [Message(role, message.content)], answer_next=False)
            tokens += new[1:]  # the first token belongs to the beginning
            owners += [index if answer else NO_ANSWER for answer in said[1:]]
        if answer_next:
            header = chat_tokens(self.tokenizer, [])[0][1:]
            tokens, owners = tokens + header, owners + [NO_ANSWER] * len(header)
        return tokens, owners


class Llama2Template(DialogueTemplate):
    """[INST] and [/INST], which are plain text; a question and its answer are encoded together."""

    name = "llama2"

    def tokens(self, messages: Sequence[Message], answer_next: bool = False) -> tuple[list[int], list[int]]:
        """Return tokens and answers; see :class:`DialogueTemplate`."""
        system, turns = _alternating(messages, self.name, answer_next)
        begin, end = self.tokenizer.bos, self.tokenizer.eos
        if begin is None or end is None:
            raise UserError("chat_template: llama2 needs <s> and </s>, which this tokenizer lacks; choose another")
        tokens: list[int] = []
        owners: list[int] = []
        for number, (question, answer, owner) in enumerate(turns):
            asked = question.strip()
            if system and number == 0:
                asked = f"<<SYS>>\n{system.strip()}\n<</SYS>>\n\n{asked}"
            asked = f"[INST] {asked} [/INST]"
            before = self.tokenizer.encode(asked)
            if answer is None:
                both, said = before, []
            else:
                both = self.tokenizer.encode(f"{asked} {answer.strip()} ")
                asked_tokens = _common(before, both)
                both, said = both[:asked_tokens], [*both[asked_tokens:], end]
            tokens += [begin, *both, *said]
            owners += [NO_ANSWER] * (1 + len(both)) + [owner] * len(said)
        return tokens, owners


class ChatMLTemplate(DialogueTemplate):
    """<|im_start|> and <|im_end|>."""

    name = "chatml"

    def tokens(self, messages: Sequence[Message], answer_next: bool = False) -> tuple[list[int], list[int]]:
        """Return tokens and answers; see :class:`DialogueTemplate`."""
        special, encode = self.tokenizer.special, self.tokenizer.encode
        if missing := [mark for mark in ("<|im_start|>", "<|im_end|>") if mark not in special]:
            raise UserError(f"chat_template: the tokenizer has no {missing[0]}, so no ChatML; choose another")
        start, end = special["<|im_start|>"], special["<|im_end|>"]
        tokens: list[int] = []
        owners: list[int] = []
        for index, message in enumerate(messages):
            header, newline = [start, *encode(f"{message.role}\n")], encode("\n")
            said = [*encode(message.content), end]
            owner = index if message.role == "assistant" else NO_ANSWER
            tokens += header + said + newline
            owners += [NO_ANSWER] * len(header) + [owner] * len(said) + [NO_ANSWER] * len(newline)
        if answer_next:
            header = [start, *encode("assistant\n")]
            tokens, owners = tokens + header, owners + [NO_ANSWER] * len(header)
        return tokens, owners


class PlainTemplate(DialogueTemplate):
    """Words instead of marks; the token that ends a text ends an answer."""

    name = "plain"

    def tokens(self, messages: Sequence[Message], answer_next: bool = False) -> tuple[list[int], list[int]]:
        """Return tokens and answers; see :class:`DialogueTemplate`."""
        system, turns = _alternating(messages, self.name, answer_next)
        begin, end = self.tokenizer.bos, self.tokenizer.eos
        if end is None:
            raise UserError("chat_template: this tokenizer has no token that ends a text, so no answer could end")
        tokens = [] if begin is None or begin == end else [begin]
        owners = [NO_ANSWER] * len(tokens)
        for number, (question, answer, owner) in enumerate(turns):
            opening = f"{system.strip()}\n\n" if system and number == 0 else ""
            asked = self.tokenizer.encode(f"{opening}User: {question.strip()}\nAssistant:")
            said = [] if answer is None else [*self.tokenizer.encode(f" {answer.strip()}"), end]
            tokens += asked + said
            owners += [NO_ANSWER] * len(asked) + [owner] * len(said)
        return tokens, owners


class OwnTemplate(DialogueTemplate):
    """A Jinja template, rendered by transformers; answers are found by rendering the conversation up to each of them.

    Where the template marks its answers (``{% generation %}``), its marks are taken.
    """

    name = "own"

    def __init__(self, tokenizer: Tokenizer, source: str, names: dict[str, str]) -> None:
        """Take the template's text, and the special tokens that it may name (``bos_token``)."""
        super().__init__(tokenizer)
        self._source, self._names = source, names

    def tokens(self, messages: Sequence[Message], answer_next: bool = False) -> tuple[list[int], list[int]]:
        """Return tokens and answers; see :class:`DialogueTemplate`."""
        safe = [Message(message.role, self._broken(message.content)) for message in messages]
        text, spans = self._render(safe, answer_next)
        spoken = [index for index, message in enumerate(messages) if message.role == "assistant"]
        if len(spans) != len(spoken):
            spans = [self._span(safe, index, text) for index in spoken]
        tokens = self._encode(text)
        owners = [NO_ANSWER] * len(tokens)
        for index, (start, stop) in zip(spoken, spans, strict=True):
            first, last = _common(self._encode(text[:start]), tokens), _common(self._encode(text[:stop]), tokens)
            owners[first:last] = [index] * (last - first)
        return tokens, owners

    def _render(self, messages: Sequence[Message], answer_next: bool) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and where the template says that answers are."""
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        marked = _MARKED.search(self._source) is not None
        try:
            texts, spans = render_jinja_template(
                [[message._asdict() for message in messages]],
                chat_template=self._source,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=answer_next,
                date_string=_DATE,
                **self._names,
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"the tokenizer's chat template refuses the conversation ({error}); change it or set chat_template"
            ) from None
        return texts[0], list(spans[0]) if marked else []

    def _span(self, messages: Sequence[Message], index: int, text: str) -> tuple[int, int]:
        """Return where in ``text`` the answer ``index`` begins and ends, its closing mark included."""
        before = self._render(messages[:index], answer_next=True)[0]
        after = self._render(messages[: index + 1], answer_next=False)[0]
        if not (text.startswith(before) and text.startswith(after)):
            raise UserError(
                "the tokenizer's chat template writes earlier turns differently once others follow, so answers cannot "
                "be told apart in it; set chat_template to llama3, llama2, chatml or plain"
            )
        said = after[len(before) :].rstrip()
        ended = any(said.endswith(name) for name in self.tokenizer.special)
        return len(before), len(before) + len(said) if ended else len(after)

    def _broken(self, text: str) -> str:
        """Return ``text`` with the names of special tokens cut in two."""
        for name in self.tokenizer.special:
            text = text.replace(name, f"{name[:1]}{_BREAK}{name[1:]}")
        return text

    def _encode(self, text: str) -> list[int]:
        return [token for part in text.split(_BREAK) for token in self.tokenizer.encode(part, special=True)]


_BUILT_IN = {template.name: template for template in (Llama3Template, Llama2Template, ChatMLTemplate, PlainTemplate)}
TEMPLATES = ("auto", OwnTemplate.name, *_BUILT_IN)


def dialogue_template(name: str, tokenizer: Tokenizer, folder: str | Path) -> DialogueTemplate:
    """Return the template called ``name`` for the tokenizer that was read from ``folder``.

    "auto" is the tokenizer's own where there is one; else the one whose marks it has; else Llama 2's for a vocabulary
    with <s> and </s>, and plain.

    Raises:
        UserError: "own" where there is none, or the tokenizer lacks the template's marks.
    """
    own = _own(tokenizer, Path(folder).expanduser()) if name in ("auto", "own") else None
    if own is not None:
        return own
    if name == "own":
        raise UserError(f"chat_template: {folder} has no template of its own; choose {', '.join(_BUILT_IN)}")
    if name == "auto":
        name = _fitting(tokenizer)
    template = _BUILT_IN[name](tokenizer)
    template.tokens([Message("user", "?"), Message("assistant", "!")])  # names a mark that is missing
    return template


def _fitting(tokenizer: Tokenizer) -> str:
    if all(mark in tokenizer.special for mark in CHAT_MARKS):
        return "llama3"
    if "<|im_start|>" in tokenizer.special:
        return "chatml"
    return "llama2" if {"<s>", "</s>"} <= tokenizer.special.keys() else "plain"


def _own(tokenizer: Tokenizer, folder: Path) -> OwnTemplate | None:
    folder = folder if folder.is_dir() else folder.parent
    config = folder / "tokenizer_config.json"
    values: dict[str, Any] = {}
    if config.is_file():
        try:
            values = json.loads(config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{config}: not valid JSON ({error}); download it again") from None
    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else values.get("chat_template")
    if isinstance(source, list):  # several by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not source:
        return None
    names = {key: value for key, value in values.items() if key.endswith("_token") and value}
    texts = {key: value["content"] if isinstance(value, dict) else value for key, value in names.items()}
    return OwnTemplate(tokenizer, source, {key: text for key, text in texts.items() if isinstance(text, str)})


def _alternating(
    messages: Sequence[Message], name: str, answer_next: bool
) -> tuple[str, list[tuple[str, str | None, int]]]:
    """Return the system message and (question, answer, the answer's index); the last answer may be None.

    Raises:
        UserError: messages of user and assistant do not alternate, or there are others.
    """
    system = messages[0].content if messages and messages[0].role == "system" else ""
    turns: list[tuple[str, str | None, int]] = []
    rest = list(enumerate(messages))[1 if messages and messages[0].role == "system" else 0 :]
    for place, (index, message) in enumerate(rest):
        if message.role != ("user", "assistant")[place % 2]:
            raise UserError(
                f"chat_template: {name} takes user and assistant in turn after one system message, message "
                f"{index + 1} is {message.role}'s; correct the conversation or choose another template"
            )
        if message.role == "user":
            turns.append((message.content, None, NO_ANSWER))
        else:
            turns[-1] = (turns[-1][0], message.content, index)
    if not answer_next and turns and turns[-1][1] is None:
        turns.pop()  # a question that is not answered teaches nothing
    return system, turns


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    for place, (one, other) in enumerate(zip(first, second)):
        if one != other:
            return place
    return min(len(first), len(second))


TEMPLATE_NAMES = ("auto", "text", *(name for name in TEMPLATES if name != "auto"))


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    Attributes:
        question, answer: as text.
        said: the answer as generated; none if another model said it.
        ended: the model itself ended its answer, by the last token of ``said``.
    """

    question: str
    answer: str
    said: tuple[int, ...]
    ended: bool


class ChatTemplate(ABC):
    """Makes prompts, with one tokenizer.

    Attributes:
        name: as a user writes it.
        has_turns: whether there are messages (else one text that is continued).
        tokenizer: the model's.
        ends: tokens that end an answer, besides those that end a text.
    """

    name: str
    has_turns: bool
    tokenizer: Tokenizer
    ends: tuple[int, ...] = ()

    @abstractmethod
    def prompt(self, system: str, turns: Sequence[Turn], text: str) -> list[int]:
        """Return the tokens of turns, and of what is said now, up to where the model goes on.

        Raises:
            UserError: the template has no place for it.
        """


class TurnTemplate(ChatTemplate):
    """Messages of user and assistant."""

    has_turns = True

    def __init__(self, dialogue: DialogueTemplate) -> None:
        self.name, self.tokenizer, self.ends = dialogue.name, dialogue.tokenizer, tuple(dialogue.ends)
        self._dialogue = dialogue

    def prompt(self, system: str, turns: Sequence[Turn], text: str) -> list[int]:
        """Return the prompt; an answer that was stopped or cut off ends as the template ends answers."""
        if not text.strip():
            raise UserError("the message is empty; write something")
        messages = [Message("system", system)] if system else []
        first = len(messages)
        for turn in turns:
            messages += [Message("user", turn.question), Message("assistant", turn.answer)]
        tokens, owners = self._dialogue.tokens([*messages, Message("user", text)], answer_next=True)
        prompt: list[int] = []
        for owner, run in groupby(zip(owners, tokens, strict=True), key=lambda pair: pair[0]):
            encoded = [token for _, token in run]
            answered = None if owner == NO_ANSWER else turns[(owner - first) // 2]
            prompt += self._said(answered, encoded) if answered is not None and answered.said else encoded
        return prompt

    def _said(self, turn: Turn, encoded: list[int]) -> list[int]:
        """Return the tokens of an answer, with the mark by which the template ends it in ``encoded``."""
        marks = encoded[-1:] if encoded[-1] in self.tokenizer.special.values() else []
        return [*turn.said[:-1], *(marks or turn.said[-1:])] if turn.ended else [*turn.said, *marks]


class TextTemplate(ChatTemplate):
    """One text, which the model continues."""

    name = "text"
    has_turns = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

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
            tokens += turn.said or self.tokenizer.encode(turn.answer)
            open_end = not turn.ended
        return tokens + self._typed(text, open_end)

    def _typed(self, text: str, after_text: bool) -> list[int]:
        return self.tokenizer.encode(f"\n{text}" if text and after_text else text)


def find_chat_template(name: str, tokenizer: Tokenizer, folder: Path, ends: Sequence[int]) -> ChatTemplate:
    """Return the template called ``name``; "auto" looks at what was published with the model.

    Base models share the tokenizer, marks included, with the instruct models made from them. What tells an instruct
    model: there is a template beside its tokenizer, its configuration ends texts where turns end, or (Meta's own files
    say nothing) its folder's name. Other models are taken for base models.

    Args:
        name: one of ``TEMPLATE_NAMES``; "text" continues what is typed.
        tokenizer: the model's.
        folder: the model's.
        ends: the configuration's tokens that end a text.

    Raises:
        UserError: as ``dialogue_template``.
    """
    if name == "text":
        return TextTemplate(tokenizer)
    turn_ends = {tokenizer.special.get(mark) for mark in ("<|eot_id|>", "<|im_end|>")}
    named = any(word in folder.name.lower() for word in ("instruct", "chat"))
    if name != "auto" or named or turn_ends.intersection(ends) or _has_own_template(folder):
        return TurnTemplate(dialogue_template(name, tokenizer, folder))
    return TextTemplate(tokenizer)


def _has_own_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(json.loads(config.read_text(encoding="utf-8")).get("chat_template"))


FILE = "chat_template.jinja"

_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'ipython' if message['role'] == 'tool' else message['role'] %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

_CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

_SYSTEM_FIRST = """\
{%- set system = messages[0]['content'] | trim if messages[0]['role'] == 'system' else '' %}
{%- for message in (messages[1:] if messages[0]['role'] == 'system' else messages) %}
    {%- if message['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') %}
        {{- raise_exception('user and assistant speak in turn, after one system message') }}
    {%- endif %}
"""

_LLAMA2 = (
    _SYSTEM_FIRST
    + """\
    {%- if message['role'] == 'user' %}
        {%- set opening = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' if system and loop.first else '' %}
        {{- bos_token + '[INST] ' + opening + message['content'] | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""
)

_PLAIN = (
    "{{- '' if bos_token is not defined or bos_token == eos_token else bos_token }}\n"
    + _SYSTEM_FIRST
    + """\
    {%- if message['role'] == 'user' %}
        {%- set opening = system + '\\n\\n' if system and loop.first else '' %}
        {{- opening + 'User: ' + message['content'] | trim + '\\nAssistant:' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""
)

SOURCES = {"llama3": _LLAMA3, "llama2": _LLAMA2, "chatml": _CHATML, "plain": _PLAIN}


def write_jinja_template(name: str, folder: Path) -> Path:
    """Write the built-in template called ``name`` into a model's folder, in place of one that is there; return it."""
    path = folder / FILE
    write_text(path, SOURCES[name])
    return path


CHAT_MARKS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_ROLES = ("system", "user", "assistant", "ipython")


class Message(NamedTuple):
    """What one side says."""

    role: str
    content: str


def chat_tokens(
    tokenizer: Tokenizer, messages: Sequence[Message], answer_next: bool = True
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and for each whether the assistant said it (its closing mark included).

    Args:
        tokenizer: with Llama 3's marks among its special tokens.
        messages: in order; blanks at their ends are cut, as the published template does.
        answer_next: end with the header under which the assistant answers.

    Raises:
        UserError: the tokenizer lacks a mark, or a role is unknown.
    """
    if missing := [mark for mark in CHAT_MARKS if mark not in tokenizer.special]:
        raise UserError(f"the tokenizer has no {missing[0]}, so no Llama 3 chat; use an instruct model's or add it")
    begin, open_header, close_header, end = (tokenizer.special[mark] for mark in CHAT_MARKS)
    tokens, answers = [begin], [False]
    for message in messages:
        if message.role not in _ROLES:
            raise UserError(f"role {message.role!r} is none of {', '.join(_ROLES)}; correct it")
        header = [open_header, *tokenizer.encode(message.role), close_header, *tokenizer.encode("\n\n")]
        said = [*tokenizer.encode(message.content.strip()), end]
        tokens += header + said
        answers += [False] * len(header) + [message.role == "assistant"] * len(said)
    if answer_next:
        header = [open_header, *tokenizer.encode("assistant"), close_header, *tokenizer.encode("\n\n")]
        tokens, answers = tokens + header, answers + [False] * len(header)
    return tokens, answers
