"""Conversations as tokens, in the template of Llama 3's instruct models.

    <|begin_of_text|><|start_header_id|>user<|end_header_id|>

    What is RoPE?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

    ...

(https://www.llama.com/docs/model-cards-and-prompt-formats/meta-llama-3/). Only the template's own marks become special
tokens; a mark that stands in a message is encoded as text, so no message can end its turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from library.errors import UserError
from library.llm.tokenizers import Tokenizer

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
