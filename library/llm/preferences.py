"""Pairs of answers to learn preferences from: two chats that part at an answer, of which one is the better.

    records -> chats with a ``rejected`` one beside them -> windows of two examples -> batches [B, 2, S]

A record has ``chosen`` and ``rejected``; what comes before them stands in it once, or at the beginning of both:

    TRL, explicit              {"prompt": ..., "chosen": ..., "rejected": ...}, each a text or a list of messages
    TRL, implicit              {"chosen": [messages], "rejected": [messages]}; a "prompt" may repeat how they begin
    LLaMA-Factory, ShareGPT    {"conversations": [...], "chosen": {"from": ..., "value": ...}, "rejected": {...}}
    LLaMA-Factory, Alpaca      {"instruction": ..., "input": ..., "chosen": ..., "rejected": ...}

The rest (``system``, ``tools``, roles) is as in all chats (``library.llm.chat_batches``, which tokenises pairs too).
Targets are what the assistant says from the first difference on. Of a template that writes earlier turns differently
once others follow, a chat is several examples: the last one counts, with the last answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, takewhile
from typing import Any

from library.errors import UserError
from library.llm.chat_batches import LISTS, Chat, alpaca_turns, as_turns, first_role, parse_chat

_SIDES = ("chosen", "rejected")
_PROMPTS = ("prompt", "question", "query", *LISTS)


def parse_pair(record: Any, where: str) -> Chat:
    """Return one record as the chosen chat with the rejected one; raises a UserError that begins with ``where``."""
    if not isinstance(record, Mapping) or not all(record.get(side) for side in _SIDES):
        what = 'has no "chosen" and "rejected" answer, which train_on = "preferences" learns from'
        raise UserError(f"{where}: {what}; add them, or remove the record")
    prompts = {key: as_turns(record[key], "user") for key in _PROMPTS if record.get(key)}
    if "instruction" in record:
        prompts["instruction"] = alpaca_turns({**record, "output": ""}, where)[:-1]
    before = next(iter(prompts.values()), [])
    answers = [as_turns(record[side], "assistant") for side in _SIDES]
    chats = [turns if first_role(turns) in ("system", "user") else [*before, *turns] for turns in answers]
    read = {*_SIDES}
    for key, turns in prompts.items():
        if all(turn in [*chain(*chats)] for turn in turns):
            read |= {key, *(("input", "history") if key == "instruction" else ())}
        elif isinstance(record[key], list | tuple):
            raise UserError(f"{where}: {key} is not how chosen and rejected begin; remove one of them")
    rest = {key: value for key, value in record.items() if key not in read}
    return _parted(*(parse_chat(rest | {"messages": turns}, where) for turns in chats))


def _parted(chosen: Chat, rejected: Chat) -> Chat:
    """Return a pair that is trained on from where its chats part; of equal ones the last message is taken for that."""
    both = zip(chosen.messages, rejected.messages, strict=False)
    common = len(list(takewhile(lambda two: two[0] == two[1], both)))
    if not common:
        raise UserError(f"{chosen.where}: chosen and rejected begin differently; give both the same prompt")
    common -= chosen.messages == rejected.messages
    parting = [message.role for chat in (chosen, rejected) for message in chat.messages[common : common + 1]]
    if parting != ["assistant", "assistant"]:
        what = f"chosen and rejected part at message {common + 1}, which is not the assistant's in both"
        raise UserError(f"{chosen.where}: {what}; a pair is two answers to the same messages")
    rejected, chosen = (replace(chat, trained=(False,) * common + chat.trained[common:]) for chat in (rejected, chosen))
    return replace(chosen, rejected=rejected)
