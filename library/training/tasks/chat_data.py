"""From conversation files to windows of tokens, for training and validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console

from library.config.chat_schema import ChatDataConfig
from library.errors import UserError
from library.llm.chat_batches import Chat, Example, TokenisedChats, Window, pack_examples, read_chats, tokenise_chats
from library.llm.chat_templates import ChatTemplate, Message
from library.models.llm.spec import LMConfig
from library.randomness import generator
from library.training.report.progress import counting

_USUAL_LENGTH = 2048  # of a window, where the model's context is longer


@dataclass(frozen=True)
class ChatData:
    """What a run learns from.

    Attributes:
        windows: to train on.
        held_out: conversations to validate on.
        max_length: tokens of a window at most.
        remarks: what was read, a line each.
    """

    windows: list[Window]
    held_out: list[Example]
    max_length: int
    remarks: list[str]


def prepare_chats(
    config: ChatDataConfig, template: ChatTemplate, model: LMConfig, seed: int, console: Console
) -> ChatData:
    """Read, split, tokenise and pack the conversations; show how far that is.

    Raises:
        UserError: files that cannot be read, conversations that do not suit the template, a ``max_length`` that the
            model does not have.
    """
    max_length = config.max_length or min(model.context, _USUAL_LENGTH)
    if max_length > model.context:
        raise UserError(f"max_length: {max_length} is more than the model's context of {model.context}; lower it")
    tokens = template.tokenizer.vocab_size
    if tokens > model.vocab_size:
        raise UserError(f"tokenizer: it has {tokens} tokens, the model {model.vocab_size}; set the model's own")
    chats = _with_system(read_chats(config.train_data), config.system_prompt)
    held_out: list[Chat] = []
    if config.validation_data:
        held_out = _with_system(read_chats(config.validation_data), config.system_prompt)
    if config.validation_split:
        chats, held_out = _split(chats, config.validation_split, seed)
    train_on_all = config.train_on == "all"
    with counting(console) as start:
        advance = start("tokenising conversations", len(chats) + len(held_out))
        read = tokenise_chats(chats, template, max_length, train_on_all, advance)
        held = tokenise_chats(held_out, template, max_length, train_on_all, advance).examples if held_out else []
    windows: list[Window] = [(example,) for example in read.examples]
    if config.packing:
        windows = pack_examples(read.examples, max_length)
    remarks = _describe(read, windows, template, max_length, config.packing)
    if held:
        remarks.append(f"{len(held):,} conversations to validate on")
    return ChatData(windows, held, max_length, remarks)


def _describe(
    read: TokenisedChats, windows: Sequence[Window], template: ChatTemplate, max_length: int, packing: bool
) -> list[str]:
    """Return what was read, a line each."""
    tokens = sum(len(example.tokens) for example in read.examples)
    learnt = sum(example.target_count for example in read.examples)
    count = f"{len(read.examples):,} conversations in the template {template.name}"
    remarks = [f"{count}: {tokens:,} tokens, {learnt / tokens:.0%} of them trained on"]
    if packing:
        remarks.append(f"packed into {len(windows):,} windows, {tokens / (len(windows) * max_length):.0%} full")
    if read.cut:
        remarks.append(f"note: {read.cut} conversations are longer than {max_length} tokens and lose their end")
    if read.dropped:
        remarks.append(f"note: {read.dropped} of them have no answer before that and are left out")
    return remarks


def _with_system(chats: list[Chat], system: str | None) -> list[Chat]:
    """Put ``system`` before the conversations that have no system message."""
    if not system:
        return chats
    first = Message("system", system)
    return [
        chat
        if chat.messages[0].role == "system"
        else replace(chat, messages=(first, *chat.messages), trained=(False, *chat.trained))
        for chat in chats
    ]


def _split(chats: Sequence[Chat], share: float, seed: int) -> tuple[list[Chat], list[Chat]]:
    """Return what to train on and what to validate on, at least one of each."""
    count = max(1, round(len(chats) * share))
    if count >= len(chats):
        raise UserError(f"validation_split: {share:g} of {len(chats)} conversations leaves none to train on; lower it")
    order = torch.randperm(len(chats), generator=generator(seed, "held-out conversations")).tolist()
    held = set(order[:count])
    return [d for i, d in enumerate(chats) if i not in held], [d for i, d in enumerate(chats) if i in held]
