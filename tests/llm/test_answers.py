"""An answer that comes in pieces has the parts of the whole one, and nothing is given that must be taken back."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from library.llm.answers import CALL_MARKS, AnswerReader
from library.llm.tokenizers import IncrementalDecoder, train_bpe

TOOLS = {"weather", "add"}
WEATHER = {"name": "weather", "arguments": {"city": "Zürich <b>", "days": [1, 2]}}
ADD = {"name": "add", "arguments": {"a": 1}}
LLAMA = '{"name": "weather", "parameters": {"city": "Zürich <b>", "days": [1, 2]}}'
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[TOOL", "</th"]
CALLS = [json.dumps(WEATHER), json.dumps([ADD]), LLAMA, "{", "[", "}", ";"]
BITS = st.lists(st.sampled_from([*MARKS, *CALLS, "a", "ab", "b", "stop", "st", "<", "\n", " "]), max_size=12).map(
    "".join
)


def read(pieces: list[str], *stops: str, **given: Any) -> dict[str, Any]:
    """Return all parts of an answer, put together, as a client does."""
    reader, parts = AnswerReader(stops, **given), dict[str, Any]()
    for piece in pieces:
        for key, value in reader.add(piece).items():
            parts[key] = parts.get(key, "") + value
        if reader.is_stopped:
            break
    for key, value in reader.end().items():
        parts[key] = parts[key] + value if key in parts else value
    return parts


def called(parts: dict[str, Any]) -> list[dict[str, Any]]:
    assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in parts["tool_calls"])  # as Mistral wants it
    functions = [call["function"] for call in parts["tool_calls"]]
    return [{"name": each["name"], "arguments": json.loads(each["arguments"])} for each in functions]


def without_ids(parts: dict[str, Any]) -> dict[str, Any]:
    return {key: called(parts) if key == "tool_calls" else value for key, value in parts.items()}


@given(
    BITS,
    st.lists(st.integers(0, 80), max_size=8),
    st.lists(st.sampled_from(["stop", "ab", "b", "a<", "\n\n", "l>"]), max_size=3),
    st.booleans(),
    st.sampled_from([(), TOOLS]),
)
def test_pieces_give_what_the_whole_gives(
    text: str, cuts: list[int], stops: list[str], is_thinking: bool, tools: Any
) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[one:other] for one, other in pairwise(places)]
    first = next((text[:end] for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))), None)
    kept = text if first is None else min((first.removesuffix(s) for s in stops if first.endswith(s)), key=len)
    expected = read([kept], is_thinking=is_thinking, tools=tools)
    for split in (pieces, [*text]):
        assert without_ids(read(split, *stops, is_thinking=is_thinking, tools=tools)) == without_ids(expected)
    assert "".join(read([*text], *stops, is_chat=False).values()) == kept


@pytest.mark.parametrize("piece", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"<tool_call>\n{json.dumps(WEATHER)}\n</tool_call>", "", [WEATHER]),  # Hermes, Qwen
        (f"Look.\n<tool_call>{json.dumps(WEATHER)}</tool_call>\n<tool_call>{json.dumps(ADD)}", "Look.", [WEATHER, ADD]),
        (f"<tool_call>{json.dumps([ADD, WEATHER])}</tool_call>", "", [ADD, WEATHER]),  # SmolLM2
        (f"[TOOL_CALLS]{json.dumps([WEATHER])}", "", [WEATHER]),  # Mistral
        (f"[TOOL_CALLS] {json.dumps([WEATHER, ADD], ensure_ascii=False)}", "", [WEATHER, ADD]),
        (LLAMA, "", [WEATHER]),  # Llama 3.1
        (f"<|python_tag|>{LLAMA}; {LLAMA}", "", [WEATHER, WEATHER]),
        ('{"name": "add"}', "", [{"name": "add", "arguments": {}}]),
    ],
)  # fmt: skip
def test_calls_are_read_in_the_formats_of_the_models(
    text: str, content: str, calls: list[dict[str, Any]], piece: int
) -> None:
    parts = read([text[i : i + piece] for i in range(0, len(text), piece)], tools=TOOLS)
    assert called(parts) == calls
    assert parts.get("content", "") == content


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "other", "arguments": {}}',  # no tool of the request's
        f'<tool_call>{json.dumps(WEATHER)}</tool_call><tool_call>{{"name": ...}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>',
        "<tool_call>[]</tool_call>",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]7",
        '{"city": "Paris"}',
        f"{LLAMA} and so on",
        "[" * 100_000,
        "{" * 100_000,
        f"[TOOL_CALLS]{'[' * 100_000}",
        '{"name": ["add"]}',
    ],
)
def test_what_is_no_call_of_a_tool_stays_text(text: str) -> None:
    assert read([text], tools=TOOLS) == {"content": text}


def test_thinking_is_told_from_the_answer() -> None:
    for text, is_thinking in (("<think>\na < b\n</think>\n\nyes", False), ("a < b\n</think>\n\nyes", True)):
        for pieces in ([text], [*text]):
            assert read(pieces, is_thinking=is_thinking) == {"reasoning_content": "a < b", "content": "yes"}
    assert read(["<think>\na <", " b"]) == {"reasoning_content": "a < b"}  # cut off
    assert read(["I <think> so</think>"]) == {"content": "I <think> so</think>"}


def test_the_marks_of_calls_are_read_where_they_are_special_tokens() -> None:
    tokenizer = train_bpe(["add a name"] * 9, 300, ("<s>", "</s>", "[TOOL_CALLS]", "<|python_tag|>", "<think>"))
    for text in (f"καλ [TOOL_CALLS]{json.dumps([ADD])}</s>", f"<s><|python_tag|>{json.dumps(ADD)}</s>"):
        decoder, reader = IncrementalDecoder(tokenizer, CALL_MARKS), AnswerReader((), tools=TOOLS)
        for token in tokenizer.encode(text, special=True):
            assert not reader.add(decoder.add(token)).get("content", "").strip("καλ")
        reader.add(decoder.rest())
        assert called(reader.end()) == [ADD]
