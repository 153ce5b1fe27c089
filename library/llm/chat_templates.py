"""How a conversation becomes the tokens that a model goes on from: in turns, or as one text.

    Llama 3's instruct models    <|begin_of_text|> [system] (user's message, header of the answer, answer, <|eot_id|>)*
    base models                  first token, what was typed, what the model wrote, what was typed, ...

A base model knows no turns; it continues the text, so what is typed is simply the next piece of it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from library.errors import UserError
from library.llm.chat import CHAT_MARKS, Message, chat_tokens
from library.llm.tokenizers import Tokenizer

TemplateName = Literal["auto", "llama3", "plain"]
TEMPLATE_NAMES: tuple[TemplateName, ...] = ("auto", "llama3", "plain")


class Template(ABC):
    """Tokens of a conversation's parts, with one tokenizer.

    Attributes:
        name: as a user writes it.
        has_turns: whether there are messages (else one text that is continued).
    """

    name: TemplateName
    has_turns: bool

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @abstractmethod
    def begin(self, system: str) -> list[int]:
        """Return what everything begins with."""

    @abstractmethod
    def ask(self, text: str, follows_text: bool) -> list[int]:
        """Return the tokens of what was typed, up to where the model goes on.

        Args:
            text: what was typed.
            follows_text: an answer comes before it that has not ended by itself.
        """

    @abstractmethod
    def close(self, answer: Sequence[int], stop_tokens: Sequence[int]) -> list[int]:
        """Return the tokens of an answer as they stay in the conversation, however it ended."""


class Llama3Template(Template):
    """Turns, as Llama 3's instruct models were trained on."""

    name: TemplateName = "llama3"
    has_turns = True

    def begin(self, system: str) -> list[int]:
        """Return the first token and the system message, if there is one."""
        return chat_tokens(self.tokenizer, [Message("system", system)] if system else [], answer_next=False)[0]

    def ask(self, text: str, follows_text: bool) -> list[int]:
        """Return the user's message and the header of the answer."""
        if not text.strip():
            raise UserError("the message is empty; write something")
        return chat_tokens(self.tokenizer, [Message("user", text)])[0][1:]  # the first token belongs to the beginning

    def close(self, answer: Sequence[int], stop_tokens: Sequence[int]) -> list[int]:
        """Return the answer with the mark that ends a turn, also when it was stopped or cut off."""
        said = answer[:-1] if answer and answer[-1] in stop_tokens else answer
        return [*said, self.tokenizer.special["<|eot_id|>"]]


class PlainTemplate(Template):
    """One text, which the model continues."""

    name: TemplateName = "plain"
    has_turns = False

    def begin(self, system: str) -> list[int]:
        """Return the token that begins a text, where there is one."""
        if system:
            raise UserError(
                "a system message: this model only continues text; remove it, or choose template llama3"
            )
        return [] if self.tokenizer.bos is None else [self.tokenizer.bos]

    def ask(self, text: str, follows_text: bool) -> list[int]:
        """Return what was typed, on a new line if there is text before; nothing typed means: go on."""
        return self.tokenizer.encode(f"\n{text}" if text and follows_text else text)

    def close(self, answer: Sequence[int], stop_tokens: Sequence[int]) -> list[int]:
        """Return the answer as it is."""
        return list(answer)


def find_template(name: TemplateName, tokenizer: Tokenizer, folder: Path, ends: Sequence[int]) -> Template:
    """Return the template called ``name``; "auto" looks at what was published with the model.

    Base models share the tokenizer, marks included, with the instruct models made from them. What tells an instruct
    model: its configuration ends texts at the end of a turn, there is a template beside its tokenizer, or (Meta's own
    files say nothing) its folder's name.

    Args:
        name: "auto", "llama3" or "plain".
        tokenizer: the model's.
        folder: the model's.
        ends: the configuration's tokens that end a text.

    Raises:
        UserError: "llama3" with a tokenizer that lacks its marks.
    """
    if name == "plain":
        return PlainTemplate(tokenizer)
    if name == "llama3":
        chat_tokens(tokenizer, [])  # names the mark that is missing
        return Llama3Template(tokenizer)
    if any(mark not in tokenizer.special for mark in CHAT_MARKS):
        return PlainTemplate(tokenizer)
    published = tokenizer.special["<|eot_id|>"] in ends or _has_published_template(folder)
    return (Llama3Template if published or "instruct" in folder.name.lower() else PlainTemplate)(tokenizer)


def _has_published_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(json.loads(config.read_text(encoding="utf-8")).get("chat_template"))
