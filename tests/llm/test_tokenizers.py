"""Tokenizers against the packages that wrote their files, from files made here."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import GPT2TokenizerFast, PreTrainedTokenizerFast

from library.errors import UserError
from library.llm.chat_templates import Message, built_in_template
from library.llm.tokenizer_files import load_tokenizer
from library.llm.tokenizers import IncrementalDecoder, Tokenizer, train_bpe

TEXT = [
    "The quick brown fox doesn't jump over 12345 lazy dogs; it's asleep.\n\n  Indented   code: x = y ** 2\t# why?\r\n",
    "Größe, naïve café — 日本語のテキスト 🙂🙃 end",
    "they're we'll I'VE <|endoftext|> not special",
]


def gpt2_bpe(folder: Path) -> tokenizers.Tokenizer:
    """Train a byte-level BPE as GPT-2's and write ``vocab.json`` and ``merges.txt``."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([text for text in TEXT for _ in range(3)], trainer)
    inner.model.save(str(folder))
    return inner


def tiktoken_ranks(inner: tokenizers.Tokenizer) -> list[bytes]:
    """Return the tokens in the order of their merging, as bytes."""
    state = json.loads(inner.to_str())["model"]
    characters = {c: b for b, c in _byte_characters().items()}
    as_bytes = [bytes(characters[c] for c in "".join(merge)) for merge in state["merges"]]
    return [bytes([i]) for i in range(256)] + as_bytes


def _byte_characters() -> dict[int, str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return bytes_to_unicode()


def test_gpt2_files_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    gpt2_bpe(tmp_path)
    vocabulary = json.loads((tmp_path / "vocab.json").read_text())
    vocabulary["<|endoftext|>"] = len(vocabulary)
    (tmp_path / "encoder.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").rename(tmp_path / "vocab.bpe")
    theirs = GPT2TokenizerFast(vocab=vocabulary, merges=_merges(tmp_path / "vocab.bpe"))
    ours = load_tokenizer(tmp_path)
    assert ours.eos == ours.bos == 400
    assert ours.vocab_size == 401
    for text in TEXT[:2]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode(TEXT[2], special=True) == theirs.encode(TEXT[2])
    assert 400 not in ours.encode(TEXT[2])


def _merges(path: Path) -> list[tuple[str, str]]:
    return [tuple(line.split()) for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]


def llama3_file(folder: Path) -> tokenizers.Tokenizer:
    """Write a ``tokenizer.model`` of Llama 3's kind; return the same vocabulary under the tokenizers package."""
    ranks = tiktoken_ranks(gpt2_bpe(folder))
    lines = b"".join(base64.b64encode(token) + f" {i}\n".encode() for i, token in enumerate(ranks))
    (folder / "tokenizer.model").write_bytes(lines)
    characters = _byte_characters()
    shown = ["".join(characters[b] for b in token) for token in ranks]
    model = models.BPE(
        vocab={token: i for i, token in enumerate(shown)}, merges=_merges(folder / "merges.txt"), ignore_merges=True
    )
    theirs = tokenizers.Tokenizer(model)
    # the pattern as Llama 3's tokenizer.json has it
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    pattern += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    theirs.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    theirs.decoder = decoders.ByteLevel()
    return theirs


def test_a_llama3_file_gives_the_tokens_of_the_tokenizers_package(tmp_path: Path) -> None:
    theirs = llama3_file(tmp_path)
    ours = load_tokenizer(tmp_path / "tokenizer.model")
    for text in TEXT:
        assert ours.encode(text) == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == text
    # the numbers of Llama 3 less the 128000 tokens before them
    numbers = {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|start_header_id|>": 6, "<|eot_id|>": 9}
    assert {name: ours.special[name] - 400 for name in numbers} == numbers
    assert ours.special["<|reserved_special_token_0|>"] - 400 == 2
    assert ours.special["<|reserved_special_token_247|>"] - 400 == 255  # the last of Llama 3.1's tokenizer.json
    assert ours.vocab_size == 656
    assert ours.stop_tokens == (401, 409, 408)


def test_a_sentencepiece_model_gives_its_own_tokens(tmp_path: Path) -> None:
    model = sentencepiece_model(tmp_path)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model))
    ours = load_tokenizer(tmp_path)
    assert (ours.bos, ours.eos) == (1, 2)
    for text in TEXT:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.encode("<s>hi</s>", special=True) == [1, *theirs.encode("hi"), 2]
    assert ours.decode([1, *theirs.encode("hi"), 2], skip_special=True) == "hi"


def sentencepiece_model(folder: Path) -> Path:
    """Train a SentencePiece BPE with byte fallback, as Llama 2's."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in TEXT for _ in range(20)]),
        model_writer=written,
        vocab_size=380,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    return folder / "tokenizer.model"


def test_a_trained_bpe_is_saved_for_transformers_too(tmp_path: Path) -> None:
    ours = train_bpe([text for text in TEXT for _ in range(3)], 330, ("<|endoftext|>", "<|pad|>"))
    assert ours.vocab_size == 330
    assert ours.eos == 0
    ours.save(tmp_path)
    again, theirs = load_tokenizer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in TEXT[:2]:
        assert ours.encode(text) == again.encode(text) == theirs.encode(text)
        assert again.decode(ours.encode(text)) == text
        assert len(ours.encode(text)) < len(text.encode())
    assert theirs.eos_token_id == again.eos == 0
    assert 0 not in ours.encode(TEXT[2])
    assert 0 in ours.encode(TEXT[2], special=True)


def every_kind(folder: Path) -> list[Tokenizer]:
    """Return one tokenizer of each class, saved and loaded again after two special tokens were added."""
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    llama3_file(folder / "a")
    sentencepiece_model(folder / "b")
    found = []
    makers = [load_tokenizer(folder / "a/tokenizer.model"), load_tokenizer(folder / "b"), train_bpe(TEXT, 300)]
    for i, tokenizer in enumerate(makers):
        tokenizer.add_special_tokens(["<|one|>", "<|two|>"])
        tokenizer.save(folder / str(i))
        found.append(load_tokenizer(folder / str(i)))
        assert found[-1].vocab_size == tokenizer.vocab_size
    return found


@pytest.mark.parametrize("kind", ["tokenizers", "sentencepiece", "tiktoken"])
def test_half_a_surrogate_pair_is_a_replacement_character(tmp_path: Path, kind: str) -> None:
    # JSON can hold one ("\\ud83d"), UTF-8 cannot; whole pairs are the character that they write
    tokenizer = train_bpe(TEXT, 256 + 1)
    if kind == "tiktoken":
        llama3_file(tmp_path)
        tokenizer = load_tokenizer(tmp_path)
    elif kind == "sentencepiece":
        sentencepiece_model(tmp_path)
        tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a \ud83d b") == tokenizer.encode("a \ufffd b")
    assert tokenizer.encode("a \ud83d\ude00 b") == tokenizer.encode("a \U0001f600 b")


def test_added_special_tokens_come_after_all_others_and_are_saved(tmp_path: Path) -> None:
    for tokenizer in every_kind(tmp_path):
        last = tokenizer.vocab_size
        assert (tokenizer.special["<|one|>"], tokenizer.special["<|two|>"]) == (last - 2, last - 1)
        assert tokenizer.encode("<|two|><|one|>", special=True) == [last - 1, last - 2]
        assert last - 1 not in tokenizer.encode("<|two|>")
        assert tokenizer.decode([last - 1]) == "<|two|>"
        assert tokenizer.decode([last - 1], skip_special=True) == ""
        assert tokenizer.add_special_tokens(["<|two|>", "<|three|>"]) == [last - 1, last]


def test_streamed_text_is_the_whole_text(tmp_path: Path) -> None:
    for tokenizer in every_kind(tmp_path):
        for text in TEXT:
            decoder, tokens = IncrementalDecoder(tokenizer), tokenizer.encode(text)
            parts = [decoder.add(token) for token in tokens]
            assert "".join(parts) + decoder.rest() == tokenizer.decode(tokens)
            assert not any("�" in part for part in parts)  # a character is shown when it is whole


def test_the_llama3_template_is_that_of_the_model_card(tmp_path: Path) -> None:
    llama3_file(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.model")
    messages = [Message("system", "Be brief. "), Message("user", "Hi<|eot_id|>"), Message("assistant", "Hello!")]
    tokens, owners = built_in_template("llama3", tokenizer).tokens(messages, answer_next=True)
    assert tokenizer.decode(tokens) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert tokens.count(tokenizer.special["<|eot_id|>"]) == 3  # the one in the message is text
    assert tokenizer.decode([t for t, owner in zip(tokens, owners, strict=True) if owner == 2]) == "Hello!<|eot_id|>"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "cannot be read as a tokenizer"),
        ("tokenizer.model", "nonsense", "cannot be read as a tokenizer"),
        ("vocab.bpe", "", "encoder.json: missing"),
        ("other.txt", "", "no tokenizer in this folder"),
    ],
)
def test_a_folder_without_a_readable_tokenizer_is_refused(
    name: str, content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)
