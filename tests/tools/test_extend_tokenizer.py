"""More tokens for a language model, against transformers: what is read, found, said, and what stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from library.errors import UserError
from library.llm.tokenizer_files import load_tokenizer
from library.llm.tokenizers import Tokenizer, train_bpe
from library.llm.vocabulary import add_tokens
from library.models.llm.files import export_hf
from library.models.llm.model import TransformerLM
from library.models.llm.spec import gpt2, llama
from tests.llm.test_tokenizers import TEXT, gpt2_bpe, llama3_file, sentencepiece_model
from tests.runs import printed
from tests.training.tasks.test_chat_tuning import assert_is_whole, published  # noqa: F401
from tools import extend_tokenizer

WORDS = ["glimmerfish", "Straße", "fish", "zwei Wörter", "龍の", "a.b*c"]
PROMPTS = ["the glimmerfish, and glimmerfish", "fish in Straße", "x zwei Wörter y", "龍の x a.b*c y", "Straßen fishy"]


def published_bpe(folder: Path) -> None:
    train_bpe([text for text in TEXT for _ in range(3)], 330, ("<|endoftext|>", "<|pad|>")).save(folder)


KINDS = {"json": published_bpe, "gpt2": gpt2_bpe, "llama3": llama3_file, "sentencepiece": sentencepiece_model}


def write_model(folder: Path, kind: str, tied: bool, padding: int) -> int:
    """Write a random model with the tokenizer of ``kind`` and more rows than that has tokens; return those."""
    folder.mkdir()
    KINDS[kind](folder)
    tokens = load_tokenizer(folder).vocab_size
    rows = tokens + padding
    config = gpt2(32, 2, 2, rows, 64) if kind == "gpt2" else llama(32, 2, 2, 1, 64, rows, 64, tied=tied)
    export_hf(TransformerLM(config).initialise(torch.Generator().manual_seed(0)), folder, torch.bfloat16)
    return tokens


@pytest.mark.parametrize(
    ("kind", "tied", "padding"),
    [("json", True, 0), ("json", False, 3), ("gpt2", True, 0), ("llama3", False, 60), ("sentencepiece", False, 2)],
)
def test_it_grows_and_nothing_else_changes(kind: str, tied: bool, padding: int, tmp_path: Path) -> None:
    first = write_model(tmp_path / "old", kind, tied, padding)
    (tmp_path / "words.txt").write_text("\n".join(["", *WORDS[1:], "fish", ""]), encoding="utf-8")
    words = ["--tokens", WORDS[0], "--file", str(tmp_path / "words.txt"), "--special", "<|tool|>"]
    said = printed(extend_tokenizer, str(tmp_path / "old"), *words, "--save_to", str(tmp_path / "new"))
    count = len(WORDS) + 1
    assert f"trainable_token_indices={first}-{first + count - 1}" in said
    assert "'fish': is not found within 'glimmerfish'" in said

    before, ours = load_tokenizer(tmp_path / "old"), load_tokenizer(tmp_path / "new")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert ours.special["<|tool|>"] == first + count - 1
    for text in PROMPTS:
        tokens = ours.encode(text)
        assert tokens == theirs.encode(text, add_special_tokens=False)
        assert any(token >= first for token in tokens)
        assert ours.decode(tokens) == theirs.decode(tokens) == text
    for text in TEXT:
        assert ours.encode(text) == before.encode(text)
        assert ours.encode(text, special=True) == theirs.encode(text, add_special_tokens=False)
        assert ours.begins == before.begins == theirs.encode("")
    assert ours.encode("a<|tool|>b", special=True) == theirs.encode("a<|tool|>b", add_special_tokens=False)
    assert first + count - 1 in ours.encode("a<|tool|>b", special=True)

    old, new = (AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("old", "new"))
    assert new.config.vocab_size == max(first + padding, first + count)
    assert new.config.tie_word_embeddings == tied
    for get in ("get_input_embeddings", "get_output_embeddings"):
        was, now = (getattr(model, get)().weight.detach() for model in (old, new))
        assert torch.equal(now[:first], was[:first])
        assert torch.equal(now[first + count :], was[first + count :])  # padding that is left
        pieces = was[before.encode("glimmerfish")].float().mean(0).bfloat16()
        assert torch.equal(now[first], pieces)
        torch.testing.assert_close(now[first + count - 1].float(), was[:first].float().mean(0), atol=1e-4, rtol=1e-2)
    tokens = torch.tensor([before.encode(TEXT[0])[:60]])
    assert torch.equal(old(tokens).logits[..., :first], new(tokens).logits[..., :first])


@pytest.mark.parametrize("source", ["folder", "model.gguf"])
def test_what_was_published_beside_it_is_kept(source: str, published: Path, tmp_path: Path) -> None:  # noqa: F811
    marked = printed(extend_tokenizer, str(published / source), "--special", "cat", "--save_to", str(tmp_path / "cat"))
    assert "0 new tokens" in marked
    assert "cat" in load_tokenizer(tmp_path / "cat").special
    words = ["--tokens", "wug", "--special", "<|tool|>", "--rows", "mean"]
    printed(extend_tokenizer, str(published / source), *words, "--save_to", str(tmp_path / "new"))
    assert_is_whole(tmp_path / "new", published / "folder")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert tokenizer.decode(tokenizer.encode("cat<|tool|>wug"), skip_special_tokens=True).endswith("catwug")
    rows = AutoModelForCausalLM.from_pretrained(tmp_path / "new").get_input_embeddings().weight
    assert torch.equal(rows[-1], rows[-2])


def bpe(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = train_bpe([text for text in TEXT for _ in range(3)], 330)
    tokenizer.inner.normalizer = normalizer
    return tokenizer


@pytest.mark.parametrize(
    ("normalizer", "token", "text", "note"),
    [
        (normalizers.NFC(), "e\u0301toile", "une étoile", "the tokenizer writes it 'étoile'"),
        (normalizers.Lowercase(), "Wug", "a wug", "the tokenizer writes it 'wug'"),
        (None, "x<|endoftext|>", "a x<|endoftext|>", ""),
    ],
)
def test_a_token_is_found_as_the_tokenizer_writes_it(
    normalizer: normalizers.Normalizer | None, token: str, text: str, note: str
) -> None:
    tokenizer = bpe(normalizer)
    added = add_tokens(tokenizer, [token, token])
    assert len(added.numbers) == 1
    assert note in " ".join(added.notes)
    assert tokenizer.encode(text)[-1] == 330
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_token_that_exists_keeps_its_number() -> None:
    tokenizer = bpe()
    number = tokenizer.encode("the")
    added = add_tokens(tokenizer, ["the", "é"], ["q", "<|endoftext|>"])
    assert not added.numbers
    assert len(number) == 1
    assert f"'the': is token {number[0]} already" in added.notes
    assert "and is special now" in added.notes[2]
    assert tokenizer.special["q"] == tokenizer.inner.token_to_id("q")
    assert "special now" not in added.notes[3]


@pytest.mark.parametrize(
    ("plain", "special", "message"),
    [
        ([""], [], "blanks alone"),
        (["\t "], [], "blanks alone"),
        (["a"], ["a"], "choose one"),
        (["Ã©"], [], "stands for 'é'"),
        ([], ["é"], "is the name of token"),  # of a byte
    ],
)
def test_a_token_that_cannot_be_is_refused_by_name(plain: list[str], special: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        add_tokens(bpe(), plain, special)


def test_a_special_token_is_another_than_the_word_that_is_written_so() -> None:
    tokenizer = bpe()
    added = add_tokens(tokenizer, [], [" the", "日本"])
    assert list(added.numbers.values()) == [330, 331]
    assert tokenizer.encode("日本 the", special=True) == [331, 330]
    assert tokenizer.decode([331, 330]) == "日本 the"


def test_a_special_token_within_a_word_is_said_to_come_first() -> None:
    tokenizer = bpe(normalizers.NFC())
    tokenizer.add_special_tokens(["<|x|>"])
    with pytest.raises(UserError, match="'a<|x|>b'"):
        add_tokens(tokenizer, ["a<|x|>b"])
