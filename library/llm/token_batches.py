"""A corpus for pretraining: tokenised into shards, read back in shuffled windows.

    documents -> write_corpus -> train_00000.bin ... -> TokenShards -> TokenBatches

    train_00000.bin, train_00001.bin, ...   tokens one behind the other, uint16 or (above 65,536 tokens) uint32
    train_00000.sums, ...                   CRC-32 of every 64 KiB of the .bin file, uint32
    validation_00000.bin, ...               the documents that are held out
    index.json                              dtype, vocabulary, for each split its shards and sizes; checksums of all
                                            other files, and of itself

A document is its tokens between those that the tokenizer puts before and behind a text; eos is always the last one.
Documents are read and tokenised some megabytes of text at a time, with all cores. Which documents are held
out is a function of seed and document. ``index.json`` is written last.

Shards are read 64 KiB at a time, and what these hold is compared with its checksum whenever a window of them is used
(0.07 ms): a memory map would show bytes that change later unchecked, and the system kills a process whose mapped file
is cut off. An epoch cuts the corpus into windows of ``context`` tokens, from a start that
differs by epoch, and shuffles them. A position is an epoch and how many of its windows all processes together have
seen; which windows come next follows from it and the seed alone. So a run goes on with another batch size or number of
processes, and sees every window once. The last step of an epoch has the windows that are left.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from library.checksums import checksum, read_checked_json, write_checked_json
from library.data.batches import ALL, DataParallelRank, MicroStep
from library.errors import UserError
from library.files import open_own
from library.llm.tokenizer_files import load_tokenizer
from library.llm.tokenizers import Tokenizer
from library.randomness import derive_seed, python_random

Split = Literal["train", "validation"]
_FORMAT = "tandem-tokens-2"
INDEX = "index.json"
_CHUNK = 1 << 22  # characters that are tokenised at once
_BLOCK = 1 << 16  # bytes with a checksum


@dataclass
class SplitIndex:
    """What ``index.json`` says of a split."""

    tokens: int = 0
    documents: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)  # file, tokens, documents, checksum of sums


class ShardWriter:
    """Writes documents of one split, a new shard whenever one is full; a document never spans two."""

    def __init__(self, folder: Path, split: Split, dtype: np.dtype, shard_tokens: int) -> None:
        self.index = SplitIndex()
        self._folder, self._split, self._dtype, self._limit = folder, split, dtype, shard_tokens
        self._file: Any = None

    def add(self, document: np.ndarray) -> None:
        """Append one document."""
        if self._file is not None and self.index.shards[-1]["tokens"] + len(document) > self._limit:
            self.close()
        if self._file is None:
            name = f"{self._split}_{len(self.index.shards):05d}.bin"
            self.index.shards.append({"file": name, "tokens": 0, "documents": 0})
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self._folder / name, "wb")  # noqa: SIM115 - open until the shard is full
        self._file.write(document.astype(self._dtype).tobytes())
        self.index.tokens += len(document)
        self.index.documents += 1
        self.index.shards[-1]["tokens"] += len(document)
        self.index.shards[-1]["documents"] += 1

    def close(self) -> None:
        """Finish the shard that is being written."""
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        shard = self.index.shards[-1]
        file = self._folder / shard["file"]
        with open(file, "rb") as written:
            blocks = iter(lambda: written.read(_BLOCK), b"")
            np.asarray([zlib.crc32(block) for block in blocks], dtype=np.uint32).tofile(file.with_suffix(".sums"))
        shard["sums"] = checksum(file.with_suffix(".sums"))
        self._file = None


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest dtype that holds every token."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def write_index(folder: Path, dtype: np.dtype, vocab_size: int, splits: dict[Split, SplitIndex]) -> None:
    """Write ``index.json``, which makes the shards readable."""
    others = [path for path in sorted(folder.glob("*.*")) if path.suffix in (".json", ".txt", ".model")]
    about = {"format": _FORMAT, "dtype": dtype.name, "vocab_size": vocab_size}
    about["splits"] = {name: asdict(index) for name, index in splits.items()}
    about["files"] = {path.name: checksum(path) for path in others if path.name != INDEX}  # the tokenizer's
    write_checked_json(folder / INDEX, about)


def write_corpus(
    documents: Iterable[str],
    tokenizer_folder: Path,
    folder: Path,
    validation_share: float,
    seed: int,
    shard_tokens: int,
) -> dict[Split, SplitIndex]:
    """Tokenise ``documents`` and write shards and index into ``folder``; return what was written.

    Args:
        documents: texts.
        tokenizer_folder: where the tokenizer is.
        folder: made if needed.
        validation_share: of the documents that are held out; 0 for none.
        seed: of the choice.
        shard_tokens: a shard's limit.
    """
    tokenizer = load_tokenizer(tokenizer_folder)
    before, after = (np.array(tokens, dtype=np.uint32) for tokens in document_frame(tokenizer))
    dtype = token_dtype(tokenizer.vocab_size)
    writers = {split: ShardWriter(folder, split, dtype, shard_tokens) for split in get_args(Split)}
    number = 0
    for chunk in _chunks(documents):
        for tokens in tokenizer.encode_all(chunk):
            whole = np.concatenate([before, np.asarray(tokens, dtype=np.uint32), after])
            writers[_split_of(number, validation_share, seed)].add(whole)
            number += 1
    for writer in writers.values():
        writer.close()
    _check(number, writers, validation_share)
    splits: dict[Split, SplitIndex] = {name: writer.index for name, writer in writers.items()}
    write_index(folder, dtype, tokenizer.vocab_size, splits)
    return splits


def document_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that stand before and behind each document of a corpus; the last one is eos."""
    if tokenizer.eos is None:
        raise UserError("the tokenizer has no token that ends a text; add <|endoftext|> to it")
    after = tokenizer.ends if tokenizer.ends[-1:] == [tokenizer.eos] else [*tokenizer.ends, tokenizer.eos]
    return tokenizer.begins, after


def _split_of(number: int, share: float, seed: int) -> Split:
    return "validation" if derive_seed(seed, "held out", number) < share * 2.0**63 else "train"


def _check(documents: int, writers: dict[Split, ShardWriter], share: float) -> None:
    held_out = writers["validation"].index.documents
    if documents == 0:
        raise UserError("the files hold no text; check them, and --text_key")
    if share > 0 and held_out in (0, documents):
        raise UserError(
            f"validation_share {share:g} puts {held_out} of {documents} documents aside; change it or --seed, divide "
            "files with --separator, or set it to 0"
        )


def _chunks(documents: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    size = 0
    for text in documents:
        chunk.append(text)
        size += len(text)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _spoilt(file: Path, why: str) -> UserError:
    return UserError(f"{file}: {why}; run tools/prepare_text.py again")


class TokenShards:
    """One split of a prepared corpus.

    Attributes:
        tokens: how many there are.
        vocab_size: of the tokenizer they were made with.
    """

    def __init__(self, folder: str | Path, split: Split) -> None:
        """Look at every shard.

        Raises:
            UserError: there is no corpus, a file of it is missing or damaged, or of another version of Tandem.
        """
        self.folder = Path(folder)
        try:
            about = read_checked_json(self.folder / INDEX)
            if about["format"] != _FORMAT:
                raise ValueError(f"format {about['format']!r}")
            index = SplitIndex(**about["splits"][split])
        except FileNotFoundError:
            raise UserError(f"{self.folder / INDEX}: no such file; run tools/prepare_text.py first") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _spoilt(self.folder / INDEX, f"damaged, or of another version of Tandem ({error})") from None
        self.tokens, self.documents, self.vocab_size = index.tokens, index.documents, int(about["vocab_size"])
        self._dtype = dtype = np.dtype(about["dtype"])
        for name, stored in about["files"].items():
            self._check(self.folder / name, stored)
        self._files, self._sums, self._starts, start = [], [], [], 0
        for shard in index.shards:
            file = self.folder / shard["file"]
            if not file.is_file() or file.stat().st_size != shard["tokens"] * dtype.itemsize:
                raise _spoilt(file, f"missing or of another size than {INDEX} says")
            self._check(file.with_suffix(".sums"), shard["sums"])
            self._files.append(file)
            self._sums.append(np.fromfile(file.with_suffix(".sums"), dtype=np.uint32))
            self._starts.append(start)
            start += shard["tokens"]

    @staticmethod
    def _check(file: Path, stored: str) -> None:
        try:
            fits = checksum(file) == stored
        except OSError as error:
            raise _spoilt(file, f"cannot be read ({error.strerror})") from None
        if not fits:
            raise _spoilt(file, "damaged (its checksum does not fit)")

    def _read_shard(self, shard: int, begin: int, end: int) -> np.ndarray:
        """Return the tokens ``begin`` to ``end`` of a shard, or to where it ends, after its blocks were checked."""
        file, size = self._files[shard], self._dtype.itemsize
        first, behind = begin * size // _BLOCK, -(-end * size // _BLOCK)
        try:
            with open_own(file) as data:
                data.seek(first * _BLOCK)
                blocks = [data.read(_BLOCK) for _ in self._sums[shard][first:behind]]
        except OSError as error:
            raise _spoilt(file, f"cannot be read ({error.strerror})") from None
        for block, content in enumerate(blocks, first):
            if zlib.crc32(content) != self._sums[shard][block]:
                raise _spoilt(file, f"damaged (the checksum of its bytes from {block * _BLOCK} does not fit)")
        tokens = np.frombuffer(b"".join(blocks), dtype=self._dtype)
        return tokens[begin - first * _BLOCK // size : end - first * _BLOCK // size]

    def read(self, start: int, length: int) -> np.ndarray:
        """Return tokens ``start`` to ``start + length`` as int64, across shards where need be.

        Raises:
            UserError: they are not what was written.
        """
        out = np.empty(length, dtype=np.int64)
        shard, filled = int(np.searchsorted(self._starts, start, side="right")) - 1, 0
        while filled < length:
            offset = start + filled - self._starts[shard]
            part = self._read_shard(shard, offset, offset + length - filled)
            out[filled : filled + len(part)] = part
            filled, shard = filled + len(part), shard + 1
        return out


class TokenBatches:
    """Shuffled windows of a split for one of several processes."""

    def __init__(
        self,
        shards: TokenShards,
        context: int,
        batch_size: int,
        seed: int,
        dp_rank: DataParallelRank = ALL,
        pinned: bool = False,
    ) -> None:
        """Plan the epochs; ``pinned`` batches can be copied to a GPU while it works."""
        # one window is given up, so that the start can move, and the last token is only a target
        self.windows = (shards.tokens - 1) // context - 1
        if self.windows < 1:
            raise UserError(
                f"{shards.folder}: {shards.tokens} tokens are fewer than two windows of {context}; lower context or "
                "add text"
            )
        self._shards, self._context, self._size, self._seed = shards, context, batch_size, seed
        self.dp_rank, self._pinned = dp_rank, pinned
        self._order: tuple[int, np.ndarray, int] | None = None
        self.set_position(0)

    @property
    def windows_in_step(self) -> int:
        """Windows of a full optimizer step, over all processes."""
        return self.dp_rank.step_batches * self._size

    def set_position(self, epoch: int, first_batch: int = 0) -> None:
        """Start the next pass in ``epoch`` (from 0) behind ``first_batch`` windows, counted over all processes."""
        self._epoch, self._first = epoch, first_batch

    def batches_per_epoch(self) -> int:
        """Windows of an epoch, as :meth:`set_position` counts them."""
        return self.windows

    def micro_steps(self) -> Iterator[MicroStep]:
        """Yield what the loop has to know of each batch of the next pass."""
        return (micro for _, micro in self._plan())

    def __iter__(self) -> Iterator[Tensor]:
        """Yield this process's batches, int64 [up to batch, context + 1], to the end of the epoch.

        Targets are one token further. The next batch is read while one is in use.
        """
        epoch, plan = self._epoch, self._plan()
        with ThreadPoolExecutor(1) as reader:
            coming = [reader.submit(self.read, epoch, windows) for windows, _ in islice(plan, 1)]
            while coming:
                batch = coming.pop().result()
                coming = [reader.submit(self.read, epoch, windows) for windows, _ in islice(plan, 1)]
                yield batch

    def read(self, epoch: int, windows: Iterable[int]) -> Tensor:
        """Return windows of an epoch, by their places in its order, int64 [n, context + 1]."""
        batch = torch.from_numpy(np.stack([self._window(epoch, place) for place in windows]))
        return batch.pin_memory() if self._pinned else batch

    def _plan(self) -> Iterator[tuple[range, MicroStep]]:
        """Yield the places of each of this process's batches.

        The epoch's last step has what is left, spread over the processes; one that gets none of it takes a window that
        is another's with the weight 0.
        """
        dp_rank, end = self.dp_rank, self.windows
        for begin in range(self._first, end, self.windows_in_step):
            in_step = min(self.windows_in_step, end - begin)
            for first in range(begin, begin + in_step, dp_rank.processes * self._size):
                behind = min(first + dp_rank.processes * self._size, begin + in_step)
                each = -(-(behind - first) // dp_rank.processes)
                places = range(min(first + dp_rank.rank * each, behind), min(first + (dp_rank.rank + 1) * each, behind))
                weight = dp_rank.step_batches * len(places) / in_step
                places = places or range(behind - 1, behind)
                yield places, MicroStep(weight, places.start, behind - first, behind - first, behind == begin + in_step)

    def _window(self, epoch: int, place: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            drawn = np.random.default_rng(derive_seed(self._seed, "window order", epoch))
            offset = python_random(self._seed, "window offset", epoch).randrange(self._context)
            self._order = epoch, drawn.permutation(self.windows), offset
        _, order, offset = self._order
        return self._shards.read(offset + int(order[place]) * self._context, self._context + 1)


def held_out_batches(shards: TokenShards, context: int, batch_size: int, most_tokens: int) -> Iterator[Tensor]:
    """Yield the split's first windows in order, int64 [up to batch, context + 1]."""
    windows = min((shards.tokens - 1) // context, max(1, most_tokens // context))
    if windows < 1:
        raise UserError(f"{shards.folder}: {shards.tokens} held-out tokens are less than a window of {context}")
    for begin in range(0, windows, batch_size):
        rows = [shards.read(i * context, context + 1) for i in range(begin, min(begin + batch_size, windows))]
        yield torch.from_numpy(np.stack(rows))
