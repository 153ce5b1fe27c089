"""Token shards: a corpus as numbers on disk, read through memory maps.

    train_00000.bin, train_00001.bin, ...   tokens one behind the other, uint16 or (above 65,536 tokens) uint32
    train_00000.ends, ...                   where each document ends, uint64, counted in tokens of the split
    validation_00000.bin, ...               the documents that are held out
    index.json                              dtype, vocabulary, and for each split its shards and sizes

A document is its tokens between the tokenizer's first token (where that differs from the last) and its last token.
``index.json`` is written when everything else is whole.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from library.errors import UserError
from library.files import write_text

Split = Literal["train", "validation"]
_FORMAT = "tandem-tokens-1"
INDEX = "index.json"


@dataclass
class SplitIndex:
    """What ``index.json`` says of a split."""

    tokens: int = 0
    documents: int = 0
    shards: list[dict[str, Any]] = field(default_factory=list)  # file, tokens, documents


class ShardWriter:
    """Writes documents of one split, a new shard whenever one is full; a document never spans two."""

    def __init__(self, folder: Path, split: Split, dtype: np.dtype, shard_tokens: int) -> None:
        self.index = SplitIndex()
        self._folder, self._split, self._dtype, self._limit = folder, split, dtype, shard_tokens
        self._file: Any = None
        self._ends: list[int] = []

    def add(self, document: np.ndarray) -> None:
        """Append one document."""
        if self._file is not None and self._shard_tokens() + len(document) > self._limit:
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
        self._ends.append(self.index.tokens)

    def close(self) -> None:
        """Finish the shard that is being written."""
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        stem = Path(self.index.shards[-1]["file"]).stem
        np.asarray(self._ends, dtype=np.uint64).tofile(self._folder / f"{stem}.ends")
        self._file, self._ends = None, []

    def _shard_tokens(self) -> int:
        return self.index.shards[-1]["tokens"]


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest dtype that holds every token."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def write_index(folder: Path, dtype: np.dtype, vocab_size: int, splits: dict[Split, SplitIndex]) -> None:
    """Write ``index.json``, which makes the shards readable."""
    about = {"format": _FORMAT, "dtype": dtype.name, "vocab_size": vocab_size}
    about["splits"] = {name: asdict(index) for name, index in splits.items()}
    write_text(folder / INDEX, json.dumps(about, indent=1) + "\n")


class TokenShards:
    """One split of a prepared corpus.

    Attributes:
        tokens: how many there are.
        vocab_size: of the tokenizer they were made with.
    """

    def __init__(self, folder: str | Path, split: Split) -> None:
        """Map every shard.

        Raises:
            UserError: the folder was not prepared, or not to its end, or a shard is damaged.
        """
        self.folder = Path(folder)
        try:
            about = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
            if about["format"] != _FORMAT:
                raise ValueError(f"format {about['format']!r}")
            own = SplitIndex(**about["splits"][split])
        except FileNotFoundError:
            raise UserError(f"{self.folder / INDEX}: no such file; run tools/prepare_text.py first") from None
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.folder / INDEX}: damaged ({error}); run tools/prepare_text.py again") from None
        self.tokens, self.documents, self.vocab_size = own.tokens, own.documents, int(about["vocab_size"])
        dtype = np.dtype(about["dtype"])
        self._maps, self._starts, start = [], [], 0
        for shard in own.shards:
            file = self.folder / shard["file"]
            if not file.is_file() or file.stat().st_size != shard["tokens"] * dtype.itemsize:
                raise UserError(
                    f"{file}: missing or of another size than {INDEX} says; run tools/prepare_text.py again"
                )
            self._maps.append(np.memmap(file, dtype=dtype, mode="r"))
            self._starts.append(start)
            start += shard["tokens"]

    def read(self, start: int, length: int) -> np.ndarray:
        """Return tokens ``start`` to ``start + length`` as int64, across shards where need be."""
        out = np.empty(length, dtype=np.int64)
        shard, filled = int(np.searchsorted(self._starts, start, side="right")) - 1, 0
        while filled < length:
            offset = start + filled - self._starts[shard]
            part = self._maps[shard][offset : offset + length - filled]
            out[filled : filled + len(part)] = part
            filled, shard = filled + len(part), shard + 1
        return out

    def document_ends(self) -> np.ndarray:
        """Return where each document ends, counted in tokens of the split."""
        stems = [Path(str(part.filename)).stem for part in self._maps]
        return np.concatenate([np.fromfile(self.folder / f"{stem}.ends", dtype=np.uint64) for stem in stems])
