"""Texts of any bytes: captions, chats, documents, metrics, models' JSON; and the numbers of tools' flags."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from library.data.file_index import FileIndex
from library.files import read_json
from library.llm.chat_batches import read_chats
from library.llm.documents import read_documents
from library.training.report.metrics_file import read_run
from tests.fuzz import harmless, share_of_cases
from tests.fuzz.test_configs import values
from tools.command import number, whole

ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp1252"]
KEYS = ["messages", "role", "content", "conversations", "from", "value", "instruction", "output", "prompt",
        "completion", "text", "step", "loss", "lr/x", "model_type"]  # fmt: skip
KNOWN = ["user", "assistant", "system", "human", "gpt", "hello"]
records = st.recursive(
    st.sampled_from(KNOWN) | values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@share_of_cases(0.1)
@given(data=st.binary(max_size=60) | st.tuples(st.text(max_size=20), st.sampled_from(ENCODINGS)))
def test_a_caption_is_text_that_every_encoding_has_or_refused(folder: Path, data: bytes | tuple[str, str]) -> None:
    if not isinstance(data, bytes):
        data = data[0].encode(data[1], errors="replace")
    path = folder / "a.txt"
    path.write_bytes(data)
    text = harmless(FileIndex(folder / "cache").caption, str(path), (len(data), 0, 0))
    assert text is None or "\0" not in text.encode().decode()


@share_of_cases(0.1)
@given(lines=st.lists(records.map(json.dumps) | st.text(max_size=30), max_size=4), tail=st.binary(max_size=6))
def test_any_lines_of_json_are_taken_or_refused(folder: Path, lines: list[str], tail: bytes) -> None:
    path = folder / "a.jsonl"
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass") + tail)
    for chat in harmless(read_chats, [path]) or ():
        assert all(message.content.encode() is not None for message in chat.messages)
    for text in harmless(lambda: list(read_documents(path))) or ():
        text.encode()
    run = harmless(read_run, path)
    for steps, points in run.columns.values() if run is not None else ():
        assert len(steps) == len(points)


@share_of_cases(0.05)
@given(content=records.map(json.dumps) | st.text(max_size=40), encoding=st.sampled_from(ENCODINGS))
def test_a_models_json_is_an_object_or_refused(folder: Path, content: str, encoding: str) -> None:
    path = folder / "config.json"
    path.write_bytes(content.encode(encoding, errors="replace"))
    found = harmless(read_json, path)
    assert found is None or isinstance(found, dict)
    json.dumps(found, ensure_ascii=False, allow_nan=True).encode()


@share_of_cases(0.05)
@given(text=st.text(max_size=40) | st.integers().map(str) | st.floats().map(str))
def test_a_flags_number_is_within_its_bounds_or_refused(text: str) -> None:
    for read, least, most in ((whole(0, 9), 0, 9), (number(), -math.inf, math.inf), (number(above=0, most=1), 0, 1)):
        try:
            found = read(text)
        except argparse.ArgumentTypeError:
            continue
        assert math.isfinite(found)
        assert least <= found <= most
