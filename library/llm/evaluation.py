"""Evaluating a language model: log-likelihoods of spans, perplexity of texts, multiple-choice questions.

Everything is a sum of log-likelihoods. A :class:`Span` is tokens of which the last few are scored, each given all
before it. Spans of similar length share a batch, padded at their ends (attention is causal, so what comes behind
changes nothing). Logits are computed for the scored tokens only, a chunk at a time; probabilities are fp32, sums over a
span float64.

**Perplexity** of texts longer than a model's context, by a sliding window, as in transformers' guide to perplexity of
fixed-length models: a document is what the tokenizer makes of a text, with bos and eos where it adds them. Its first
token is only given, each other one is predicted once; where nothing stands before a text, that is the text's own first
token (lm-evaluation-harness puts bos or eos before it, which a folder and its GGUF may name differently). A window
reads at most ``context`` tokens; the next one begins ``stride`` further and scores only what no window before it did,
so a token has at least ``context - stride`` tokens before it (fewer at a document's beginning). Documents never see
each other. Only the metrics per byte (of UTF-8) and per word (divided by blanks) can be compared between tokenizers,
and only of documents long enough that one token does not count:

    perplexity = exp(sum / tokens)    bits per byte = sum / (bytes * log 2)    word perplexity = exp(sum / words)

**Multiple choice**: the choice is taken that the model finds most probable. Files are HellaSwag's own
(https://github.com/rowanz/hellaswag): a JSON object a line with ``ctx``, ``endings`` and ``label``. Definitions are
lm-evaluation-harness's, version 1.0 of its task:

- the context is "activity_label: ctx_a Ctx_b" where a line has these keys, else ``ctx``; WikiHow's bracketed marks are
  taken out of context and endings (``[title]`` becomes a full stop);
- a choice's score is log p(" " + ending | context);
- ``acc``: the highest score is the labelled ending's; ``acc_norm``: the highest score divided by the ending's
  characters is.

A context that does not fit loses its beginning. What stands before a text is put in front; where the context is empty
and nothing stands before a text, eos is, as in the harness.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from pathlib import Path
from statistics import stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from library.errors import UserError
from library.files import read_json_lines
from library.llm.token_batches import TokenShards, document_frame
from library.llm.tokenizer_files import load_tokenizer
from library.llm.tokenizers import Tokenizer
from library.models.llm.model import TransformerLM

_LOGITS = 1 << 22  # held at once: 16 MiB in fp32
_BATCHES = 32  # of spans that are looked at together, to find those of similar length


class Span(NamedTuple):
    """Tokens, the last ``scored`` of which are to be predicted; at least one more comes before them."""

    tokens: Sequence[int]
    scored: int


@torch.inference_mode()
def score_spans(
    model: TransformerLM,
    spans: Iterable[Span],
    batch_size: int,
    progress: Callable[[Sequence[Span]], None] = lambda batch: None,
) -> Iterator[float]:
    """Yield the log probability of every span's scored tokens, in order.

    Args:
        model: in eval mode, on any device.
        spans: read a few batches ahead.
        batch_size: spans in a forward pass.
        progress: called with every batch of spans that was scored.
    """
    coming = iter(spans)
    while group := list(itertools.islice(coming, batch_size * _BATCHES)):
        order = sorted(range(len(group)), key=lambda i: len(group[i].tokens), reverse=True)
        scores: dict[int, float] = {}
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            batch_spans = [group[i] for i in batch]
            scores |= zip(batch, _score_batch(model, batch_spans), strict=True)
            progress(batch_spans)
        yield from (scores[i] for i in range(len(group)))


def _score_batch(model: TransformerLM, spans: Sequence[Span]) -> list[float]:
    longest, vocab_size = max(len(span.tokens) for span in spans), model.config.vocab_size
    device = model.embedding.weight.device
    tokens = torch.zeros(len(spans), longest, dtype=torch.int64)
    wanted = torch.zeros(len(spans), longest - 1, dtype=torch.bool)
    for row, span in enumerate(spans):
        assert 0 < span.scored < len(span.tokens)
        tokens[row, : len(span.tokens)] = torch.as_tensor(span.tokens, dtype=torch.int64)
        wanted[row, len(span.tokens) - 1 - span.scored : len(span.tokens) - 1] = True
    if int(tokens.max()) >= vocab_size:
        raise UserError(
            f"token {int(tokens.max())} is beyond the model's {vocab_size}; use the tokenizer it was trained with"
        )
    tokens, wanted = tokens.to(device), wanted.to(device)
    hidden = model.hidden(tokens[:, :-1])[wanted]  # [N, W], rows of spans one behind the other
    log_probabilities = _of_targets(model, hidden, tokens[:, 1:][wanted]).cpu()
    return [float(part.double().sum()) for part in log_probabilities.split([span.scored for span in spans])]


def _of_targets(model: TransformerLM, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the log probability of each target, fp32 [N]."""
    vocab_size = model.config.vocab_size
    step = max(64, _LOGITS // vocab_size)
    found = []
    for rows, wanted in zip(hidden.split(step), targets.split(step), strict=True):
        logits = model.lm_head(rows)[:, :vocab_size].float()
        found.append(logits.log_softmax(dim=-1).gather(1, wanted[:, None])[:, 0])
    return torch.cat(found)


_LARGEST = 700.0  # its exponential is still a float64


@dataclass(frozen=True)
class Document:
    """A text's tokens, those before and behind it included, and its size."""

    tokens: Sequence[int]
    bytes: int
    words: int

    @property
    def scored(self) -> int:
        """Number of tokens that are predicted: all but the first."""
        return max(0, len(self.tokens) - 1)


def text_documents(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Document]:
    """Yield ``texts`` as documents."""
    for text in texts:
        size = len(text.encode("utf-8", "surrogatepass"))
        yield Document(array("I", tokenizer.encode_whole(text)), size, len(text.split()))


def shard_documents(shards: TokenShards, tokenizer: Tokenizer) -> Iterator[Document]:
    """Yield the documents of a prepared corpus; their bytes and words are those of the decoded tokens."""
    own = load_tokenizer(shards.folder)
    before, after = document_frame(own)
    eos, corpus = after[-1], shards.read(0, shards.tokens)
    eos_each = [*before, *after].count(eos)  # in each document; its text has none
    last = np.flatnonzero(corpus == eos)[eos_each - 1 :: eos_each]
    for document in np.split(corpus, last + 1)[:-1]:
        tokens = document[len(before) : len(document) - len(after)].tolist()
        text = own.decode(tokens)
        whole = [*tokenizer.begins, *tokens, *tokenizer.ends]
        yield Document(array("I", whole), len(text.encode("utf-8")), len(text.split()))


def windows(tokens: Sequence[int], context: int, stride: int) -> Iterator[Span]:
    """Yield the spans that score every token of a document but the first once.

    Args:
        tokens: of the document.
        context: tokens a window reads.
        stride: between the beginnings of windows, at most ``context``.
    """
    begin = done = 0  # done: predicted so far
    while done < len(tokens) - 1:
        end = min(begin + context, len(tokens) - 1)
        yield Span(tokens[begin : end + 1], end - done)
        begin, done = begin + stride, end


def measure_perplexity(
    model: TransformerLM,
    documents: Sequence[Document],
    context: int,
    stride: int,
    batch_size: int,
    progress: Callable[[int], None] = lambda tokens: None,
) -> dict[str, float | int]:
    """Return the perplexity of ``documents``, per token, byte and word, and the sums that it was computed from.

    Args:
        model: in eval mode.
        documents: each on its own.
        context, stride: of the sliding window.
        batch_size: windows in a forward pass.
        progress: called with the number of tokens that were scored.
    """
    assert 1 <= stride <= context
    tokens = sum(document.scored for document in documents)
    if tokens == 0:
        raise UserError("no document holds a token to predict; give a file with more text in it")
    spans = itertools.chain.from_iterable(windows(document.tokens, context, stride) for document in documents)
    scores = score_spans(model, spans, batch_size, lambda batch: progress(sum(span.scored for span in batch)))
    nats = -sum(scores)
    size, words = sum(document.bytes for document in documents), sum(document.words for document in documents)
    return {
        "loss": nats / tokens,
        "perplexity": exp(min(nats / tokens, _LARGEST)),
        "bits_per_byte": nats / (size * log(2)),
        "word_perplexity": exp(min(nats / words, _LARGEST)),
        "documents": len(documents),
        "tokens": tokens,
        "bytes": size,
        "words": words,
        "context": context,
        "stride": stride,
    }


@dataclass(frozen=True)
class Question:
    """A context, what may follow it, and which of these does."""

    context: str
    choices: tuple[str, ...]
    answer: int


def read_questions(file: str | Path, limit: int | None = None) -> list[Question]:
    """Return the questions of ``file``, the first ``limit`` if given."""
    questions = [_question(row, where) for where, row in itertools.islice(read_json_lines(file), limit)]
    if not questions:
        raise UserError(f"{file}: holds no question; give a jsonl file in HellaSwag's format")
    return questions


def _question(row: Any, where: str) -> Question:
    if not isinstance(row, dict):
        raise UserError(f"{where}: no JSON object; a question has ctx, endings and label")
    for key in ("ctx", "endings", "label"):
        if key not in row:
            raise UserError(f"{where}: no key {key!r}; a question has ctx, endings and label")
    endings = row["endings"]
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(e, str) and e.strip() for e in endings):
        raise UserError(f"{where}: endings must be a list of two texts or more; correct the line")
    label = str(row["label"]).strip()
    if not label.isdecimal() or int(label) >= len(endings):
        raise UserError(f"{where}: label {row['label']!r} is none of 0 to {len(endings) - 1}; give a labelled split")
    choices = tuple(map(without_marks, endings))
    if not all(choices):
        raise UserError(f"{where}: an ending is empty without its bracketed marks; correct the line")
    return Question(without_marks(_context(row, where)), choices, int(label))


def _context(row: dict[str, Any], where: str) -> str:
    keys = ("activity_label", "ctx_a", "ctx_b") if {"activity_label", "ctx_a", "ctx_b"} <= row.keys() else ("ctx",)
    for key in keys:
        if not isinstance(row[key], str):
            raise UserError(f"{where}: {key} must be text; correct the line")
    if keys == ("ctx",):
        return row["ctx"]
    # capitalize also makes the rest of ctx_b lower case; scores are compared with others', so this does too
    return f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"


def without_marks(text: str) -> str:
    """Return ``text`` without WikiHow's bracketed marks; blanks are cut and joined in the harness's order."""
    sentences = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", sentences).replace("  ", " ")


def continuation_span(tokenizer: Tokenizer, context: str, continuation: str, longest: int) -> Span:
    """Return the span that scores ``continuation`` behind ``context``.

    They are tokenised together, so that a word is not cut where they meet; blanks at the context's end belong to the
    continuation.

    Args:
        tokenizer: of the model.
        context: may be empty; then what stands before a text, or else eos, is in its place.
        continuation: what is scored.
        longest: tokens a model reads; the context's beginning is cut off.
    """
    kept = context.rstrip()
    whole, given = tokenizer.encode(context + continuation), tokenizer.encode(kept)
    begins = tokenizer.begins or ([] if given else tokenizer.encode_prompt(""))
    scored = len(whole) - len(given)
    if not 0 < scored <= min(longest, len(begins) + len(whole) - 1):
        raise UserError(f"{continuation[:40]!r}: {scored} tokens do not fit into {longest}; raise --context")
    return Span([*begins, *whole][-(longest + 1) :], scored)


def answer_questions(
    model: TransformerLM,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    context: int,
    batch_size: int,
    progress: Callable[[int], None] = lambda choices: None,
) -> list[list[float]]:
    """Return the log probability of every choice of every question.

    Args:
        model: in eval mode.
        tokenizer: its own.
        questions: of :func:`read_questions`.
        context: tokens the model reads at most.
        batch_size: choices in a forward pass.
        progress: called with the number of choices that were scored.
    """
    spans = [continuation_span(tokenizer, q.context, f" {choice}", context) for q in questions for choice in q.choices]
    scores = score_spans(model, spans, batch_size, lambda batch: progress(len(batch)))
    return [[next(scores) for _ in question.choices] for question in questions]


def accuracies(questions: Sequence[Question], scores: Sequence[Sequence[float]]) -> dict[str, float | int]:
    """Return accuracy, length-normalised accuracy, their standard errors and the number of questions."""
    right = [_largest(each) == question.answer for question, each in zip(questions, scores, strict=True)]
    right_normed = []
    for question, each in zip(questions, scores, strict=True):
        normed = [score / len(choice) for score, choice in zip(each, question.choices, strict=True)]
        right_normed.append(_largest(normed) == question.answer)
    return {
        "acc": sum(right) / len(right),
        "acc_stderr": _standard_error(right),
        "acc_norm": sum(right_normed) / len(right),
        "acc_norm_stderr": _standard_error(right_normed),
        "questions": len(right),
    }


def _largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)  # the first of equals, as numpy.argmax


def _standard_error(right: Sequence[bool]) -> float:
    """Return the standard error of a mean (sample variance, as the harness's)."""
    return 0.0 if len(right) < 2 else stdev(map(float, right)) / sqrt(len(right))
