"""An answer's text, told apart while it is generated: stop strings, thinking, and tool calls.

Thinking is what stands in ``<think>...</think>`` at the beginning; the template may have opened it in the prompt. Tool
calls are read in four formats, each a JSON object or a list of them with ``name`` and ``arguments`` (or
``parameters``):

    <tool_call>{...}</tool_call>      Hermes and Qwen, one block a call; SmolLM2, one block with a list
    [TOOL_CALLS][{...}]               Mistral
    <|python_tag|>{...}; {...}        Llama 3.1 and later; the mark may be missing if nothing stands before the call
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Sequence
from typing import Any

CALL_MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
_CALL = re.compile(
    r"<tool_call>(.*?)(?:</tool_call>|\Z)|(?:\[TOOL_CALLS\]|<\|python_tag\|>|\A(?=\s*\{))(.*)", re.DOTALL
)
_OPENED, _CLOSED = "<think>", "</think>"


class AnswerReader:
    """Takes an answer piece by piece and gives its parts as they become certain, until a stop string is complete.

    Parts are texts, to be put together, by ``reasoning_content`` and ``content``; at the end there may be
    ``tool_calls`` as OpenAI's API has them. A stop string and what follows it are no part of the answer.

    Attributes:
        has_begun: there was a piece.
        is_stopped: a stop string is complete.
    """

    def __init__(
        self, stops: Sequence[str], is_thinking: bool = False, tools: Collection[str] = (), is_chat: bool = True
    ) -> None:
        """Begin an answer.

        Args:
            stops: the stop strings.
            is_thinking: the prompt ends within thinking.
            tools: names of the tools that may be called. If one of the calls is of no known form or of another tool,
                all stay in the content.
            is_chat: false leaves the text as it is.
        """
        self.has_begun, self.is_stopped, self._stops = False, False, stops
        self._is_thinking, self._tools, self._is_chat = is_thinking, tools, is_chat
        self._text, self._given = "", ("", "")

    def end(self) -> dict[str, Any]:
        """Return the last parts."""
        return self.add("", is_complete=True)

    def add(self, piece: str, is_complete: bool = False) -> dict[str, Any]:
        """Take a piece; return the new parts."""
        self.has_begun, self._text = True, self._text + piece
        text, calls = self._text, list[dict[str, Any]]()
        if ends := [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]:
            self.is_stopped, text = True, text[: min(ends)[1]]  # the first that is complete
        elif not is_complete:
            text = _certain(text, self._stops)
        reasoning, content = self._split(text, is_complete) if self._is_chat else ("", text)
        if self._tools and is_complete:
            content, calls = _tool_calls(content, self._tools)
        elif self._tools:
            call = _CALL.search(content)
            content = (content[: call.start()] if call else _certain(content, CALL_MARKS)).rstrip()
        given, self._given = self._given, (reasoning, content)
        parts = {"reasoning_content": reasoning[len(given[0]) :], "content": content[len(given[1]) :]}
        return {key: value for key, value in {**parts, "tool_calls": calls}.items() if value}

    def _split(self, text: str, is_complete: bool) -> tuple[str, str]:
        """Return thinking and the rest, as far as they are certain."""
        begun = text.lstrip()
        if not (self._is_thinking or begun.startswith(_OPENED)):
            return "", text if is_complete or not _OPENED.startswith(begun) else ""
        thought, _, content = (text if self._is_thinking else begun.removeprefix(_OPENED)).partition(_CLOSED)
        return (thought if is_complete else _certain(thought, [_CLOSED])).strip("\n"), content.lstrip("\n")


def _tool_calls(text: str, tools: Collection[str]) -> tuple[str, list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []
    try:
        for tagged, other in _CALL.findall(text):
            for value in _json_values(tagged or other):
                if value["name"] not in tools:
                    return text, []
                arguments = value.get("arguments", value.get("parameters", {}))
                written = arguments if isinstance(arguments, str) else json.dumps(arguments)
                function = {"name": value["name"], "arguments": written}
                # Mistral's template wants an id of nine letters and digits.
                calls.append({"id": secrets.token_hex(5)[:9], "type": "function", "function": function})
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):  # not JSON, or not of this shape
        return text, []
    return (_CALL.sub("", text).rstrip(), calls) if calls else (text, [])


def _json_values(text: str) -> list[Any]:
    """Return the JSON values that ``text`` consists of, a list's one by one."""
    values = []
    while text := text.strip().removeprefix(";").lstrip():
        value, end = json.JSONDecoder().raw_decode(text)
        values += value if isinstance(value, list) else [value]
        text = text[end:]
    return values


def _certain(text: str, marks: Sequence[str]) -> str:
    """Return ``text`` without an end that may be the beginning of one of ``marks``."""
    lengths = (n for mark in marks for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n]))
    return text[: len(text) - max(lengths, default=0)]
