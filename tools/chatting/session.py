"""One person's talk: a conversation, its settings and choices. Both front ends are thin around it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from library.errors import UserError
from library.llm.chat_session import ChatSession
from library.llm.generation import SamplingSettings
from tools.chatting.shelf import ModelRegistry


class Session:
    """Talk with a model of the shelf, which other sessions may be using too, one answer at a time.

    Attributes:
        shelf: the models and LoRAs there are.
        conversation: what was said.
        settings: of the next answer.
        model_name, lora_name, strength: what was chosen; the shelf may hold something else until the next answer.
    """

    def __init__(
        self, shelf: ModelRegistry, settings: SamplingSettings, system: str = "", context: int | None = None
    ) -> None:
        """Begin with the model and the LoRA that are on the shelf; raises a UserError as ``ChatSession`` does."""
        self.shelf, self.settings = shelf, settings
        self.model_name, self.lora_name, self.strength = shelf.model_name, shelf.lora_name, 1.0
        self.conversation = ChatSession(shelf.model.config, shelf.template, system, context)
        self._ready_for = (
            self.model_name,
            self.lora_name,
            self.strength,
        )  # what the conversation's tokens and cache are of
        self._notes: list[str] = []

    def begin_another(self) -> Session:
        """Return a session for somebody else, with this one's choices and nothing said yet."""
        other = copy.copy(self)
        other.conversation = self.conversation.begin_another()
        other._notes = []
        return other

    def introduction(self) -> str:
        """Return a line about the model and how it takes what is typed."""
        conversation = self.conversation
        if conversation.template.has_turns:
            manner = f"talks in turns (template {conversation.template.name})"
        else:
            manner = "is a base model: it continues what you type, an empty line lets it go on"
        strength = "" if self.strength == 1 else f" at {self.strength:g}"
        lora = f" with {self.lora_name}{strength}" if self.lora_name else ""
        return f"{self.model_name}{lora} {manner}; context {conversation.context} tokens"

    def choose(self, model_name: str, lora_name: str | None) -> None:
        """Take another model or LoRA from now on, at the strength it came with; the conversation goes on if it can.

        Raises:
            UserError: there is no such thing, or they do not fit together; nothing has changed then.
        """
        source = self.shelf.loras.get(lora_name or "")
        strength = source.ratio if source is not None else 1.0
        self._take(model_name, lora_name, strength)
        self.model_name, self.lora_name, self.strength = model_name, lora_name, strength

    def set_strength(self, strength: float) -> None:
        """Set the factor on the LoRA's update from the next answer on; raises a UserError if there is no LoRA."""
        if self.lora_name is None:
            raise UserError("strength: there is no LoRA on the model; choose one")
        self.strength = strength

    def set_system(self, text: str) -> None:
        """Set the system message; raises a UserError if the model knows none."""
        self.conversation.template.prompt(text, [], "?")
        self.conversation.system = text

    def answer(self, text: str) -> Iterator[str]:
        """Yield the answer piece by piece; see ``ChatSession.answer``. Nobody else may use the shelf meanwhile."""
        self._take(self.model_name, self.lora_name, self.strength)  # another session may have exchanged them
        yield from self.conversation.answer(self.shelf.model, text, self.settings)

    def _take(self, model_name: str, lora_name: str | None, strength: float) -> None:
        shelf, conversation = self.shelf, self.conversation
        shelf.use(model_name, lora_name, strength)
        if model_name != self._ready_for[0] or shelf.template.name != conversation.template.name:
            said = bool(conversation.turns)
            if not conversation.switch(shelf.model.config, shelf.template) and said:
                self._notes.append("the conversation begins anew: a text and a talk in turns do not go together")
        elif (lora_name, strength) != self._ready_for[1:]:
            conversation.forget_cache()
        self._ready_for = (model_name, lora_name, strength)

    def remarks(self) -> list[str]:
        """Return what should be told about the last answer or choice, and forget it."""
        notes, self._notes = [*self._notes, *self.conversation.remarks], []
        effort = self.conversation.stats
        if effort is not None and effort.ending == "max_new_tokens":
            notes.append(f"the answer was cut off after {effort.tokens} tokens (max_new_tokens)")
        return notes

    def report(self) -> str:
        """Return a line about what the last answer took."""
        effort = self.conversation.stats
        if effort is None:
            return ""
        rate = effort.tokens / max(effort.seconds, 1e-9)
        return (
            f"{effort.tokens} tokens in {effort.seconds:.1f} s ({rate:.1f}/s); of the prompt {effort.computed} tokens "
            f"were new, {effort.cached} known"
        )

    def record(self) -> dict[str, Any]:
        """Return the conversation as one object of a jsonl file: messages, or a base model's text."""
        conversation = self.conversation
        if conversation.template.has_turns:
            return {"messages": [message._asdict() for message in conversation.messages]}
        text = ""
        for i, turn in enumerate(conversation.turns):
            line = "\n" if turn.question and i and not conversation.turns[i - 1].ended else ""
            text += line + turn.question + turn.answer
        return {"text": text}
