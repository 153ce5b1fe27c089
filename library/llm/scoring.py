"""How likely a language model finds given tokens: the sum every evaluation is made of.

A :class:`Span` is tokens of which the last few are scored, each given all before it. Spans of similar length share a
batch, padded at their ends (attention is causal, so what comes behind changes nothing). Logits are made for the scored
tokens only and a piece at a time; probabilities are fp32, sums over a span float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from library.errors import UserError
from library.models.transformer_lm import TransformerLM

_LOGITS = 1 << 22  # held at once: 16 MiB in fp32
_BATCHES = 32  # of spans that are looked at together, to find those of similar length


class Span(NamedTuple):
    """Tokens, the last ``scored`` of which are to be predicted; at least one more comes before them."""

    tokens: Sequence[int]
    scored: int


class Score(NamedTuple):
    """What the model says of a span: the log probability of its scored tokens, and whether each was the likeliest."""

    log_probability: float
    greedy: bool


@torch.inference_mode()
def score_spans(
    model: TransformerLM,
    spans: Iterable[Span],
    batch_size: int,
    progress: Callable[[Sequence[Span]], None] = lambda batch: None,
) -> Iterator[Score]:
    """Yield the score of every span, in order.

    Args:
        model: in eval mode, on any device.
        spans: read a few batches ahead.
        batch_size: spans in a forward pass.
        progress: called with every batch of spans that was scored.

    Raises:
        UserError: a token that the model does not have, or more tokens than its learned positions.
    """
    coming = iter(spans)
    while group := list(itertools.islice(coming, batch_size * _BATCHES)):
        order = sorted(range(len(group)), key=lambda i: len(group[i].tokens), reverse=True)
        scores: dict[int, Score] = {}
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            own = [group[i] for i in batch]
            scores |= zip(batch, _score_batch(model, own), strict=True)
            progress(own)
        yield from (scores[i] for i in range(len(group)))


def _score_batch(model: TransformerLM, spans: Sequence[Span]) -> list[Score]:
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
    log_probabilities, likeliest = _of_targets(model, hidden, tokens[:, 1:][wanted])
    lengths = [span.scored for span in spans]
    sums = [float(part.double().sum()) for part in log_probabilities.cpu().split(lengths)]
    return [Score(total, bool(top.all())) for total, top in zip(sums, likeliest.cpu().split(lengths), strict=True)]


def _of_targets(model: TransformerLM, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log probability of each target, fp32 [N], and whether it is the likeliest token, bool [N]."""
    vocab_size = model.config.vocab_size
    step = max(64, _LOGITS // vocab_size)
    found, top = [], []
    for rows, wanted in zip(hidden.split(step), targets.split(step), strict=True):
        logits = model.lm_head(rows)[:, :vocab_size].float()
        found.append(logits.log_softmax(dim=-1).gather(1, wanted[:, None])[:, 0])
        top.append(logits.argmax(dim=-1) == wanted)
    return torch.cat(found), torch.cat(top)
