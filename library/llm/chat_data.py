"""Conversations to learn from, in the shapes that people have them in.

    messages (OpenAI)          {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
    conversations (ShareGPT)   {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}
    instruction (Alpaca)       {"instruction": ..., "input": ..., "output": ...}; "system" and "history" are taken too
    prompt and completion      {"prompt": ..., "completion": ...}; or prompt/response, question/answer, query/response;
                               both may be lists of messages

in ``.jsonl`` (one a line), ``.json`` (a list) or ``.parquet`` (one a row). Each record's shape is told by its keys.
A message with ``"weight": 0`` (OpenAI's) is context, not learnt.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.errors import UserError
from library.llm.chat_templates import Message

SUFFIXES = (".jsonl", ".json", ".parquet")
_UTF8 = "utf-8-sig"  # with or without the mark that some programs put at a file's beginning
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("query", "response"))
_SHAPES = "messages, conversations, instruction and output, or prompt and completion"


@dataclass(frozen=True)
class Dialogue:
    """One conversation.

    Attributes:
        messages: in order.
        learnt: for each whether it is to be learnt; only the assistant's are.
        where: "file:line", for messages.
    """

    messages: tuple[Message, ...]
    learnt: tuple[bool, ...]
    where: str


def read_dialogues(paths: Sequence[str | Path]) -> list[Dialogue]:
    """Return the conversations in files, or in all files of folders, in order.

    Raises:
        UserError: a path does not exist, a file is damaged or of another kind, a record has no known shape or
            nothing to learn; file and line are named.
    """
    dialogues: list[Dialogue] = []
    for file in _files(paths):
        for number, record in _records(file):
            dialogues.append(dialogue_of(record, f"{file}:{number}"))
    if not dialogues:
        raise UserError(f"{paths[0]}: holds no conversation; name a file with some")
    return dialogues


def dialogue_of(record: Any, where: str) -> Dialogue:
    """Return one record as a conversation; raises a UserError that begins with ``where``."""
    if not isinstance(record, Mapping):
        raise UserError(f"{where}: is no object with keys; a record has {_SHAPES}")
    pairs = [pair for pair in _PAIRS if all(key in record for key in pair)]
    if isinstance(record.get("messages"), list | tuple):
        turns = list(record["messages"])
    elif isinstance(record.get("conversations", record.get("conversation")), list | tuple):
        turns = list(record.get("conversations", record.get("conversation")))
    elif "instruction" in record and "output" in record:
        turns = _alpaca(record, where)
    elif pairs:
        asked, said = (record[key] for key in pairs[0])
        turns = [*_as_turns(asked, "user"), *_as_turns(said, "assistant")]
    else:
        keys = ", ".join(map(str, record)) or "no keys"
        raise UserError(f"{where}: has {keys}, which is no known shape; a record has {_SHAPES}")
    if isinstance(record.get("system"), str) and record["system"] and not _begins_with_system(turns):
        turns = [{"role": "system", "content": record["system"]}, *turns]
    messages, learnt = [], []
    for turn in turns:
        message, counts = _message(turn, where)
        messages.append(message)
        learnt.append(counts)
    if not any(learnt):
        raise UserError(f"{where}: the assistant says nothing that could be learnt; remove the record")
    return Dialogue(tuple(messages), tuple(learnt), where)


def _alpaca(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for pair in record.get("history") or ():
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise UserError(f"{where}: history is no list of pairs, a question and its answer each; correct it")
        asked, said = pair
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    asked = record["instruction"]
    if record.get("input"):
        asked = f"{asked}\n\n{record['input']}" if asked else record["input"]
    return [*turns, {"role": "user", "content": asked}, {"role": "assistant", "content": record["output"]}]


def _as_turns(value: Any, role: str) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [{"role": role, "content": value}]


def _begins_with_system(turns: Sequence[Any]) -> bool:
    return bool(turns) and isinstance(turns[0], Mapping) and turns[0].get("role", turns[0].get("from")) == "system"


def _message(turn: Any, where: str) -> tuple[Message, bool]:
    if not isinstance(turn, Mapping):
        raise UserError(f"{where}: a message is no object with role and content; correct it")
    said = turn.get("role", turn.get("from"))
    role = _ROLES.get(str(said).lower())
    if role is None:
        raise UserError(f"{where}: role {said!r} is none of {', '.join(sorted(_ROLES))}; correct it")
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list | tuple):  # OpenAI's parts
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = None if None in parts else "".join(map(str, parts))
    if not isinstance(content, str):
        raise UserError(f"{where}: a message of {said} holds no text; only text can be learnt, remove the record")
    return Message(role, content), role == "assistant" and bool(content.strip()) and turn.get("weight", 1) != 0


def _files(paths: Iterable[str | Path]) -> list[Path]:
    files: list[Path] = []
    for path in (Path(path).expanduser() for path in paths):
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
            if not found:
                raise UserError(
                    f"{path}: no {', '.join(SUFFIXES)} file in it; name the folder the conversations lie in"
                )
            files += found
        elif not path.is_file():
            raise UserError(f"{path}: no such file or folder; check the path")
        elif path.suffix not in SUFFIXES:
            raise UserError(f"{path}: not one of {', '.join(SUFFIXES)}; rename or convert it")
        else:
            files.append(path)
    return files


def _records(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield each record with its line, place in the list, or row, from 1."""
    if file.suffix == ".parquet":
        yield from enumerate(_parquet(file), 1)
        return
    try:
        if file.suffix == ".json":
            records = json.loads(file.read_text(encoding=_UTF8))
            if not isinstance(records, list):
                raise UserError(f"{file}: is no list of records; write one a line into a .jsonl file")
            yield from enumerate(records, 1)
            return
        with open(file, encoding=_UTF8) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield number, json.loads(line)
                    except ValueError as error:
                        raise UserError(f"{file}:{number}: no JSON ({error}); correct the line") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 at byte {error.start}; convert it") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{file}:{error.lineno}: no JSON ({error.msg}); correct it") from None


def _parquet(file: Path) -> Iterator[Any]:
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError("parquet files need the package pyarrow; run pip install pyarrow==26.0.1, or convert to .jsonl")
    import pyarrow
    import pyarrow.parquet

    try:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches():
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{file}: not a readable parquet file ({error}); download it again") from None
