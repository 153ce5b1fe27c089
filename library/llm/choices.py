"""Multiple-choice questions answered by likelihood: the choice is taken that the model finds most probable.

Files are HellaSwag's own (https://github.com/rowanz/hellaswag): a JSON object a line with ``ctx``, ``endings`` and
``label``. Definitions are lm-evaluation-harness's, version 1.0 of its task:

- the context is "activity_label: ctx_a Ctx_b" where a line has these keys, else ``ctx``; WikiHow's bracketed marks are
  taken out of context and endings (``[title]`` becomes a full stop);
- a choice's score is log p(" " + ending | context);
- ``acc``: the highest score is the labelled ending's; ``acc_norm``: the highest score divided by the ending's
  characters is.

A context that does not fit loses its beginning. The token that begins a text is put in front where the tokenizer has
one of its own (Llama's), as published tokenizers do; GPT-2's, which also ends texts, is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.errors import UserError
from library.llm.scoring import Span, score_spans
from library.llm.tokenizers import Tokenizer
from library.models.transformer_lm import TransformerLM


@dataclass(frozen=True)
class Question:
    """A context, what may follow it, and which of these does."""

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class ChoiceScores:
    """The log probability of every choice of every question."""

    questions: Sequence[Question]
    scores: Sequence[Sequence[float]]

    def as_dict(self) -> dict[str, float | int]:
        """Return accuracy, length-normalised accuracy, their standard errors and the number of questions."""
        right = [_largest(own) == question.answer for question, own in zip(self.questions, self.scores, strict=True)]
        right_normed = []
        for question, own in zip(self.questions, self.scores, strict=True):
            normed = [score / len(choice) for score, choice in zip(own, question.choices, strict=True)]
            right_normed.append(_largest(normed) == question.answer)
        count = len(self.questions)
        return {
            "acc": sum(right) / count,
            "acc_stderr": _standard_error(right),
            "acc_norm": sum(right_normed) / count,
            "acc_norm_stderr": _standard_error(right_normed),
            "questions": count,
        }


def read_questions(file: str | Path, limit: int | None = None) -> list[Question]:
    """Return the questions of ``file``, the first ``limit`` if given.

    Raises:
        UserError: the file cannot be read or holds no question, or a line is no question with an answer.
    """
    questions: list[Question] = []
    try:
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(questions) == limit:
                    break
                if line.strip():
                    questions.append(_question(line, f"{file}:{number}"))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 at byte {error.start}; give a jsonl file in HellaSwag's format") from None
    if not questions:
        raise UserError(f"{file}: holds no question; give a jsonl file in HellaSwag's format")
    return questions


def _question(line: str, where: str) -> Question:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: no JSON ({error}); correct the line") from None
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
        context: may be empty; then the token that begins (or ends) a text stands in its place.
        continuation: what is scored.
        longest: tokens a model reads; the context's beginning is cut off.

    Raises:
        UserError: the continuation alone is longer than that, or there is neither context nor first token.
    """
    kept = context.rstrip()
    whole, given = tokenizer.encode(context + continuation), tokenizer.encode(kept)
    begins = [] if tokenizer.bos in (None, tokenizer.eos) else [tokenizer.bos]
    if not begins and not given:
        begins = [token for token in (tokenizer.bos, tokenizer.eos) if token is not None][:1]
    scored = len(whole) - len(given)
    if not begins and not given:
        raise UserError("a question without context needs a token that begins a text; add <|endoftext|>")
    if not 0 < scored <= longest:
        raise UserError(f"{continuation[:40]!r}: {scored} tokens do not fit into {longest}; raise --context")
    return Span([*begins, *whole][-(longest + 1) :], scored)


def answer_questions(
    model: TransformerLM,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    context: int,
    batch_size: int,
    progress: Callable[[int], None] = lambda choices: None,
) -> ChoiceScores:
    """Return the score of every choice.

    Args:
        model: in eval mode.
        tokenizer: its own.
        questions: of :func:`read_questions`.
        context: tokens the model reads at most.
        batch_size: choices in a forward pass.
        progress: called with the number of choices that were scored.

    Raises:
        UserError: as :func:`continuation_span` and ``score_spans``.
    """
    spans = [continuation_span(tokenizer, q.context, f" {choice}", context) for q in questions for choice in q.choices]
    scores = score_spans(model, spans, batch_size, lambda batch: progress(len(batch)))
    return ChoiceScores(questions, [[next(scores).log_probability for _ in q.choices] for q in questions])


def _largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)  # the first of equals, as numpy.argmax


def _standard_error(right: Sequence[bool]) -> float:
    """Return the standard error of a mean (sample variance, as the harness's)."""
    count, mean = len(right), sum(right) / len(right)
    return 0.0 if count < 2 else (mean * (1 - mean) / (count - 1)) ** 0.5
