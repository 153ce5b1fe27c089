"""Tokenizers and chat templates in GGUF files against those that they were made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from library.errors import UserError
from library.llm.chat_templates import load_chat_template, load_prompt_template
from library.llm.tokenizer_files import load_tokenizer

TEXT = (
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
    inner.train_from_iterator([TEXT] * 3, trainer)
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
    for text in (TEXT, TEXT[::-1], *TEXT.split(" "), "", "   ", "é" * 9):
        assert ours.encode(text) == inner.encode(text, add_special_tokens=False).ids, text
        if pre != "qwen2":  # which puts characters together
            assert ours.decode(ours.encode(text)) == text
    chat = "<|im_start|>user\nhi<|im_end|>"
    assert ours.encode(chat, special=True) == inner.encode(chat, add_special_tokens=False).ids
    assert not set(ours.encode(chat)) & set(ours.special.values())  # what somebody typed ends no turn
    assert (ours.eos, ours.bos) == (eos, None)
    assert set(ours.special) == set(MARKS)


@pytest.mark.parametrize(
    ("pre", "says", "begins"), [("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", None, False)]
)
def test_a_text_begins_as_the_file_says(pre: str, says: bool | None, begins: bool, tmp_path: Path) -> None:
    inner = published(pre)
    more: dict[str, Any] = {} if says is None else {"add_bos_token": says}
    first = inner.token_to_id("<|im_start|>")
    ours = load_tokenizer(write_bpe(tmp_path / "m.gguf", inner, pre, bos_token_id=first, **more))
    assert ours.bos == (first if begins else None)


def test_a_sentencepiece_model_gives_the_tokens_of_the_published_one(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join([TEXT] * 20), encoding="utf-8")
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
    for text in (TEXT, "say [INST] twice", "  two  ", "", "\u4e2d\u6587"):
        assert ours.encode(text) == theirs.encode(text)
    assert (ours.bos, ours.eos) == (1, 2)
    ours.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again.encode(TEXT) == theirs.encode(TEXT)


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
