"""Read the tokenizer of a published model: its own files, or a GGUF file's metadata. Nothing is ever downloaded.

A GGUF file has a vocabulary and names the rest: ``tokenizer.ggml.model`` is "gpt2" (byte-level BPE, with merges) or
"llama" (SentencePiece, with scores), ``tokenizer.ggml.pre`` is a word for how a BPE splits text before it merges.
llama.cpp has the splits in its code (``src/llama-vocab.cpp``); those of the models that are read here are
:data:`SPLITS`. A name that is not among them is refused: with another split the same text is other tokens, and the
model only a little worse, which nobody would notice.
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from library.errors import UserError
from library.files import read_json, reading
from library.gguf_header import gguf_file, read_gguf_metadata
from library.llm.tokenizers import (
    ADDED_TOKENS,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    TOKENIZER_CONFIG,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
)

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
# a word that is a token is not put together by merges; texts begin with bos unless the file says otherwise
_WHOLE_WORDS = _BEGIN_WITH_BOS = ("llama-bpe", "tekken")
# of tokenizer.ggml.token_type; SentencePiece has the same numbers
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
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
            tokenizer = _read(found)
            added = found.parent / ADDED_TOKENS
            if added.is_file() and found.name != "tokenizer.json":  # tokenizer.json holds its own
                numbers: dict[str, int] = read_json(added)
                tokenizer.add_special_tokens(sorted(numbers, key=numbers.__getitem__))
            if found.suffix.lower() != ".gguf" and (values := _config(found.parent)):
                tokenizer.configure(values)
    except UserError:
        raise
    except Exception as error:  # three packages read these files; one of them raises plain Exception
        raise UserError(f"{found}: cannot be read as a tokenizer ({error}); download it again") from error
    return tokenizer


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
    if file.suffix == ".json":
        return HuggingFaceTokenizer(tokenizers.Tokenizer.from_file(str(file)))
    if file.name in ("vocab.bpe", "merges.txt"):
        return TiktokenTokenizer.read_gpt2(file)
    with open(file, "rb") as raw:
        beginning = raw.read(64)
    # a line of Llama 3's file: base64, a blank, a number; SentencePiece's is a protobuf message
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", beginning):
        return TiktokenTokenizer.read_llama3(file)
    return SentencePieceTokenizer(file)


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
        tokenizer: Tokenizer = _bpe(file, metadata, tokens, types)
    elif kind == "llama":
        tokenizer = _sentencepiece(file, metadata, tokens, types)
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
        tokenizer: of any kind.
        rows: of the model's embedding; those behind the last token become unused tokens.
        source: what messages name.

    Raises:
        UserError: there are more tokens than rows, or no split of GGUF gives the same tokens.
    """
    if tokenizer.vocab_size > rows:
        raise UserError(f"{source}: {tokenizer.vocab_size} tokens, the model has {rows}; take its own --tokenizer")
    text = "\n".join([_PROBE, *(tokenizer.decode([number]) for number in range(tokenizer.vocab_size))])
    numbers = tokenizer.encode(text)
    if isinstance(tokenizer, TiktokenTokenizer):
        tokenizer = HuggingFaceTokenizer(tokenizer.converted())
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
    """Return what a ``tokenizer.json`` makes of :data:`_PROBE` before it merges; None of the other kinds."""
    if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.inner.pre_tokenizer is None:
        return None
    return [piece for piece, _ in tokenizer.inner.pre_tokenizer.pre_tokenize_str(_PROBE)]


def _vocabulary(tokenizer: Tokenizer) -> tuple[dict[int, tuple[str, int, float]], list[str] | None]:
    """Return each number's token, type and score, and the merges; None where scores take their place."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        added = {number: (token, _CONTROL, 0.0) for token, number in tokenizer.special.items()}
        return added | {
            i: (piece.piece, piece.type, piece.score) for i, piece in enumerate(tokenizer.proto().pieces)
        }, None
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    model, added_tokens = json.loads(tokenizer.inner.to_str())["model"], tokenizer.inner.get_added_tokens_decoder()
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges", ())]
    types = {token.content: _CONTROL if token.special else _USER_DEFINED for token in added_tokens.values()}
    if by_scores := model.get("byte_fallback"):
        types |= {f"<0x{byte:02X}>": _BYTE for byte in range(256)} | {model.get("unk_token"): _UNKNOWN}
    # SentencePiece merges where the score of what comes of it is highest: that of the first merge that makes it
    scores = {merge.replace(" ", ""): -float(rank) for rank, merge in reversed(list(enumerate(merges)))}
    numbers = tokenizer.inner.get_vocab(with_added_tokens=True).items()
    entries = {number: (token, types.get(token, _NORMAL), scores.get(token, 0.0)) for token, number in numbers}
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


def _bpe(file: Path, metadata: dict[str, Any], tokens: list[str], types: list[int]) -> HuggingFaceTokenizer:
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
    inner = tokenizers.Tokenizer(bpe)
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
    inner.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    marked = {number: token for number, token in enumerate(tokens) if types[number] in (_CONTROL, _USER_DEFINED)}
    inner.add_tokens(
        [
            tokenizers.AddedToken(token, special=types[number] == _CONTROL, normalized=False)
            for number, token in marked.items()
        ]
    )
    return HuggingFaceTokenizer(inner)


def _sentencepiece(file: Path, metadata: dict[str, Any], tokens: list[str], types: list[int]) -> SentencePieceTokenizer:
    scores = metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise UserError(f"{file}: {len(tokens)} tokens and {len(scores)} tokenizer.ggml.scores; download it again")
    from sentencepiece import sentencepiece_model_pb2 as messages

    model = messages.ModelProto()  # type: ignore[attr-defined]  # protobuf makes it
    for token, score, kind in zip(tokens, scores, types, strict=True):
        model.pieces.add(piece=token, score=score, type=kind)
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = _BYTE in types
    model.trainer_spec.vocab_size = len(tokens)
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    model.normalizer_spec.remove_extra_whitespaces = False
    try:
        return SentencePieceTokenizer(file, model.SerializeToString())
    except RuntimeError as error:
        raise UserError(f"{file}: its tokenizer cannot be read ({error}); download it again") from None
