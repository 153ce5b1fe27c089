"""Read the tokenizer of a published model: its own files, or a GGUF file's metadata. Nothing is ever downloaded.

A GGUF file has a vocabulary and names the rest: ``tokenizer.ggml.model`` is "gpt2" (byte-level BPE, with merges) or
"llama" (SentencePiece, with scores), ``tokenizer.ggml.pre`` is a word for how a BPE splits text before it merges.
llama.cpp has the splits in its code (``src/llama-vocab.cpp``); those of the models that are read here are
:data:`SPLITS`. A name that is not among them is refused: with another split the same text is other tokens, and the
model only a little worse, which nobody would notice.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers

from library.errors import UserError
from library.files import read_json, reading
from library.gguf_header import gguf_file, read_gguf_metadata
from library.llm.tokenizers import GPT2_PATTERN, LLAMA3_PATTERN, TOKENIZER_CONFIG, Tokenizer

_QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")  # Qwen's tokenizer.json
_TEKKEN_PATTERN = (  # Mistral Nemo's tokenizer.json
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}"
    r"\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# tokenizer.ggml.pre -> the patterns that split a text, one after the other
SPLITS = {
    "gpt-2": (GPT2_PATTERN,),
    "llama-bpe": (LLAMA3_PATTERN,),
    "qwen2": (_QWEN2_PATTERN,),
    "smaug-bpe": (LLAMA3_PATTERN,),
    "stablelm2": (_QWEN2_PATTERN,),
    "smollm": (r"\p{N}", GPT2_PATTERN),
    "tekken": (_TEKKEN_PATTERN,),
}
# In the order of their numbers from 128000 (Llama 3.1; 3.0 calls some of them reserved); 256 with the reserved ones.
_LLAMA3_SPECIAL = {
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    4: "<|finetune_right_pad_id|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
# a word that is a token is not put together by merges; texts begin with bos unless the file says otherwise
_WHOLE_WORDS = _BEGIN_WITH_BOS = ("llama-bpe", "tekken")
# of tokenizer.ggml.token_type; SentencePiece has the same numbers
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_BLANK = "\u2581"  # SentencePiece's
# any three of what splits and normalisers tell apart: marks, digits, blanks, lines, letters, those written in two ways
_PROBE = "I'm YOU'RE we'll " + "".join(map("".join, itertools.product("sS1٣ \t\n\r'./é中\u0301ﬁ🙂", repeat=3)))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer in ``path``, a folder or one of its files (``library.llm.tokenizers`` lists them)."""
    path = Path(path).expanduser()
    found = _tokenizer_file(path) if path.is_dir() else path
    if not found.is_file():
        raise UserError(f"{path}: no such file; give a tokenizer's file or the folder it lies in")
    try:
        with reading(found):
            return _read(found)
    except UserError:
        raise
    except Exception as error:  # three packages read these files; one of them raises plain Exception
        raise UserError(f"{found}: cannot be read as a tokenizer ({error}); download it again") from error


def _config(folder: Path) -> dict[str, Any]:
    """Return what ``tokenizer_config.json`` in ``folder`` says, and, as in transformers, the older file of tokens."""
    config, older = folder / TOKENIZER_CONFIG, folder / "special_tokens_map.json"
    values = read_json(config) if config.is_file() else {}
    if older.is_file() and "added_tokens_decoder" not in values:
        values |= read_json(older)
    return {key: value.get("content", value) if isinstance(value, dict) else value for key, value in values.items()}


def _tokenizer_file(folder: Path) -> Path:
    names = ("tokenizer.json", "tokenizer.model", "vocab.bpe", "merges.txt")
    for name in names:
        if (folder / name).is_file():
            return folder / name
    if (file := gguf_file(folder)) is not None:
        return file
    raise UserError(f"{folder}: no tokenizer in this folder; one of {', '.join(names)} or a GGUF file is needed")


def _read(file: Path) -> Tokenizer:
    if file.suffix.lower() == ".gguf":
        return read_gguf_tokenizer(file)
    values = _config(file.parent)
    if file.suffix == ".json":
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(str(file)))
        if values:
            tokenizer.configure(values)
        return tokenizer
    tokenizer = _read_published(file, values)
    added = file.with_name("added_tokens.json")
    if added.is_file():  # tokenizer.json holds its own
        numbers: dict[str, int] = read_json(added)
        tokenizer.add_special_tokens(sorted(numbers, key=numbers.__getitem__))
    if values:
        tokenizer.configure(values)
    adds = values or {"add_bos_token": tokenizer.bos != tokenizer.eos}
    tokenizer.put_ends(adds.get("add_bos_token", False), adds.get("add_eos_token", False))
    return tokenizer


def _read_published(file: Path, values: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer in OpenAI's or Meta's ``file``; ``values``: what ``tokenizer_config.json`` says."""
    if file.name in ("vocab.bpe", "merges.txt"):
        return _gpt2(file)
    content = file.read_bytes()
    # a line of Llama 3's file: base64, a blank, a number; SentencePiece's is a protobuf message
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", content):
        return _llama3(content)
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # protobuf makes it
    model.ParseFromString(content)
    return _sentencepiece(model, values)


def _gpt2(merges: Path) -> Tokenizer:
    vocabulary = merges.with_name("encoder.json" if merges.name == "vocab.bpe" else "vocab.json")
    if not vocabulary.is_file():
        raise UserError(f"{vocabulary}: missing, {merges.name} is of no use without it; download it too")
    bpe = models.BPE.from_file(str(vocabulary), str(merges))
    return _byte_level(bpe, "gpt-2", {"<|endoftext|>": True} if bpe.token_to_id("<|endoftext|>") is not None else {})


def _llama3(content: bytes) -> Tokenizer:
    """Return the tokenizer of Llama 3's ``content``: tokens and ranks; its 256 special tokens are not in the file."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters, lines = bytes_to_unicode(), map(bytes.split, content.splitlines())
    vocabulary = {base64.b64decode(token).decode("latin-1").translate(letters): int(rank) for token, rank in lines}
    bpe, reserved = models.BPE(vocabulary, _merges(vocabulary), ignore_merges=True), itertools.count()
    names = [_LLAMA3_SPECIAL.get(i) or f"<|reserved_special_token_{next(reserved)}|>" for i in range(256)]
    return _byte_level(bpe, "llama-bpe", dict.fromkeys(names, True))


def _merges(ranks: Mapping[str, float], longest: bool = False) -> list[tuple[str, str]]:
    """Return all pairs that make a token, by its rank; of one rank those with the ``longest`` or shortest left first.

    As in transformers (``generate_merges``), where with scores, SentencePiece's, the longest is first.
    """
    pairs = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                pairs.append((rank, -cut if longest else cut, left, right))
    return [(left, right) for *_, left, right in sorted(pairs)]


def _byte_level(bpe: models.BPE, pre: str, added: Mapping[str, bool]) -> Tokenizer:
    """Return a tokenizer of bytes.

    Args:
        bpe: vocabulary and merges.
        pre: of :data:`SPLITS`.
        added: tokens that are found before a text is split -> whether they are special.
    """
    inner = tokenizers.Tokenizer(bpe)
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
    inner.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    inner.add_tokens([tokenizers.AddedToken(token, special=kind, normalized=False) for token, kind in added.items()])
    return Tokenizer(inner)


def _sentencepiece(model: Any, values: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of ``model``, a SentencePiece ``ModelProto``.

    Each text between special tokens begins with a blank, as in SentencePiece, unless ``values`` name transformers'
    ``LlamaTokenizer``: then it is as there, where ``legacy`` and ``add_prefix_space`` say whether.
    """
    from transformers.convert_slow_tokenizer import SpmConverter

    said, trained = model.normalizer_spec, model.trainer_spec
    if trained.model_type not in (trained.BPE, trained.UNIGRAM) or not model.pieces:
        raise ValueError("it is no BPE or unigram model")
    kinds = {piece.piece: piece.type for piece in model.pieces}
    vocabulary: Any = [(piece.piece, piece.score) for piece in model.pieces]
    merges = None
    if trained.model_type == trained.BPE:
        vocabulary = {piece.piece: number for number, piece in enumerate(model.pieces)}
        merges = _merges({piece.piece: -piece.score for piece in model.pieces if piece.type == _NORMAL}, longest=True)
    inner = SpmConverter.build_tokenizer_from_spm_proto(model, vocabulary, merges)
    words = [piece for piece, kind in kinds.items() if kind == _USER_DEFINED]
    prefix = "always" if said.add_dummy_prefix else "never"
    if str(values.get("tokenizer_class")).startswith("LlamaTokenizer"):
        prefix = "always" if values.get("legacy") else "first"
        if values.get("add_prefix_space") is False:
            prefix = "never"
        inner.normalizer = None
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    else:
        *steps, blanks = inner.normalizer
        if said.remove_extra_whitespaces:
            steps += [normalizers.Replace(tokenizers.Regex(r"\A +| +\z| +(?= )"), "")]
        if said.add_dummy_prefix:
            steps += [normalizers.Prepend(_BLANK)]
        if said.add_dummy_prefix and words:  # their own names, which are normalised like a text, are left alone
            any_word = "|".join(map(re.escape, words))
            steps += [normalizers.Replace(tokenizers.Regex(rf"\A{_BLANK}(?=(?:{any_word})\z)"), "")]
        inner.normalizer = normalizers.Sequence([*steps, blanks])
    if prefix != "never":
        inner.decoder = decoders.Sequence([inner.decoder, decoders.Strip(" ", 1, 0)])
    inner.add_tokens([tokenizers.AddedToken(word, normalized=True) for word in words])
    special = [piece for piece, kind in kinds.items() if kind in (_CONTROL, _UNKNOWN)]
    inner.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in special])
    return Tokenizer(inner)


def read_gguf_tokenizer(file: Path) -> Tokenizer:
    """Return the tokenizer in ``file``.

    Raises:
        UserError: there is none, or of a kind that is not read.
    """
    return _from_metadata(file, read_gguf_metadata(file))


def _from_metadata(file: Path, metadata: dict[str, Any]) -> Tokenizer:
    tokens, kind = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.model")
    if not tokens:
        raise UserError(f"{file}: no tokenizer.ggml.tokens; give the tokenizer of the model by itself (tokenizer)")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise UserError(f"{file}: {len(tokens)} tokens and {len(types)} token types; download it again")
    if kind == "gpt2":
        tokenizer = _bpe(file, metadata, tokens, types)
    elif kind == "llama":
        tokenizer = _pieces_with_scores(file, metadata, tokens, types)
    else:
        raise UserError(
            f"{file}: tokenizer.ggml.model {kind!r} is not read, gpt2 and llama are; give the model's tokenizer by "
            "itself (tokenizer)"
        )
    tokenizer.configure({"tokenizer_class": "LlamaTokenizer" if kind == "llama" else None, **_named(metadata)})
    by_default = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _BEGIN_WITH_BOS
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", by_default)
    tokenizer.put_ends(adds_bos, metadata.get("tokenizer.ggml.add_eos_token", False))
    return tokenizer


def gguf_tokenizer(tokenizer: Tokenizer, rows: int, source: Path) -> dict[str, Any]:
    """Return the metadata of which :func:`read_gguf_tokenizer` makes ``tokenizer`` again.

    Which split it has is found by trying: on a text made for that, and on the texts of all tokens.

    Args:
        tokenizer: any.
        rows: of the model's embedding; those behind the last token become unused tokens.
        source: what messages name.

    Raises:
        UserError: there are more tokens than rows, or no split of GGUF gives the same tokens.
    """
    if tokenizer.vocab_size > rows:
        raise UserError(f"{source}: {tokenizer.vocab_size} tokens, the model has {rows}; take its own --tokenizer")
    text = "\n".join([_PROBE, *(tokenizer.decode([number]) for number in range(tokenizer.vocab_size))])
    numbers = tokenizer.encode(text)
    entries, merges = _vocabulary(tokenizer)
    known = [entries.get(number, (f"[PAD{number}]", _UNUSED, 0.0)) for number in range(rows)]
    tokens, types, scores = map(list, zip(*known, strict=True))
    ways: list[dict[str, Any]] = [{"model": "gpt2", "pre": pre, "merges": merges} for pre in SPLITS]
    if merges is None:
        ways = [{"model": "llama", "scores": scores, "add_space_prefix": is_added} for is_added in (True, False)]
    pieces = _pieces(tokenizer)
    for way in ways:
        said = {"pre": "default", "tokens": tokens, "token_type": types, **way}
        made = {f"tokenizer.ggml.{key}": value for key, value in said.items()}
        tried = _from_metadata(source, made)
        if (merges is None or _pieces(tried) == pieces) and tried.encode(text) == numbers:
            return made
    known_splits = ", ".join(SPLITS)
    raise UserError(f"{source}: GGUF has no word for how this tokenizer changes or splits text ({known_splits} differ)")


def _pieces(tokenizer: Tokenizer) -> list[str] | None:
    """Return what is made of :data:`_PROBE` before it is merged; None without a split."""
    if tokenizer.inner.pre_tokenizer is None:
        return None
    return [piece for piece, _ in tokenizer.inner.pre_tokenizer.pre_tokenize_str(_PROBE)]


def _vocabulary(tokenizer: Tokenizer) -> tuple[dict[int, tuple[str, int, float]], list[str] | None]:
    """Return each number's token, type and score, and the merges; None where scores take their place."""
    model, added_tokens = json.loads(tokenizer.inner.to_str())["model"], tokenizer.inner.get_added_tokens_decoder()
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges", ())]
    types = {token.content: _CONTROL if token.special else _USER_DEFINED for token in added_tokens.values()}
    if by_scores := model.get("byte_fallback"):
        types |= {f"<0x{byte:02X}>": _BYTE for byte in range(256)} | {model.get("unk_token"): _UNKNOWN}
    numbers = tokenizer.inner.get_vocab(with_added_tokens=True)
    normal = sorted(numbers.keys() - types.keys(), key=numbers.__getitem__)
    # SentencePiece merges where the score of what comes of it is highest: that of the first merge that makes it
    order = dict.fromkeys([*(merge.replace(" ", "") for merge in merges), *normal])
    scores = {token: -float(rank) for rank, token in enumerate(order)}
    entries = {number: (token, types.get(token, _NORMAL), scores.get(token, 0.0)) for token, number in numbers.items()}
    return entries, None if by_scores else merges


def read_gguf_templates(file: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the chat templates in ``file`` by name, and the special tokens that they may name (``bos_token``).

    The one that is always used is called "default"; llama.cpp writes another one for tools as "tool_use".
    """
    metadata, key = read_gguf_metadata(file), "tokenizer.chat_template"
    source, with_tools = metadata.get(key), metadata.get(f"{key}.tool_use")
    tool_use = {"tool_use": with_tools} if isinstance(with_tools, str) else {}
    return {"default": source} | tool_use if isinstance(source, str) else {}, _named(metadata)


def _named(metadata: dict[str, Any]) -> dict[str, str]:
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    named = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    numbers = {ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in named.items()}
    return {f"{name}_token": tokens[i] for name, i in numbers.items() if isinstance(i, int) and 0 <= i < len(tokens)}


def _bpe(file: Path, metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    pre, merges = metadata.get("tokenizer.ggml.pre"), metadata.get("tokenizer.ggml.merges") or []
    if pre not in SPLITS:
        raise UserError(
            f"{file}: tokenizer.ggml.pre {pre!r} is not known, {', '.join(SPLITS)} are; give the tokenizer.json of the "
            "model by itself (tokenizer)"
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if wrong := next((merge for merge, pair in zip(merges, pairs, strict=True) if len(pair) != 2), None):
        raise UserError(f"{file}: tokenizer.ggml.merges: {wrong!r} is no pair; download it again")
    try:
        bpe = models.BPE(vocabulary, pairs, ignore_merges=pre in _WHOLE_WORDS)
    except Exception as error:  # the package raises plain Exception
        raise UserError(f"{file}: tokenizer.ggml.merges: {error}; download it again") from None
    added = {
        token: kind == _CONTROL for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)
    }
    return _byte_level(bpe, pre, added)


def _pieces_with_scores(file: Path, metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise UserError(f"{file}: {len(tokens)} tokens and {len(scores)} tokenizer.ggml.scores; download it again")
    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # protobuf makes it
    for token, score, kind in zip(tokens, scores, types, strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = _BYTE in types
    model.trainer_spec.unk_piece = next((tokens[i] for i, kind in enumerate(types) if kind == _UNKNOWN), "")
    model.normalizer_spec.add_dummy_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    model.normalizer_spec.remove_extra_whitespaces = False
    return _sentencepiece(model, {})
