"""A corpus into token shards, by several processes, in the order of the documents.

The main process reads documents and hands out about a megabyte of text at a time; workers tokenise; results are taken
back in order, so the shards do not depend on the number of workers. No more than a few pieces per worker are under
way, so memory stays flat however large the corpus is. Which documents are held out is a function of seed and document.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import numpy as np

from library.errors import UserError
from library.llm.token_batches import ShardWriter, Split, SplitIndex, token_dtype, write_index
from library.llm.tokenizers import Tokenizer, load_tokenizer
from library.randomness import derive_seed

_PIECE = 1 << 20  # characters handed to a worker at once
_AHEAD = 3  # pieces under way for each worker

_worker: Tokenizer  # each process's own


def write_corpus(
    documents: Iterable[str],
    tokenizer_folder: Path,
    folder: Path,
    validation_share: float,
    seed: int,
    workers: int,
    shard_tokens: int,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> dict[Split, SplitIndex]:
    """Tokenise ``documents`` and write shards and index into ``folder``; return what was written.

    Args:
        documents: texts.
        tokenizer_folder: where each worker loads the tokenizer from.
        folder: made if needed.
        validation_share: of the documents that are held out; 0 for none.
        seed: of the choice.
        workers: processes; 0 tokenises in this one.
        shard_tokens: a shard's limit.
        progress: called with (documents, tokens) that were added.

    Raises:
        UserError: the tokenizer has no token that ends a text, there are no documents, or none or all of them fell to
            the held-out part.
    """
    tokenizer = load_tokenizer(tokenizer_folder)
    if tokenizer.eos is None:
        raise UserError(f"{tokenizer_folder}: the tokenizer has no token that ends a text; add <|endoftext|> to it")
    first = [] if tokenizer.bos in (None, tokenizer.eos) else [tokenizer.bos]
    before, after = np.array(first, dtype=np.uint32), np.array([tokenizer.eos], dtype=np.uint32)
    dtype = token_dtype(tokenizer.vocab_size)
    writers: dict[Split, ShardWriter] = {
        "train": ShardWriter(folder, "train", dtype, shard_tokens),
        "validation": ShardWriter(folder, "validation", dtype, shard_tokens),
    }
    number = 0
    for piece in _tokenised(_pieces(documents), tokenizer_folder, workers):
        for tokens in piece:
            writers[_split_of(number, validation_share, seed)].add(np.concatenate([before, tokens, after]))
            number += 1
        progress(len(piece), sum(map(len, piece)))
    for writer in writers.values():
        writer.close()
    _check(number, writers, validation_share)
    splits: dict[Split, SplitIndex] = {name: writer.index for name, writer in writers.items()}
    write_index(folder, dtype, tokenizer.vocab_size, splits)
    return splits


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


def _pieces(documents: Iterable[str]) -> Iterator[list[str]]:
    piece: list[str] = []
    size = 0
    for text in documents:
        piece.append(text)
        size += len(text)
        if size >= _PIECE:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _tokenised(pieces: Iterator[list[str]], tokenizer_folder: Path, workers: int) -> Iterator[list[np.ndarray]]:
    """Yield every piece's documents as tokens, in order."""
    if workers == 0:
        _start_worker(tokenizer_folder)
        yield from map(_tokenise, pieces)
        return
    context = multiprocessing.get_context("spawn")  # a fork would share the tokenizer's threads
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(tokenizer_folder,))
    under_way: deque[Future[list[np.ndarray]]] = deque()
    with pool:
        for piece in pieces:
            under_way.append(pool.submit(_tokenise, piece))
            if len(under_way) >= _AHEAD * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


def _start_worker(tokenizer_folder: Path) -> None:
    global _worker
    _worker = load_tokenizer(tokenizer_folder)


def _tokenise(texts: list[str]) -> list[np.ndarray]:
    return [np.asarray(_worker.encode(text), dtype=np.uint32) for text in texts]
