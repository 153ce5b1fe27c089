"""What a model goes on from in a conversation: turns in its template, or one text.

    instruct and tuned models    the template of ``library.llm.dialogue_templates`` that they were trained with
    base models                  first token, what was typed, what the model wrote, what was typed, ...

A base model knows no turns; it continues the text, so what is typed is simply the next piece of it. What a model said
is put into a prompt as the tokens it said, not encoded again: the same text can be other tokens, and keys and values
computed for the first ones would be of no use.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from library.errors import UserError
from library.llm.chat import Message
from library.llm.dialogue_templates import NO_ANSWER, TEMPLATES, DialogueTemplate, dialogue_template
from library.llm.tokenizers import Tokenizer

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
