"""Perplexity and multiple choice against transformers, one token or one choice at a time, and against hand counts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from library.errors import UserError
from library.llm.evaluation import (
    Question,
    accuracies,
    answer_questions,
    continuation_span,
    measure_perplexity,
    read_questions,
    shard_documents,
    text_documents,
    windows,
    without_marks,
)
from library.llm.token_batches import TokenShards
from library.llm.tokenizer_files import load_tokenizer
from library.llm.tokenizers import Tokenizer, train_bpe
from library.models.llm.files import load_lm
from library.models.llm.model import TransformerLM
from tools.prepare_text import parser, prepare

TEXTS = [
    "The cat sat on the mät, and a dog ran around it; nobody knew why. " * 3,
    "Short.",
    "One day a bird found a red hat under the old tree and took it home to its nest.",
]
MARKS = {"gpt2": ("<|endoftext|>",), "llama": ("<|begin_of_text|>", "<|end_of_text|>")}


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TransformerLM, PreTrainedModel, Tokenizer]:
    """Ours, transformers' with the same random weights, and a tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    tokenizer = train_bpe(TEXTS, 300, MARKS[request.param])
    torch.manual_seed(0)
    if request.param == "gpt2":
        config = GPT2Config(vocab_size=tokenizer.vocab_size, n_positions=48, n_embd=32, n_layer=2, n_head=4)
        theirs: PreTrainedModel = GPT2LMHeadModel(config)
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        llama = LlamaConfig(vocab_size=tokenizer.vocab_size, num_key_value_heads=2, max_position_embeddings=48, **sizes)
        theirs = LlamaForCausalLM(llama)
    with torch.no_grad():
        for parameter in theirs.parameters():  # likelihoods that differ between tokens and contexts
            parameter.add_(torch.randn_like(parameter) * 0.15)
    theirs.eval().save_pretrained(folder)
    return load_lm(folder, torch.float32), theirs, tokenizer


@torch.no_grad()
def log_probability(model: PreTrainedModel, given: list[int], wanted: list[int]) -> float:
    """Return log p(wanted | given) from transformers' logits of the two together."""
    logits = model(torch.tensor([given + wanted])).logits[0].double().log_softmax(dim=-1)
    return sum(float(logits[len(given) - 1 + i, token]) for i, token in enumerate(wanted))


@pytest.mark.parametrize(("context", "stride"), [(24, 10), (24, 24), (16, 1), (47, 30)])
def test_perplexity_is_transformers_loss_on_the_same_windows(pair: tuple, context: int, stride: int) -> None:
    ours, theirs, tokenizer = pair
    losses: list[float] = []
    for text in TEXTS:
        whole = tokenizer.encode(text)  # with nothing before it (GPT-2): the text's first token is only given
        if tokenizer.bos != tokenizer.eos:
            whole = [0, *whole]
        for i in range(1, len(whole)):
            # the first window that reaches token i begins at a multiple of the stride
            begin = stride * max(0, math.ceil((i - context) / stride))
            ids = torch.tensor([whole[begin : i + 1]])
            labels = torch.full_like(ids, -100)
            labels[0, -1] = whole[i]
            with torch.no_grad():
                losses.append(theirs(ids, labels=labels).loss.item())
    documents = list(text_documents(TEXTS, tokenizer))
    found = measure_perplexity(ours, documents, context, stride, batch_size=3)
    assert (found["tokens"], found["documents"]) == (len(losses), 3)
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-5)  # fp32 sums of 32 numbers: 1e-6 each
    nats, sizes = math.fsum(losses), (sum(len(t.encode()) for t in TEXTS), sum(len(t.split()) for t in TEXTS))
    assert found["perplexity"] == pytest.approx(math.exp(nats / len(losses)), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(nats / sizes[0] / math.log(2), rel=1e-5)
    assert found["word_perplexity"] == pytest.approx(math.exp(nats / sizes[1]), rel=1e-3)  # an exponent of 20


def test_a_batch_changes_nothing(pair: tuple) -> None:
    ours, _, tokenizer = pair
    documents = list(text_documents(TEXTS, tokenizer))
    alone, together = (measure_perplexity(ours, documents, 20, 7, size)["loss"] for size in (1, 64))
    assert together == pytest.approx(alone, rel=1e-6)


def test_windows_score_every_token_once_and_give_it_what_the_stride_promises() -> None:
    for length in (0, 1, 2, 8, 9, 10, 31):
        tokens = list(range(length))
        spans = list(windows(tokens, context=8, stride=3))
        assert [token for span in spans for token in span.tokens[-span.scored :]] == tokens[1:]
        assert all(len(span.tokens) <= 9 for span in spans)
        for span in spans[1:]:
            assert len(span.tokens) - span.scored >= 8 - 3


def test_the_held_out_documents_of_a_corpus_measure_as_their_texts_do(pair: tuple, tmp_path: Path) -> None:
    ours, _, tokenizer = pair
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": f"{i} {TEXTS[i % 3]}"}) + "\n" for i in range(12)))
    tokenizer.save(tmp_path / "model")
    flags = ["--tokenizer", str(tmp_path / "model"), "--validation_share", "0.5"]
    prepare(parser().parse_args([str(tmp_path / "in.jsonl"), *flags, "--save_to", str(tmp_path / "out")]))
    shards, saved = TokenShards(tmp_path / "out", "validation"), load_tokenizer(tmp_path / "out")
    texts = [json.loads(line)["text"] for line in (tmp_path / "in.jsonl").read_text().splitlines()]
    documents = list(shard_documents(shards, saved))
    chosen = [text for text in texts if tokenizer.encode_whole(text) in [list(d.tokens) for d in documents]]
    assert 0 < len(chosen) < 12
    direct = measure_perplexity(ours, list(text_documents(chosen, tokenizer)), 24, 12, 4)
    assert measure_perplexity(ours, documents, 24, 12, 4) == pytest.approx(direct, rel=1e-6)


QUESTIONS = [
    {"ctx": "The cat sat", "endings": ["on the mat.", "under a tree and slept all day.", "nobody."], "label": 0},
    {"ctx": "One day a bird  ", "endings": ["found a hat.", "ran."], "label": "1"},
    {
        "activity_label": "Mending",
        "ctx_a": "A dog knew why.",
        "ctx_b": "the Bird",
        "ctx": "unused",
        "endings": ["[header] took it home [title] to its  nest", "sat", "ran around", "red"],
        "label": 2,
        "ind": 7,
    },
]


def write_questions(folder: Path) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("\n\n".join(map(json.dumps, QUESTIONS)) + "\n")
    return path


def test_scores_of_choices_are_transformers_one_at_a_time(pair: tuple, tmp_path: Path) -> None:
    ours, theirs, tokenizer = pair
    questions = read_questions(write_questions(tmp_path))
    assert questions[2].context == "Mending: A dog knew why. The bird"  # capitalize: the rest is lower case
    assert questions[2].choices[0] == " took it home. to its nest"
    begins = [tokenizer.bos] if tokenizer.bos != tokenizer.eos else []
    found = answer_questions(ours, tokenizer, questions, context=48, batch_size=4)
    for question, scores in zip(questions, found, strict=True):
        assert len(scores) == len(question.choices)
        for choice, score in zip(question.choices, scores, strict=True):
            given, whole = (tokenizer.encode(t) for t in (question.context.rstrip(), f"{question.context} {choice}"))
            expected = log_probability(theirs, begins + given, whole[len(given) :])
            assert score == pytest.approx(expected, rel=1e-5)


def test_a_long_context_loses_its_beginning(pair: tuple) -> None:
    _, _, tokenizer = pair
    whole = tokenizer.encode(TEXTS[0] + " and slept")
    span = continuation_span(tokenizer, TEXTS[0], " and slept", 20)
    assert list(span.tokens) == whole[-21:]
    assert span.scored == len(whole) - len(tokenizer.encode(TEXTS[0].rstrip()))
    with pytest.raises(UserError, match="tokens do not fit into 2; raise --context"):
        continuation_span(tokenizer, "x", " and slept", 2)


def test_nothing_before_a_continuation_is_the_token_that_begins_texts(pair: tuple) -> None:
    _, _, tokenizer = pair
    span = continuation_span(tokenizer, "", "sat", 20)
    assert list(span.tokens) == [0, *tokenizer.encode("sat")]


def test_accuracies_are_those_counted_by_hand() -> None:
    questions = [
        Question("", ("aa", "bbbbbbbb"), 0),  # -3 > -4: right; -1.5 < -0.5: wrong when normed
        Question("", ("cccc", "dd"), 0),  # -5 < -4: wrong; -1.25 > -2: right when normed
        Question("", ("e", "f"), 1),  # a tie goes to the first: wrong both times
        Question("", ("gg", "hh"), 1),  # right both times
    ]
    found = accuracies(questions, [[-3, -4], [-5, -4], [-1, -1], [-9, -2]])
    # two of four; standard error sqrt(0.5 * 0.5 / 3)
    assert found == pytest.approx(
        {"acc": 0.5, "acc_stderr": 0.288675, "acc_norm": 0.5, "acc_norm_stderr": 0.288675, "questions": 4}, abs=1e-6
    )
    found = accuracies(questions[:2], [[-3, -4], [-5, -6]])
    assert (found["acc"], found["acc_norm"]) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  plain  ", "plain"),
        ("How to rest [title] Lie down", "How to rest. Lie down"),
        ("[header] How to rest [step] Lie  down.", " How to rest Lie down."),
    ],
)
def test_bracketed_marks_go_as_in_the_harness(text: str, expected: str) -> None:
    assert without_marks(text) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"q\.jsonl:2: not valid JSON"),
        ("[1]", r"q\.jsonl:2: no JSON object"),
        ('{"ctx": "a", "label": 0}', r"q\.jsonl:2: no key 'endings'"),
        ('{"ctx": "a", "endings": ["b"], "label": 0}', "endings must be a list of two texts"),
        ('{"ctx": "a", "endings": ["b", "[c]"], "label": 0}', "empty without its bracketed marks"),
        ('{"ctx": "a", "endings": ["b", "c"], "label": 2}', "label 2 is none of 0 to 1; give a labelled split"),
        ('{"ctx": "a", "endings": ["b", "c"], "label": ""}', "label '' is none of 0 to 1"),
        ('{"ctx": 3, "endings": ["b", "c"], "label": 0}', "ctx must be text"),
    ],
)
def test_a_bad_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(QUESTIONS[0]) + f"\n{line}\n")
    with pytest.raises(UserError, match=message):
        read_questions(path)
    assert len(read_questions(path, limit=1)) == 1


def test_files_without_questions_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no question"):
        read_questions(tmp_path / "empty.jsonl")
    with pytest.raises(UserError, match="none.jsonl: no such file"):
        read_questions(tmp_path / "none.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8 \\(byte 0\\)"):
        read_questions(tmp_path / "bytes.jsonl")
