"""Tokenizers against the packages that wrote their files, from files made here; those in GGUF files too."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import tiktoken
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GPT2TokenizerFast, PreTrainedTokenizerFast

from library.errors import UserError
from library.llm.chat_templates import Message, built_in_template, load_chat_template, load_prompt_template
from library.llm.tokenizer_files import load_tokenizer
from library.llm.tokenizers import LLAMA3_PATTERN, IncrementalDecoder, Tokenizer, train_bpe

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
    ranks = {token: rank for rank, token in enumerate(tiktoken_ranks(theirs))}
    metas = tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens={})
    for text in TEXT:
        assert ours.encode(text) == theirs.encode(text).ids == metas.encode(text, disallowed_special=())
    assert ours.encode_all(TEXT) == [ours.encode(text) for text in TEXT]
    for text in TEXT:
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


def test_a_fingerprint_is_that_of_the_tokens_and_not_of_the_files(tmp_path: Path) -> None:
    prints = []
    for i, tokenizer in enumerate(every_kind(tmp_path)):
        prints.append(tokenizer.fingerprint())
        assert load_tokenizer(tmp_path / str(i)).fingerprint() == prints[-1]
        tokenizer.add_special_tokens(["<|three|>"])
        prints.append(tokenizer.fingerprint())
        tokenizer.eos = 5
        prints.append(tokenizer.fingerprint())
    assert len(set(prints)) == len(prints)


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
    tokens = built_in_template("llama3", tokenizer).prompt_tokens(messages)
    assert tokenizer.decode(tokens) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert tokens.count(tokenizer.special["<|eot_id|>"]) == 3  # the one in the message is text


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


GGUF_TEXT = (
    "The keeper's lamp burned on. In 1984, 1234567 gulls weren't there; they'd flown 12 miles!\n\n\tÉmigré cafés: ½ ²"
    " ٣٤ — naïve 日本語 テキスト 🎉🎉  two  spaces \n trailing   \r\nX=a**2+b_1/3;  I'LL e\u0301 HelloWorld fooBar"
)
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def published(pre: str) -> tokenizers.Tokenizer:
    """Return a BPE trained on ``TEXT`` whose parts are those of the published tokenizer.json of such a model."""
    llama = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def split(pattern: str) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"), bytes_only])

    parts: dict[str, Any] = {
        "gpt-2": whole,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole]),
        "llama-bpe": split(llama),
        "qwen2": split(llama.replace("{1,3}", "")),
    }
    inner = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    inner.pre_tokenizer, inner.decoder = parts[pre], decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=[], initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator([GGUF_TEXT] * 3, trainer)
    inner.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return inner


def write(path: Path, kind: str, tokens: Sequence[str], types: Sequence[int], **more: Any) -> Path:
    """Write a file that holds a tokenizer and a tensor."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("tokenizer.ggml.model", kind)
    writer.add_array("tokenizer.ggml.tokens", list(tokens))
    writer.add_array("tokenizer.ggml.token_type", list(types))
    for key, value in more.items():
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool, list: writer.add_array}
        add[type(value)](name, value)
    writer.add_tensor("x", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_bpe(path: Path, inner: tokenizers.Tokenizer, pre: str, **more: Any) -> Path:
    """Write a BPE as llama.cpp's converter does (``_set_vocab_gpt2``)."""
    import json

    said = json.loads(inner.to_str())
    merges = [" ".join(pair) for pair in said["model"]["merges"]]
    vocabulary = inner.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [3 if token in MARKS else 1 for token in tokens]
    return write(path, "gpt2", tokens, types, merges=merges, pre=pre, **more)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_a_bpe_gives_the_tokens_of_the_published_one(pre: str, tmp_path: Path) -> None:
    inner = published(pre)
    eos = inner.token_to_id("<|im_end|>")
    ours = load_tokenizer(write_bpe(tmp_path / "m.gguf", inner, pre, eos_token_id=eos))
    for text in (GGUF_TEXT, GGUF_TEXT[::-1], *GGUF_TEXT.split(" "), "", "   ", "é" * 9):
        assert ours.encode(text) == inner.encode(text, add_special_tokens=False).ids, text
        if pre != "qwen2":  # which puts characters together
            assert ours.decode(ours.encode(text)) == text
    chat = "<|im_start|>user\nhi<|im_end|>"
    assert ours.encode(chat, special=True) == inner.encode(chat, add_special_tokens=False).ids
    assert not set(ours.encode(chat)) & set(ours.special.values())  # what somebody typed ends no turn
    assert (ours.eos, ours.bos) == (eos, None)
    assert set(ours.special) == set(MARKS)


@pytest.mark.parametrize(
    ("pre", "says", "begins"),
    [
        ("llama-bpe", None, True),  # llama.cpp, src/llama-vocab.cpp
        ("llama-bpe", False, False),
        ("smollm", None, False),
        ("qwen2", True, True),
        ("gpt-2", None, False),
    ],
)
def test_a_text_begins_as_the_file_says(pre: str, says: bool | None, begins: bool, tmp_path: Path) -> None:
    inner = published(pre)
    more: dict[str, Any] = {} if says is None else {"add_bos_token": says, "add_eos_token": says}
    first, last = map(inner.token_to_id, ("<|im_start|>", "<|im_end|>"))
    ours = load_tokenizer(write_bpe(tmp_path / "m.gguf", inner, pre, bos_token_id=first, eos_token_id=last, **more))
    assert (ours.bos, ours.eos) == (first, last)
    assert ours.encode_whole("hi") == [first] * begins + inner.encode("hi").ids + [last] * bool(says)


def test_a_sentencepiece_model_gives_the_tokens_of_the_published_one(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join([GGUF_TEXT] * 20), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "tokenizer"), vocab_size=400, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        user_defined_symbols=["[INST]"], minloglevel=2,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    numbers = range(theirs.vocab_size())
    kinds = [
        2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1 for i in numbers
    ]
    kinds[theirs.piece_to_id("[INST]")] = 4
    tokens = [theirs.id_to_piece(i) for i in numbers]
    scores = [theirs.get_score(i) for i in numbers]
    ours = load_tokenizer(
        write(tmp_path / "m.gguf", "llama", tokens, kinds, scores=scores, bos_token_id=1, eos_token_id=2)
    )
    for text in (GGUF_TEXT, "say [INST] twice", "  two  ", "", "\u4e2d\u6587"):
        assert ours.encode(text) == theirs.encode(text)
    assert (ours.bos, ours.eos) == (1, 2)
    ours.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.encode(GGUF_TEXT) == theirs.encode(GGUF_TEXT)


def test_the_chat_template_is_the_files(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ bos_token }}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    inner = published("smollm")
    numbers = {"bos_token_id": inner.token_to_id("<|im_start|>"), "eos_token_id": inner.token_to_id("<|im_end|>")}
    file = write_bpe(tmp_path / "m.gguf", inner, "smollm", chat_template=template, **numbers)
    tokenizer = load_tokenizer(file)
    for where in (file, tmp_path):
        found = load_prompt_template("auto", tokenizer, where, ())
        assert tokenizer.decode(found.prompt("", [], "hi")) == "<|im_start|>user:hi<|im_end|><|im_start|>"
        assert load_chat_template("tokenizer", tokenizer, where).name == "tokenizer"
    plain = write_bpe(tmp_path / "plain.gguf", inner, "smollm")
    with pytest.raises(UserError, match="has no template of its own"):
        load_chat_template("tokenizer", tokenizer, plain)
    assert load_prompt_template("auto", tokenizer, plain, ()).name == "text"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "falcon3"}, "tokenizer.ggml.pre 'falcon3' is not known, gpt-2, .* are; give the tokenizer.json"),
        ({"kind": "bert"}, "tokenizer.ggml.model 'bert' is not read, gpt2 and llama are"),
        ({"types": [1]}, "3 tokens and 1 token types; download it again"),
        ({"merges": ["nothere either"]}, "tokenizer.ggml.merges: .*; download it again"),
        ({"merges": ["one"]}, "tokenizer.ggml.merges: .*; download it again"),
        ({"kind": "llama"}, "0 tokenizer.ggml.scores; download it again"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_key(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"kind": "gpt2", "tokens": ["a", "b", "ab"], "types": [1] * 3, "merges": ["a b"], "pre": "gpt-2"}
    path = write(tmp_path / "m.gguf", **given | changes)
    with pytest.raises(UserError, match=message):
        load_tokenizer(path)


def test_a_file_without_a_vocabulary_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "gpt2", ["a"], [1], pre="gpt-2")
    path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"))
    with pytest.raises(UserError, match="no tokenizer.ggml.tokens; give the tokenizer"):
        load_tokenizer(path)
