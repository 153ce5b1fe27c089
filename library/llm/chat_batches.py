"""Chats to train on: read, tokenised, packed or sorted by length, and batched in an order of seed and epoch.

    files -> chats (messages) -> examples (tokens and targets) -> windows of at most ``max_length`` tokens -> batches

A record's shape is told by its keys; files are ``.jsonl`` (one a line), ``.json`` (a list) or ``.parquet`` (one a row):

    messages (OpenAI)          {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}
    conversations (ShareGPT)   {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}
    instruction (Alpaca)       {"instruction": ..., "input": ..., "output": ...}; "system" and "history" are taken too
    prompt and completion      {"prompt": ..., "completion": ...}; or prompt/response, question/answer, query/response;
                               both may be lists of messages; the prompt's are context, as in TRL

A message with ``"weight": 0`` (OpenAI's) or ``"train": false`` (axolotl's) is context and not trained on. ``tools``
belong to a record, ``tool_calls`` and ``reasoning_content`` to a message; ``function_call`` and ``functions`` are older
names. Calls and tools may be JSON in a text: chat templates want them as objects. Keys that nothing reads are named.

Packed, a window holds several chats, the fullest fit first (best-fit decreasing); each has its own positions and sees
nothing of the others (``library.nn.attention.document_mask``). Otherwise a window is one chat, and batches are made of
chats of similar length, padded on the right. Padding is never a target, and causal attention never looks at it.

A batch weighs as much as it has targets: the loss of an optimizer step is the mean over all of its targets, whatever
the batch size, the accumulation, the number of processes and the packing are.
"""

from __future__ import annotations

import bisect
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from library.data.batches import ALL, DataParallelRank, PlannedBatchSampler, TensorBatch
from library.errors import UserError, did_you_mean, names_in_short
from library.files import MOST_DATA_BYTES, parse_json, read_json_lines, read_text
from library.llm.chat_targets import THINKING, encode_chat
from library.llm.chat_templates import ChatTemplate, Message
from library.llm.documents import named_files, read_parquet, require_pyarrow
from library.nn.cross_entropy import IGNORED
from library.randomness import derive_seed

SUFFIXES = (".jsonl", ".json", ".parquet")
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "assistant", "function_call"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation", "ipython", "function_response"), "tool"),
}
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("query", "response"))
LISTS = ("messages", "conversations", "conversation")
_ALPACA = ("instruction", "input", "output", "history")
_MORE = ("name", "tool_calls", "tool_call_id", *THINKING)  # templates read these
_MESSAGE = ("role", "from", "content", "value", "weight", "train", "function_call", *_MORE)
_TOOLS = ("tools", "functions")
_SILENT = "an answer without text"
_EMPTY: tuple[Any, ...] = (None, "", [], {})  # as tables have what a row lacks
_SHAPES = "messages, conversations, instruction and output, or prompt and completion"
_POOL = 50  # batches whose chats are sorted by length together: similar lengths, yet another order each epoch


@dataclass(frozen=True)
class Chat:
    """One record of a file.

    Attributes:
        messages: in order.
        trained: for each whether it is trained on; only the assistant's are.
        where: "file:line", for messages.
        unread: keys that hold something and that nothing reads, a message's after "message: ".
        tools: JSON schemas of the functions that may be called.
        rejected: of a pair (``library.llm.preferences``), the same chat with the answer that is not preferred.
    """

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]
    where: str
    unread: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    rejected: Chat | None = None


def read_chats(paths: Sequence[str | Path], parse: Callable[[Any, str], Chat] | None = None) -> list[Chat]:
    """Return the chats in files, or in all files of folders, in order; ``parse`` is :func:`parse_chat` by default."""
    chats: list[Chat] = []
    for file in named_files(paths, SUFFIXES, _files_inside):
        chats += [(parse or parse_chat)(record, where) for where, record in _records(file)]
    if not chats:
        raise UserError(f"{paths[0]}: holds no chat; name a file with some")
    return chats


def parse_chat(record: Any, where: str) -> Chat:
    """Return one record as a chat; raises a UserError that begins with ``where``."""
    if not isinstance(record, Mapping):
        raise UserError(f"{where}: is no object with keys; a record has {_SHAPES}")
    pairs = [pair for pair in _PAIRS if all(key in record for key in pair)]
    listed = next((key for key in LISTS if isinstance(record.get(key), list | tuple)), None)
    answered = listed and first_role(record[listed][-1:]) == "assistant"
    if record.get("chosen") and record.get("rejected") and not answered:
        raise UserError(f'{where}: has a chosen and a rejected answer; set train_on = "preferences" to learn from them')
    if listed is not None:
        turns, read = list(record[listed]), [listed]
    elif "instruction" in record and "output" in record:
        turns, read = alpaca_turns(record, where), [*_ALPACA]
    elif pairs:
        read = [*pairs[0]]
        asked = as_turns(record[read[0]], "user")
        asked = [{**turn, "train": False} if isinstance(turn, Mapping) else turn for turn in asked]
        turns = [*asked, *as_turns(record[read[1]], "assistant")]
    else:
        keys = ", ".join(map(str, record)) or "no keys"
        raise UserError(f"{where}: has {keys}, which is no known shape; a record has {_SHAPES}")
    if isinstance(record.get("system"), str) and record["system"] and first_role(turns) != "system":
        turns, read = [{"role": "system", "content": record["system"]}, *turns], [*read, "system"]
    tools, read = read_tools(record, where), [*read, *_TOOLS]
    messages = [read_message(turn, where) for turn in turns]
    if not any(is_trained for _, is_trained in messages):
        raise UserError(f"{where}: the assistant says nothing to train on; remove the record")
    unread = [str(key) for key, value in record.items() if key not in read and value not in _EMPTY]
    unread += dict.fromkeys(f"message: {key}" for turn in turns for key in unread_keys(turn))
    unread += [_SILENT] if any(m.role == "assistant" and not _says_something(m) for m, _ in messages) else []
    trained = tuple(is_trained for _, is_trained in messages)
    return Chat(tuple(message for message, _ in messages), trained, where, tuple(unread), tools)


def note_unread(chats: Sequence[Chat]) -> list[str]:
    """Return a note on the keys of records and messages that nothing reads, and on empty answers, if there are any."""
    counts = Counter(key for chat in chats for key in chat.unread)
    known = (_SILENT, *LISTS, *_ALPACA, *_TOOLS, "system", *chain(*_PAIRS), *_MESSAGE)
    said = []
    for key, count in counts.items():
        name = key.removeprefix("message: ")
        said.append(f"{key!r} ({count} of {len(chats)}){'' if name in known else did_you_mean(name, known)}")
    return [f"note: not trained on: {names_in_short(said, 20)}"] if said else []


def alpaca_turns(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the messages of an Alpaca record, ``output`` last."""
    turns: list[dict[str, Any]] = []
    for pair in record.get("history") or ():
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise UserError(f"{where}: history is no list of pairs, a question and its answer each; correct it")
        question, answer = pair
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    question = record["instruction"]
    if record.get("input"):
        question = f"{question}\n\n{record['input']}" if question else record["input"]
    return [*turns, {"role": "user", "content": question}, {"role": "assistant", "content": record["output"]}]


def as_turns(value: Any, role: str) -> list[Any]:
    """Return messages: a list as it is, one alone, or a text as one of ``role``."""
    if isinstance(value, list | tuple):
        return list(value)
    return [value if isinstance(value, Mapping) else {"role": role, "content": value}]


def first_role(turns: Sequence[Any]) -> str | None:
    """Return the role of the first message; None if it has none that is known."""
    first = turns[0] if turns and isinstance(turns[0], Mapping) else {}
    return _ROLES.get(str(first.get("role", first.get("from"))).lower())


def unread_keys(turn: Mapping[str, Any]) -> list[str]:
    """Return the keys of a message that hold something and that nothing reads."""
    read = {"role" if "role" in turn else "from", "content" if "content" in turn else "value", "function_call", *_MORE}
    read |= {key for key in ("weight", "train") if turn.get(key) in (0, 1)}  # a message counts, or it does not
    return [str(key) for key, value in turn.items() if key not in read and value not in _EMPTY]


def read_message(turn: Any, where: str) -> tuple[Message, bool]:
    """Return a message and whether it is trained on; raises a UserError that begins with ``where``."""
    if not isinstance(turn, Mapping):
        raise UserError(f"{where}: a message is no object with role and content; correct it")
    name = turn.get("role", turn.get("from"))
    role = _ROLES.get(str(name).lower())
    if role is None:
        raise UserError(f"{where}: role {name!r} is none of {', '.join(sorted(_ROLES))}; correct it")
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list | tuple):  # OpenAI's parts
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = "".join(map(str, parts)) if all(isinstance(part, str) for part in parts) else None
    more = {key: turn[key] for key in _MORE if turn.get(key) not in _EMPTY}
    calls = content if str(name).lower() == "function_call" else turn.get("function_call") or more.get("tool_calls")
    if calls:
        more["tool_calls"] = _calls(calls, where)
        content = None if calls is content else content
    message = Message(role, content, more)
    if not (isinstance(content, str) or (content is None and _says_something(message))):
        raise UserError(f"{where}: a message of {name} holds no text; give it one, or remove it (only text is read)")
    counts = 0 not in (turn.get("weight", 1), turn.get("train", 1))
    return message, role == "assistant" and _says_something(message) and counts


def _says_something(message: Message) -> bool:
    return bool((message.content or "").strip() or any(message.more.get(key) for key in ("tool_calls", *THINKING)))


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return calls of tools in OpenAI's form, their arguments as objects."""
    calls = _from_json(value, where)
    made = []
    for call in calls if isinstance(calls, list | tuple) else [calls]:
        call = call if isinstance(call, Mapping) and "function" in call else {"type": "function", "function": call}
        function = call["function"]
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
            raise UserError(f"{where}: a call of a tool has no function with a name; write OpenAI's tool_calls")
        given = function.get("arguments")
        made.append({**call, "function": {**function, "arguments": _from_json(given, where) if given else {}}})
    return made


def read_tools(record: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...]:
    """Return the functions that may be called in a record; raises a UserError that begins with ``where``."""
    tools: Any = _from_json(next((record[key] for key in _TOOLS if record.get(key) not in _EMPTY), []), where) or []
    if not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
        raise UserError(f"{where}: tools are no list of JSON schemas; write OpenAI's tools")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)


def _from_json(value: Any, where: str) -> Any:
    """Return ``value``, read if it is a text that should hold JSON."""
    return parse_json(value, where) if isinstance(value, str) else value


def _without_none(value: Any) -> Any:
    """Return ``value`` without the keys that a row of a table has only because other rows have them."""
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def _files_inside(folder: Path) -> list[Path]:
    found = sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not found:
        raise UserError(f"{folder}: no {', '.join(SUFFIXES)} file in it; name the folder the chats lie in")
    return found


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield each record after "file:" and its line, place in the list, or row, from 1."""
    if file.suffix == ".jsonl":
        yield from read_json_lines(file)
        return
    if file.suffix == ".parquet":
        require_pyarrow([file])
        records: Iterable[Any] = map(_without_none, read_parquet(file))
    else:
        records = parse_json(read_text(file, most=MOST_DATA_BYTES), str(file))
        if not isinstance(records, list):
            raise UserError(f"{file}: is no list of records; write one a line into a .jsonl file")
    for number, record in enumerate(records, 1):
        yield f"{file}:{number}", record


@dataclass(frozen=True)
class Example:
    """One chat as the model is given it.

    Attributes:
        tokens: [n] int64.
        targets: [n] int64, the token that should follow each; ``IGNORED`` where that is not trained on.
    """

    tokens: Tensor
    targets: Tensor

    @property
    def target_count(self) -> int:
        """Number of tokens that are trained on."""
        return int((self.targets != IGNORED).sum())


Window = tuple[Example, ...]


@dataclass(frozen=True)
class TokenisedChats:
    """Windows of one example each, of pairs of two, and what was lost.

    Attributes:
        windows: at least one of each chat, unless it has no answer before the cut.
        cut: how many lost their end.
        dropped: where those stand that have no answer before that.
        same: where pairs stand whose two answers are the same.
        left_out: what the template leaves out, and of how many chats.
    """

    windows: list[Window]
    cut: int
    dropped: list[str]
    same: list[str]
    left_out: Counter[str]


def tokenise_chats(
    chats: Sequence[Chat],
    template: ChatTemplate,
    max_length: int,
    train_on_all: bool = False,
    progress: Callable[[int], None] = lambda chats: None,
) -> TokenisedChats:
    """Return ``chats`` as examples of at most ``max_length`` tokens.

    Args:
        chats: in order.
        template: how they become tokens.
        max_length: a longer one loses its end.
        train_on_all: every token is a target, not only the assistant's.
        progress: called with the number of chats done since the last call.
    """
    made, cut = TokenisedChats([], 0, [], [], Counter()), 0
    for chat in chats:
        progress(1)
        sides = [chat] if chat.rejected is None else [chat, chat.rejected]
        try:
            encoded = [encode_chat(template, one.messages, one.trained, one.tools, train_on_all) for one in sides]
        except UserError as error:
            raise UserError(f"{chat.where}: {error}") from None
        made.left_out.update({note for one in encoded for note in one.notes})
        last = slice(0 if chat.rejected is None else -1, None)
        for rows in zip(*(one.examples[last] for one in encoded), strict=True):
            cut += max(len(tokens) for tokens, _ in rows) > max_length + 1
            window = tuple(_example(tokens[: max_length + 1], is_target) for tokens, is_target in rows)
            if not all(example.target_count for example in window):
                made.dropped.append(chat.where)
                continue
            made.windows.append(window)
            if len({tuple(example.targets.tolist()) for example in window}) < len(window):
                made.same.append(chat.where)
    if not made.windows:
        raise UserError(f"max_length: no answer begins within {max_length} tokens; raise it")
    return replace(made, cut=cut)


def _example(tokens: Sequence[int], is_target: Sequence[bool]) -> Example:
    row, counts = torch.tensor(tokens, dtype=torch.int64), torch.tensor(is_target[1 : len(tokens)], dtype=torch.bool)
    return Example(row[:-1], row[1:].where(counts, IGNORED))


def pack_examples(examples: Sequence[Example], max_length: int) -> list[Window]:
    """Return windows of at most ``max_length`` tokens with all ``examples``, longest first into the fullest fit."""
    windows: list[list[Example]] = []
    room: list[tuple[int, int]] = []  # what is free in each window, and its number, in order
    for example in sorted(examples, key=lambda e: -len(e.tokens)):  # stable: examples of one length stay in order
        length = len(example.tokens)
        place = bisect.bisect_left(room, (length, -1))
        if place == len(room):
            windows.append([])
            free, number = max_length, len(windows) - 1
        else:
            free, number = room.pop(place)
        windows[number].append(example)
        bisect.insort(room, (free - length, number))
    return [tuple(window) for window in windows]


@dataclass
class ChatBatch(TensorBatch):
    """Windows side by side, padded on the right.

    Attributes:
        tokens: [B, S] int64, padding 0.
        targets: [B, S] int64, ``IGNORED`` where nothing is trained on.
        documents: [B, S] int64, the number of the chat in its window; None where each is alone in its window.
        target_count: how many targets the batch has, all of its microbatches together.
        microbatches: into how many of its size a batch was split, whose loss is the mean of theirs.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None
    target_count: int
    microbatches: int = 1

    def __len__(self) -> int:
        return len(self.tokens)

    def chunk(self, count: int) -> list[ChatBatch]:
        """Return ``count`` microbatches of equal size with the windows in their order."""
        size = len(self) // count
        rows = [slice(first, first + size) for first in range(0, len(self), size)]
        return [
            replace(self.map_tensors(operator.itemgetter(part)), microbatches=self.microbatches * count)
            for part in rows
        ]


def collate_windows(windows: Sequence[Window]) -> ChatBatch:
    """Return ``windows`` of one batch, stacked."""
    longest = max(sum(len(e.tokens) for e in window) for window in windows)
    shape = (len(windows), longest)
    tokens, targets = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED)
    documents = torch.full(shape, -1)
    for row, window in enumerate(windows):
        start = 0
        for number, example in enumerate(window):
            place = slice(start, start + len(example.tokens))
            tokens[row, place], targets[row, place], documents[row, place] = example.tokens, example.targets, number
            start = place.stop
    alone = all(len(window) == 1 for window in windows)
    return ChatBatch(tokens, targets, None if alone else documents, target_count(windows))


def target_count(windows: Iterable[Window]) -> int:
    """Return how many tokens of ``windows`` are trained on."""
    return sum(example.target_count for window in windows for example in window)


class ChatSampler(PlannedBatchSampler):
    """Batch sampler over windows: yields lists of their numbers; ``collate`` makes a batch of the windows."""

    collate = staticmethod(collate_windows)

    def __init__(self, windows: Sequence[Window], batch_size: int, seed: int, dp_rank: DataParallelRank = ALL) -> None:
        super().__init__(dp_rank)
        self._lengths = [sum(len(e.tokens) for e in window) for window in windows]
        self._targets = [target_count([window]) for window in windows]
        self._size, self._seed = batch_size, seed

    def weight(self, batch: Sequence[int]) -> int:
        """Return the number of a batch's targets."""
        return sum(self._targets[index] for index in batch)

    def plan_epoch(self, epoch: int) -> list[list[int]]:
        """Return the epoch's batches: shuffled, then sorted by length within pools, then the batches shuffled."""
        draws = torch.Generator().manual_seed(derive_seed("instruction order", self._seed, epoch))
        order: list[int] = torch.randperm(len(self._lengths), generator=draws).tolist()
        pool, plan = self._size * _POOL, list[list[int]]()
        for start in range(0, len(order), pool):
            part = sorted(order[start : start + pool], key=lambda index: -self._lengths[index])
            plan += [part[i : i + self._size] for i in range(0, len(part), self._size)]
        return [plan[i] for i in torch.randperm(len(plan), generator=draws).tolist()]


class PairSampler(ChatSampler):
    """The same over pairs (``library.llm.preferences``): each counts the same, however long its answers are."""

    @staticmethod
    def collate(windows: Sequence[Window]) -> ChatBatch:
        """Return pairs of one batch, stacked: ``tokens`` and ``targets`` are [B, 2, S], the chosen answer first."""
        rows = collate_windows([(example,) for pair in windows for example in pair])
        return rows.map_tensors(lambda tensor: tensor.unflatten(0, (-1, 2)))

    def weight(self, batch: Sequence[int]) -> int:
        """Return the number of a batch's pairs."""
        return len(batch)
