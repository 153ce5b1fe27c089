"""From conversation files to windows of tokens, for training and validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console

from library.config.chat_schema import ChatDataConfig
from library.errors import UserError
from library.llm.chat_batches import Example, Tokenised, Window, pack_examples, tokenise_dialogues
from library.llm.chat_data import Dialogue, read_dialogues
from library.llm.chat_templates import DialogueTemplate, Message
from library.models.llm.spec import LMConfig
from library.randomness import generator
from library.training.report.progress import counting

_USUAL_LENGTH = 2048  # of a window, where the model's context is longer


@dataclass(frozen=True)
class InstructionData:
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


def prepare_dialogues(
    config: ChatDataConfig, template: DialogueTemplate, model: LMConfig, seed: int, console: Console
) -> InstructionData:
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
    dialogues = _with_system(read_dialogues(config.train_data), config.system_prompt)
    held_out: list[Dialogue] = []
    if config.validation_data:
        held_out = _with_system(read_dialogues(config.validation_data), config.system_prompt)
    if config.validation_split:
        dialogues, held_out = _split(dialogues, config.validation_split, seed)
    learn_all = config.learn == "all"
    with counting(console) as start:
        advance = start("tokenising conversations", len(dialogues) + len(held_out))
        read = tokenise_dialogues(dialogues, template, max_length, learn_all, advance)
        held = tokenise_dialogues(held_out, template, max_length, learn_all, advance).examples if held_out else []
    windows: list[Window] = [(example,) for example in read.examples]
    if config.packing:
        windows = pack_examples(read.examples, max_length)
    remarks = _describe(read, windows, template, max_length, config.packing)
    if held:
        remarks.append(f"{len(held):,} conversations to validate on")
    return InstructionData(windows, held, max_length, remarks)


def _describe(
    read: Tokenised, windows: Sequence[Window], template: DialogueTemplate, max_length: int, packing: bool
) -> list[str]:
    """Return what was read, a line each."""
    tokens = sum(len(example.tokens) for example in read.examples)
    learnt = sum(example.learnt for example in read.examples)
    count = f"{len(read.examples):,} conversations in the template {template.name}"
    remarks = [f"{count}: {tokens:,} tokens, {learnt / tokens:.0%} of them learnt"]
    if packing:
        remarks.append(f"packed into {len(windows):,} windows, {tokens / (len(windows) * max_length):.0%} full")
    if read.cut:
        remarks.append(f"note: {read.cut} conversations are longer than {max_length} tokens and lose their end")
    if read.dropped:
        remarks.append(f"note: {read.dropped} of them have no answer before that and are left out")
    return remarks


def _with_system(dialogues: list[Dialogue], system: str | None) -> list[Dialogue]:
    """Put ``system`` before the conversations that have no system message."""
    if not system:
        return dialogues
    first = Message("system", system)
    return [
        dialogue
        if dialogue.messages[0].role == "system"
        else replace(dialogue, messages=(first, *dialogue.messages), learnt=(False, *dialogue.learnt))
        for dialogue in dialogues
    ]


def _split(dialogues: Sequence[Dialogue], share: float, seed: int) -> tuple[list[Dialogue], list[Dialogue]]:
    """Return what to train on and what to validate on, at least one of each."""
    count = max(1, round(len(dialogues) * share))
    if count >= len(dialogues):
        raise UserError(
            f"validation_split: {share:g} of {len(dialogues)} conversations leaves none to train on; lower it"
        )
    order = torch.randperm(len(dialogues), generator=generator(seed, "held-out conversations")).tolist()
    held = set(order[:count])
    return [d for i, d in enumerate(dialogues) if i not in held], [d for i, d in enumerate(dialogues) if i in held]
