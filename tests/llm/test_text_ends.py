"""What stands before and behind a text: equal to transformers' of the same files, of what we save, and of the GGUF."""

from __future__ import annotations

import io
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from library.llm.evaluation import shard_documents
from library.llm.token_batches import TokenShards
from library.llm.tokenizer_files import load_tokenizer
from tools.prepare_text import parser, prepare

TEXTS = ["the cat sat on the mat", "One day, 12 dogs ran: größer!", ""]
MARKS = ("<unk>", "<s>", "</s>", "<|im_start|>")
UNSET = object()


def byte_level() -> tokenizers.Tokenizer:
    """Return a BPE of bytes."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[], initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(TEXTS * 3, trainer)
    inner.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return inner


def byte_fallback() -> tokenizers.Tokenizer:
    """Return a BPE of characters in which others become bytes, as Llama 2's tokenizer.json."""
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    special = [*MARKS, *(f"<0x{byte:02X}>" for byte in range(256))]
    inner.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=320, special_tokens=special, show_progress=False)
    )
    content = json.loads(inner.to_str())
    content["added_tokens"] = content["added_tokens"][: len(MARKS)]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def unigram() -> tokenizers.Tokenizer:
    """Return a unigram model."""
    inner = tokenizers.Tokenizer(models.Unigram())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=list(MARKS), unk_token="<unk>", show_progress=False)
    inner.train_from_iterator(TEXTS * 3, trainer)
    return inner


def post_processors(inner: tokenizers.Tokenizer) -> Iterator[processors.PostProcessor | None]:
    """Yield what a tokenizer.json may put around a text."""
    numbers = [(mark, inner.token_to_id(mark)) for mark in MARKS]
    yield None
    yield processors.ByteLevel(trim_offsets=False)
    for single in (
        ["<s>", "$A"],
        ["$A", "</s>"],
        ["<s>", "$A", "</s>"],
        ["<|im_start|>", "<s>", "$A", "</s>", "<unk>"],
    ):
        yield processors.TemplateProcessing(single=single, special_tokens=numbers)
    template = processors.TemplateProcessing(single=["</s>", "$A"], special_tokens=numbers)
    yield processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    yield processors.RobertaProcessing(numbers[2], numbers[1])


def settings() -> Iterator[dict[str, Any]]:
    """Yield contents of tokenizer_config.json, in an order of chance."""
    kinds = (
        ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer", None],
        ["<s>", {"content": "<s>", "__type": "AddedToken"}, "</s>", "<|im_start|>", None, UNSET],
        ["</s>", UNSET],
        [True, False, UNSET],
        [True, False, UNSET],
    )
    keys = ("tokenizer_class", "bos_token", "eos_token", "add_bos_token", "add_eos_token")
    every = [dict(zip(keys, values, strict=True)) for values in itertools.product(*kinds)]
    random.Random(0).shuffle(every)
    for values in every:
        yield {key: value for key, value in values.items() if value is not UNSET and (key, value) != (keys[0], None)}


@pytest.mark.parametrize("make", [byte_level, byte_fallback, unigram])
def test_a_tokenizer_json_gives_transformers_tokens_and_so_does_what_is_saved(make: Any, tmp_path: Path) -> None:
    inner, contents = make(), settings()
    for number, (processor, _) in enumerate(itertools.product(post_processors(make()), range(3))):
        folder = tmp_path / str(number)
        folder.mkdir()
        content = json.loads(inner.to_str())
        content["post_processor"] = None if processor is None else json.loads(processor.__getstate__())
        content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        (folder / "tokenizer.json").write_text(json.dumps(content))
        values = next(contents) | {"tokenizer_class": "PreTrainedTokenizerFast"} if number % 3 else None
        if values is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(values))
        if number % 3 == 2:
            (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|im_start|>"}))
        agree(folder, tmp_path / f"saved {number}", values)


def agree(folder: Path, saved: Path, values: dict[str, Any] | None) -> list[list[int]]:
    """Check ours, what we save and what transformers makes of both; return the tokens of the texts."""
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    expected = [theirs(text).input_ids for text in TEXTS]
    assert [ours.encode_whole(text) for text in TEXTS] == expected, values
    if values is not None:
        assert ours.bos == theirs.bos_token_id, values
        assert ours.eos == theirs.eos_token_id or theirs.eos_token_id is None, values  # something has to end a text
    ours.save(saved)
    again = load_tokenizer(saved)
    assert [again.encode_whole(text) for text in TEXTS] == expected, values
    assert (again.bos, again.eos, again.fingerprint()) == (ours.bos, ours.eos, ours.fingerprint()), values
    theirs = AutoTokenizer.from_pretrained(saved)
    assert [theirs(text).input_ids for text in TEXTS] == expected, values
    return expected


def sentencepiece_model(folder: Path) -> bytes:
    """Write a ``tokenizer.model`` of Llama 2's kind; return what it holds."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[:2] * 20),
        model_writer=written,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    return written.getvalue()


def test_a_sentencepiece_model_is_read_with_its_settings(tmp_path: Path) -> None:
    every = [values for values in settings() if values.get("tokenizer_class") == "LlamaTokenizerFast"]
    named = {"</s>", "<s>", None, UNSET}
    every = [v for v in every if isinstance(v.get("bos_token"), dict) or v.get("bos_token", UNSET) in named]
    for number, values in enumerate(every[:24]):
        folder = tmp_path / str(number)
        folder.mkdir()
        sentencepiece_model(folder)
        (folder / "tokenizer_config.json").write_text(json.dumps(values))
        agree(folder, tmp_path / f"saved {number}", values)
    model = sentencepiece_model(tmp_path)  # alone, as Meta published it: bos=True in llama/generation.py
    theirs, ours = sentencepiece.SentencePieceProcessor(model_proto=model), load_tokenizer(tmp_path)
    assert ours.encode_whole("the cat") == [1, *theirs.encode("the cat")]


def test_gpt2_files_are_read_with_their_settings(tmp_path: Path) -> None:
    model = json.loads(byte_level().to_str())["model"]
    merges = [" ".join(merge) for merge in model["merges"]]
    for number, values in enumerate([{}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}]):
        folder = tmp_path / str(number)
        folder.mkdir()
        vocabulary = model["vocab"] | {"<|endoftext|>": len(model["vocab"])}
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"} | values))
        agree(folder, tmp_path / f"saved {number}", values)
        (folder / "tokenizer_config.json").unlink()
        assert load_tokenizer(folder).begins == load_tokenizer(folder).ends == []


def write_gguf(path: Path, folder: Path, kind: str, tokens: list[str], **arrays: list[Any]) -> Path:
    """Write the vocabulary of ``folder`` as llama.cpp's converter does, with the gguf package's reading of the rest."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    for key, values in arrays.items():
        writer.add_array(f"tokenizer.ggml.{key}", values)
    if kind == "gpt2":
        writer.add_tokenizer_pre("gpt-2")
    gguf.SpecialVocab(folder, load_merges=kind == "gpt2").add_to_gguf(writer, quiet=True)
    writer.add_tensor("x", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_gguf_of_a_folder_gives_the_same_tokens(tmp_path: Path) -> None:
    inner = byte_level()
    vocabulary = inner.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [3 if token in MARKS else 1 for token in tokens]
    for number, (bos, eos, flags) in enumerate(itertools.product([False, True], [False, True], [False, True])):
        folder, saved = tmp_path / str(number), tmp_path / f"saved {number}"
        folder.mkdir()
        single = ["<s>"] * bos + ["$A"] + ["</s>"] * eos
        numbers = [("<s>", vocabulary["<s>"]), ("</s>", vocabulary["</s>"])]
        inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=numbers)
        inner.save(str(folder / "tokenizer.json"))
        values = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
        values |= {"add_bos_token": bos, "add_eos_token": eos} if flags else {}
        (folder / "tokenizer_config.json").write_text(json.dumps(values))
        expected = agree(folder, saved, values)
        for source in (folder, saved):
            ours = load_tokenizer(write_gguf(tmp_path / "m.gguf", source, "gpt2", tokens, token_type=types))
            assert [ours.encode_whole(text) for text in TEXTS] == expected
            assert (ours.bos, ours.eos) == tuple(map(vocabulary.__getitem__, ("<s>", "</s>")))
            agree_when_saved(ours, tmp_path / f"gguf {number} {source.name}", expected)
        assert gguf.SpecialVocab(saved).add_special_token == {"bos": bos, "eos": eos}


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
def test_the_gguf_of_a_sentencepiece_model_gives_the_same_tokens(flags: dict[str, bool], tmp_path: Path) -> None:
    model = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(tmp_path))
    size = range(model.vocab_size())
    values = {"tokenizer_class": "LlamaTokenizer"} | (flags or {"add_bos_token": True})  # llama.cpp: unless told not to
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
    expected = agree(tmp_path, tmp_path / "saved", values)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"} | flags))
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    arrays = {
        "scores": [model.get_score(i) for i in size],
        "token_type": [
            2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in size
        ],
    }
    ours = load_tokenizer(write_gguf(tmp_path / "m.gguf", tmp_path, "llama", [*map(model.id_to_piece, size)], **arrays))
    assert [ours.encode_whole(text) for text in TEXTS] == expected
    agree_when_saved(ours, tmp_path / "from gguf", expected)


def agree_when_saved(ours: Any, folder: Path, expected: list[list[int]]) -> None:
    """Check that what was saved is read as it was, by us and by transformers."""
    ours.save(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert [theirs(text).input_ids for text in TEXTS] == expected
    assert [load_tokenizer(folder).encode_whole(text) for text in TEXTS] == expected
    assert load_tokenizer(folder).fingerprint() == ours.fingerprint()


@pytest.mark.parametrize(
    "single", [["$A"], ["<s>", "$A"], ["</s>", "$A"], ["</s>", "$A", "</s>"], ["$A", "</s>", "<s>"]]
)
def test_a_corpus_holds_transformers_tokens_and_gives_the_texts_back(single: list[str], tmp_path: Path) -> None:
    inner, folder = byte_level(), tmp_path / "tokenizer"
    folder.mkdir()
    numbers = [(mark, inner.token_to_id(mark)) for mark in MARKS]
    inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=numbers)
    inner.save(str(folder / "tokenizer.json"))
    values = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    texts = [f"{i} {TEXTS[i % 2]}" for i in range(12)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    flags = [
        "--tokenizer",
        str(folder),
        "--save_to",
        str(tmp_path / "out"),
        "--validation_share",
        "0.5",
    ]
    prepare(parser().parse_args([str(tmp_path / "texts.jsonl"), *flags]))
    theirs, found = AutoTokenizer.from_pretrained(tmp_path / "out"), list[str]()
    for split in ("train", "validation"):
        shards = TokenShards(tmp_path / "out", split)
        documents = list(shard_documents(shards, load_tokenizer(folder)))
        assert len(documents) == shards.documents
        for document in documents:
            found.append(inner.decode(list(document.tokens), skip_special_tokens=True))
            assert list(document.tokens) == theirs(found[-1]).input_ids
        last = [] if single[-1] == "</s>" else [theirs.eos_token_id]  # a document always ends with eos
        whole = [token for document in documents for token in [*document.tokens, *last]]
        assert shards.read(0, shards.tokens).tolist() == whole
    assert sorted(found) == sorted(texts)


@pytest.mark.parametrize("said", [{}, {"legacy": True}, {"legacy": False}, {"add_prefix_space": False}])
def test_a_sentencepiece_model_of_llamas_class_has_transformers_blanks(said: dict[str, bool], tmp_path: Path) -> None:
    sentencepiece_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", **said}))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    ours.save(tmp_path / "saved")
    for text in (" the cat", "<s>the cat</s> sat", "<s> the</s>", "  ", "\n the", "größer 日本"):
        tokens = ours.encode(text, special=True)
        assert tokens == theirs.encode(text, add_special_tokens=False), text
        assert tokens == load_tokenizer(tmp_path / "saved").encode(text, special=True), text
        assert ours.decode(tokens) == theirs.decode(tokens), text


def test_a_state_of_an_earlier_version_knows_its_sentencepiece_model(tmp_path: Path) -> None:
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{byte:02X}>", 6) for byte in range(256)), ("▁a", 1)]
    pieces += [("▁", 1), ("a", 1)]
    arrays = {"scores": [0.0] * len(pieces), "token_type": [kind for _, kind in pieces]}
    file = write_gguf(tmp_path / "m.gguf", tmp_path, "llama", [piece for piece, _ in pieces], **arrays)
    assert load_tokenizer(file).fingerprint(blank=" ") == "bb709ee51761de7097b38657e0677c8a"
