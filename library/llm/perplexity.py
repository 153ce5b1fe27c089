"""Perplexity of texts longer than a model's context, by a sliding window.

A document is the token that begins a text, which is only given, and its own tokens, each predicted once. A window
reads at most ``context`` tokens; the next one begins ``stride`` further and scores only what no window before it did,
so a token has at least ``context - stride`` tokens before it (fewer at a document's beginning). This is the evaluation
of transformers' guide to perplexity of fixed-length models; documents never see each other, as in
lm-evaluation-harness.

The sum of -log p is given per token, per byte and per word: only the last two can be compared between tokenizers.

    perplexity = exp(sum / tokens)    bits per byte = sum / (bytes * log 2)    word perplexity = exp(sum / words)

Bytes are those of the text in UTF-8, words what blanks divide.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from library.errors import UserError
from library.llm.scoring import Span, score_spans
from library.llm.token_shards import TokenShards
from library.llm.tokenizers import Tokenizer
from library.models.transformer_lm import TransformerLM

_LARGEST = 700.0  # its exponential is still a float64


@dataclass(frozen=True)
class Document:
    """A text's tokens without those that begin and end it, and its size."""

    tokens: np.ndarray
    bytes: int
    words: int


@dataclass(frozen=True)
class Perplexity:
    """What was measured, ``nats`` being the sum of -log p."""

    nats: float
    documents: int
    tokens: int
    bytes: int
    words: int
    context: int
    stride: int

    @property
    def loss(self) -> float:
        """Mean cross-entropy of a token."""
        return self.nats / self.tokens

    def as_dict(self) -> dict[str, float | int]:
        """Return sums and means, ready to be shown and saved."""
        return {
            "loss": self.loss,
            "perplexity": exp(min(self.loss, _LARGEST)),
            "bits_per_byte": self.nats / (self.bytes * log(2)),
            "byte_perplexity": exp(min(self.nats / self.bytes, _LARGEST)),
            "word_perplexity": exp(min(self.nats / self.words, _LARGEST)),
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "words": self.words,
            "context": self.context,
            "stride": self.stride,
        }


def text_documents(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Document]:
    """Yield ``texts`` as documents."""
    for text in texts:
        tokens = np.asarray(tokenizer.encode(text), dtype=np.uint32)
        yield Document(tokens, len(text.encode("utf-8", "surrogatepass")), len(text.split()))


def shard_documents(shards: TokenShards, tokenizer: Tokenizer) -> Iterator[Document]:
    """Yield the documents of a prepared corpus; their bytes and words are those of the decoded tokens."""
    ends = [0, *shards.document_ends().tolist()]
    for start, end in itertools.pairwise(map(int, ends)):
        tokens = shards.read(start, end - start - 1)  # without the token that ends it
        if tokenizer.bos not in (None, tokenizer.eos):
            tokens = tokens[1:]
        text = tokenizer.decode(tokens.tolist())
        yield Document(tokens.astype(np.uint32), len(text.encode("utf-8")), len(text.split()))


def first_token(tokenizer: Tokenizer) -> int:
    """Return the token that a text begins with: the tokenizer's first one, or its last one where it has no first.

    Raises:
        UserError: it has neither, so nothing could predict a text's beginning.
    """
    first = tokenizer.bos if tokenizer.bos is not None else tokenizer.eos
    if first is None:
        raise UserError("the tokenizer has no token that begins or ends a text; add <|endoftext|> to it")
    return first


def windows(tokens: Sequence[int] | np.ndarray, first: int, context: int, stride: int) -> Iterator[Span]:
    """Yield the spans that score every token of a document once.

    Args:
        tokens: of the document.
        first: stands before them.
        context: tokens a window reads.
        stride: between the beginnings of windows, at most ``context``.
    """
    whole = [first, *tokens]
    begin = done = 0  # done: predicted so far
    while done < len(tokens):
        end = min(begin + context, len(tokens))
        yield Span(whole[begin : end + 1], end - done)
        begin, done = begin + stride, end


def measure_perplexity(
    model: TransformerLM,
    documents: Sequence[Document],
    first: int,
    context: int,
    stride: int,
    batch_size: int,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Perplexity:
    """Return the perplexity of ``documents``.

    Args:
        model: in eval mode.
        documents: each on its own.
        first: of :func:`first_token`.
        context, stride: of the sliding window.
        batch_size: windows in a forward pass.
        progress: called with the number of tokens that were scored.

    Raises:
        UserError: ``context`` or ``stride`` do not fit, there is nothing to score, or tokens are not the model's.
    """
    if not 1 <= stride <= context:
        raise UserError(f"--stride: {stride} does not fit; give 1 to the context of {context}")
    if not model.config.has_rope and context > model.config.context:
        raise UserError(f"--context: {context} is more than the model's {model.config.context} positions; lower it")
    tokens = sum(len(document.tokens) for document in documents)
    if tokens == 0:
        raise UserError("no document holds a token; give a file with text in it")
    spans = itertools.chain.from_iterable(windows(document.tokens, first, context, stride) for document in documents)
    scores = score_spans(model, spans, batch_size, lambda batch: progress(sum(span.scored for span in batch)))
    nats = -sum(score.log_probability for score in scores)
    sizes = (sum(document.bytes for document in documents), sum(document.words for document in documents))
    return Perplexity(nats, len(documents), tokens, *sizes, context, stride)
