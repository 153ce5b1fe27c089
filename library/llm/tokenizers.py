"""Text to tokens and back. ``library.llm.tokenizer_files`` finds out which of these a model was published with.

============================================  =====================================================================
``tokenizer.json``                            Hugging Face, read by the ``tokenizers`` package; what ours are saved as
``tokenizer.model``, text                     Llama 3: base64 tokens with their ranks, read by ``tiktoken``
``vocab.bpe`` + ``encoder.json``              GPT-2 as OpenAI published it (``merges.txt`` + ``vocab.json`` at Hugging
                                              Face): its ranks are computed and go to ``tiktoken`` too
``tokenizer.model``, binary                   Llama 2: a SentencePiece model
a GGUF file                                   the vocabulary in its metadata (``library.llm.tokenizer_files``)
============================================  =====================================================================

Special tokens (``<|eot_id|>``) are made from text only on request: text that a user typed must not be able to end its
own turn. New ones get the numbers after the last token; ``added_tokens.json`` beside the file holds them.

What stands before and behind a text (``begins``, ``ends``) is what transformers' ``AutoTokenizer`` puts there: what the
post-processor of ``tokenizer.json`` says; without that file ``add_bos_token`` and ``add_eos_token`` of
``tokenizer_config.json``; in GGUF the keys of these names, else llama.cpp's defaults. Without any of them it is what
Meta's and OpenAI's own programs do: Llama's texts begin with bos, GPT-2's with nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import sentencepiece
import tiktoken
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from library.errors import UserError
from library.files import atomic_path, read_json, write_text

# What counts as a word, from openai/gpt-2 encoder.py and meta-llama/llama3 tokenizer.py.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
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
_FIRST = ("<|begin_of_text|>", "<s>", "<|endoftext|>")
_LAST = ("<|end_of_text|>", "</s>", "<|endoftext|>")
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>")
_HAVE_BOS = ("Llama", "CodeLlama", "GPT2")  # transformers' classes with a bos where tokenizer_config.json names none
ADDED_TOKENS, TOKENIZER_CONFIG = "added_tokens.json", "tokenizer_config.json"


class Tokenizer(ABC):
    """A vocabulary and the way text becomes tokens of it.

    Attributes:
        special: special token -> number.
        bos, eos: the tokens that are called so, where the vocabulary has them.
        begins, ends: the tokens that stand before and behind those of a text.
    """

    special: dict[str, int]
    bos: int | None
    eos: int | None
    begins: list[int]
    ends: list[int]

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""

    @abstractmethod
    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the tokens of ``text``; with ``special`` the names of special tokens in it become those tokens."""

    @abstractmethod
    def decode(self, tokens: Sequence[int], skip_special: bool = False) -> str:
        """Return the text of ``tokens``; bytes that are no UTF-8 become U+FFFD."""

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write what ``load_tokenizer`` reads back into ``folder``."""

    @abstractmethod
    def _extend(self, names: Sequence[str]) -> None:
        """Give the new names the numbers from ``vocab_size`` on."""

    def add_special_tokens(self, names: Sequence[str]) -> list[int]:
        """Add special tokens; return the numbers of all ``names``, those that existed too."""
        self._extend([name for name in dict.fromkeys(names) if name not in self.special])
        return [self.special[name] for name in names]

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Return the tokens that end a text or a turn."""
        names = [self.eos, *(self.special.get(name) for name in _TURN_ENDS)]
        return tuple(dict.fromkeys(number for number in names if number is not None))

    def encode_whole(self, text: str) -> list[int]:
        """Return ``text`` as a model reads it: its tokens between those that stand before and behind a text."""
        return [*self.begins, *self.encode(text), *self.ends]

    def encode_prompt(self, text: str) -> list[int]:
        """Return ``text`` for a model to go on; eos stands for no text at all, as a model goes on from some token."""
        whole = self.encode_whole(text)
        return whole if whole or self.eos is None else [self.eos]

    def configure(self, values: Mapping[str, Any]) -> None:
        """Take from a ``tokenizer_config.json``, as transformers does, which tokens are called bos and eos."""
        if "bos_token" in values or not str(values.get("tokenizer_class")).startswith(_HAVE_BOS):
            self.bos = self.special.get(values.get("bos_token", ""))
        self.eos = self.special.get(values.get("eos_token", ""), self.eos)  # answers and documents need one to end with

    def put_ends(self, bos: bool, eos: bool) -> None:
        """Let bos stand before, and eos behind a text, or not; only if there are such tokens."""
        self.begins = [self.bos] if bos and self.bos is not None else []
        self.ends = [self.eos] if eos and self.eos is not None else []

    def has_same_tokens(self, other: Tokenizer) -> bool:
        """Return whether each number means the same to ``other``."""
        if self.vocab_size != other.vocab_size or self.special != other.special:
            return False
        return all(self.decode([number]) == other.decode([number]) for number in range(self.vocab_size))

    def fingerprint(self) -> str:
        """Return 32 hex digits that follow from what each number means and which numbers a text gets.

        The texts of all tokens, and characters with all bytes, are encoded; how a file is written does not count.
        """
        texts = [self.decode([number]) for number in range(self.vocab_size)]
        usual = [] if self.bos in (None, self.eos) else [self.bos]
        is_usual = self.begins == usual and not self.ends  # states of earlier versions then have the same digits
        encode = self.encode if is_usual else self.encode_whole
        numbers = encode("\n".join([*texts, *map(chr, range(1, 0xD800, 61))]))
        known = repr((sorted(self.special.items()), self.bos, self.eos, texts, numbers))
        return hashlib.sha256(known.encode()).hexdigest()[:32]

    def _save_config(self, folder: str | Path, values: Mapping[str, Any]) -> None:
        """Write ``values`` and what transformers is to know of first and last tokens."""
        names: dict[int | None, str] = {number: name for name, number in self.special.items()}
        adds = {"add_bos_token": bool(self.begins), "add_eos_token": bool(self.ends)}
        values = {**values, "bos_token": names.get(self.bos), "eos_token": names.get(self.eos), **adds}
        write_text(Path(folder) / TOKENIZER_CONFIG, json.dumps(values, indent=2) + "\n")

    def _find_ends(self) -> None:
        self.bos = next((self.special[name] for name in _FIRST if name in self.special), None)
        self.eos = next((self.special[name] for name in _LAST if name in self.special), None)


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``; normaliser, splitting, decoder and what stands around a text are as it says."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()  # nor does transformers cut or pad, unless it is asked to
        inner.no_padding()
        self.inner = inner
        self._refresh()
        self._find_ends()
        self.begins, self.ends = _around(inner)

    def configure(self, values: Mapping[str, Any]) -> None:
        """Take which tokens are called bos and eos; the post-processor has said whether they are added."""
        named = {values.get(key) or "" for key in ("bos_token", "eos_token")} - self.special.keys()
        self._extend([name for name in named if self.inner.token_to_id(name) is not None])
        super().configure(values)

    def put_ends(self, bos: bool, eos: bool) -> None:
        """Let bos stand before, and eos behind a text, by a post-processor."""
        super().put_ends(bos, eos)
        names = {number: name for name, number in self.special.items()}
        added = [(names[number], number) for number in {*self.begins, *self.ends}]
        single = [*map(names.__getitem__, self.begins), "$A", *map(names.__getitem__, self.ends)]
        self.inner.post_processor = processors.TemplateProcessing(single, special_tokens=added)

    def _refresh(self) -> None:
        added = self.inner.get_added_tokens_decoder().items()
        self.special = {token.content: number for number, token in added if token.special}

    @property
    def vocab_size(self) -> int:
        """Number of tokens: one more than the highest."""
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the tokens of ``text``; see :class:`Tokenizer`."""
        self.inner.encode_special_tokens = not special
        return self.inner.encode(_whole_characters(text), add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int], skip_special: bool = False) -> str:
        """Return the text of ``tokens``; see :class:`Tokenizer`."""
        return self.inner.decode(list(tokens), skip_special_tokens=skip_special)

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``, which transformers reads too."""
        self.inner.encode_special_tokens = False
        write_text(Path(folder) / "tokenizer.json", self.inner.to_str(pretty=True))
        self._save_config(folder, {"tokenizer_class": "PreTrainedTokenizerFast"})

    def _extend(self, names: Sequence[str]) -> None:
        self.inner.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in names])
        self._refresh()


class _PublishedTokenizer(Tokenizer):
    """A tokenizer that is saved as the files it came from, beside which lie the special tokens that were added."""

    def __init__(self, files: Sequence[Path], values: Mapping[str, Any]) -> None:
        """Take the files, and what ``tokenizer_config.json`` says beside them."""
        self._files, self._values = files, values
        self._added: dict[str, int] = {}

    def configure(self, values: Mapping[str, Any]) -> None:
        """Take which tokens are called bos and eos, and whether they are added."""
        super().configure(values)
        self._values = {**self._values, **values}
        self.put_ends(values.get("add_bos_token", False), values.get("add_eos_token", False))

    def save(self, folder: str | Path) -> None:
        """Copy the files it came from; write the special tokens that were added and ``tokenizer_config.json``."""
        for file in self._files:
            with atomic_path(Path(folder) / file.name) as temporary:
                shutil.copyfile(file, temporary)
        if self._added:
            write_text(Path(folder) / ADDED_TOKENS, json.dumps(self._added, indent=2) + "\n")
        self._save_config(folder, self._values)

    def _extend(self, names: Sequence[str]) -> None:
        numbers = range(self.vocab_size, self.vocab_size + len(names))
        self._added.update(zip(names, numbers, strict=True))
        self.special.update(zip(names, numbers, strict=True))


class TiktokenTokenizer(_PublishedTokenizer):
    """Byte-level BPE by ranks, run by ``tiktoken``."""

    def __init__(
        self, ranks: dict[bytes, int], pattern: str, special: dict[str, int], files: list[Path], values: dict[str, Any]
    ) -> None:
        """Take tokens and ranks, the pattern that splits a text, special tokens, and what its base takes."""
        super().__init__(files, values)
        self._ranks, self._pattern = ranks, pattern
        self.special = dict(special)
        self._build()
        self._find_ends()
        self.put_ends(bos=self.bos != self.eos, eos=False)

    @classmethod
    def read_llama3(cls, file: Path) -> TiktokenTokenizer:
        """Read Llama 3's ``tokenizer.model``; its 256 special tokens are not in the file."""
        lines = (line.split() for line in file.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        special, reserved = {}, 0
        for i in range(256):
            name = _LLAMA3_SPECIAL.get(i)
            if name is None:
                name, reserved = f"<|reserved_special_token_{reserved}|>", reserved + 1
            special[name] = len(ranks) + i
        values = {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": [*special]}
        return cls(ranks, LLAMA3_PATTERN, special, [file], values)

    @classmethod
    def read_gpt2(cls, merges: Path) -> TiktokenTokenizer:
        """Read GPT-2's merges and the numbers beside them."""
        vocabulary = merges.with_name("encoder.json" if merges.name == "vocab.bpe" else "vocab.json")
        if not vocabulary.is_file():
            raise UserError(f"{vocabulary}: missing, {merges.name} is of no use without it; download it too")
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        characters = {character: byte for byte, character in bytes_to_unicode().items()}
        numbers: dict[str, int] = read_json(vocabulary)
        special = {name: number for name, number in numbers.items() if name == "<|endoftext|>"}
        ranks = {
            bytes(characters[character] for character in token): number
            for token, number in numbers.items()
            if token not in special
        }
        return cls(ranks, GPT2_PATTERN, special, [merges, vocabulary], {"tokenizer_class": "GPT2Tokenizer"})

    def _build(self) -> None:
        self._encoding = tiktoken.Encoding(
            "tandem", pat_str=self._pattern, mergeable_ranks=self._ranks, special_tokens=self.special
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens: one more than the highest."""
        return self._encoding.n_vocab

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the tokens of ``text``; see :class:`Tokenizer`."""
        return self._encoding.encode(text, allowed_special="all" if special else set(), disallowed_special=())

    def decode(self, tokens: Sequence[int], skip_special: bool = False) -> str:
        """Return the text of ``tokens``; see :class:`Tokenizer`."""
        numbers = set(self.special.values()) if skip_special else set()
        return self._encoding.decode([token for token in tokens if token not in numbers], errors="replace")

    def _extend(self, names: Sequence[str]) -> None:
        super()._extend(names)
        self._build()

    def converted(self) -> tokenizers.Tokenizer:
        """Return the same tokenizer as one of the ``tokenizers`` package; merges follow from the ranks."""
        from transformers.convert_slow_tokenizer import TikTokenConverter

        names = sorted(self.special, key=self.special.__getitem__)
        converter = TikTokenConverter(pattern=self._pattern, extra_special_tokens=names)
        converter.load_tiktoken_bpe = lambda _: self._ranks
        return converter.converted()


class SentencePieceTokenizer(_PublishedTokenizer):
    """A SentencePiece model; special tokens that are added lie outside of it."""

    def __init__(self, file: Path, model: bytes | None = None) -> None:
        """Read ``file``; or ``model``, what such a file would hold."""
        super().__init__([], {"tokenizer_class": "LlamaTokenizer"})
        given = {"model_file": str(file)} if model is None else {"model_proto": model}
        self._model = sentencepiece.SentencePieceProcessor(**given)
        control = [i for i in range(self._model.vocab_size()) if self._model.is_control(i) or self._model.is_unknown(i)]
        self.special = {self._model.id_to_piece(i): i for i in control}
        self._find_ends()
        self.put_ends(bos=True, eos=False)

    def proto(self) -> Any:
        """Return the file as a ``ModelProto``: pieces with scores and types. Tokens that were added are not in it."""
        from sentencepiece import sentencepiece_model_pb2 as messages

        return messages.ModelProto.FromString(self._model.serialized_model_proto())  # type: ignore[attr-defined]

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.model``, and the special tokens that were added."""
        with atomic_path(Path(folder) / "tokenizer.model") as temporary:
            temporary.write_bytes(self._model.serialized_model_proto())
        super().save(folder)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._model.vocab_size() + len(self._added)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the tokens of ``text``; see :class:`Tokenizer`."""
        if not special:
            return self._model.encode(_whole_characters(text))
        tokens: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, self.special)) + ")", text):
            tokens += [self.special[part]] if part in self.special else self._model.encode(_whole_characters(part))
        return tokens

    def decode(self, tokens: Sequence[int], skip_special: bool = False) -> str:
        """Return the text of ``tokens``; see :class:`Tokenizer`."""
        names = {number: name for name, number in self.special.items()}
        text = ""
        for special, run in groupby(tokens, names.__contains__):
            if not special:
                text += self._model.decode(list(run))
            elif not skip_special:
                text += "".join(map(names.__getitem__, run))
        return text

    def converted(self) -> tokenizers.Tokenizer:
        """Return the same tokenizer as one of the ``tokenizers`` package.

        As SentencePiece does here, every text between special tokens begins with a blank.
        """
        from transformers.convert_slow_tokenizer import SpmConverter, generate_merges

        proto = self.proto()
        pieces: Any = [(piece.piece, piece.score) for piece in proto.pieces]
        merges = None
        if proto.trainer_spec.model_type == proto.trainer_spec.BPE:
            pieces = {piece: number for number, (piece, _) in enumerate(pieces)}
            merges = generate_merges(pieces, None, [*self.special])
        inner = SpmConverter.build_tokenizer_from_spm_proto(proto, pieces, merges)
        *charsmap, blanks = inner.normalizer
        if proto.normalizer_spec.remove_extra_whitespaces:
            charsmap += [normalizers.Strip(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
        if proto.normalizer_spec.add_dummy_prefix:
            charsmap.append(normalizers.Prepend("\u2581"))
            inner.decoder = decoders.Sequence([inner.decoder, decoders.Strip(" ", 1, 0)])
        inner.normalizer = normalizers.Sequence([*charsmap, blanks])
        kept = [piece.piece for piece in proto.pieces if piece.type == piece.USER_DEFINED]
        inner.add_tokens([tokenizers.AddedToken(piece, normalized=False) for piece in kept])
        names = sorted(self.special, key=self.special.__getitem__)
        inner.add_special_tokens([tokenizers.AddedToken(name, normalized=False, special=True) for name in names])
        return inner


def train_bpe(
    texts: Iterable[str], vocab_size: int, special: Sequence[str] = ("<|endoftext|>",)
) -> HuggingFaceTokenizer:
    """Return a byte-level BPE trained on ``texts``, split into words as Llama 3 does.

    If one special token begins texts and another ends them (Llama's), the first stands before a text.

    Args:
        texts: any number of texts; read once.
        vocab_size: tokens in all, at least 256 bytes and the special ones.
        special: special tokens; they get the first numbers.
    """
    if vocab_size < 256 + len(special):
        raise UserError(f"vocab_size {vocab_size}: 256 bytes and {len(special)} special tokens need more; raise it")
    inner = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    tokenizer = HuggingFaceTokenizer(inner)
    tokenizer.put_ends(bos=tokenizer.bos != tokenizer.eos, eos=False)
    return tokenizer


class IncrementalDecoder:
    """Turns tokens into text as they come; holds back a character whose bytes are not complete."""

    def __init__(self, tokenizer: Tokenizer, shown: Iterable[str] = ()) -> None:
        """``shown``: names of special tokens that are part of the text; the others are left out."""
        self._tokenizer = tokenizer
        self._names = {tokenizer.special[name]: name for name in shown if name in tokenizer.special}
        self._tokens: list[int] = []
        self._shown = 0  # tokens whose text is out; a few of them are decoded again, as blanks depend on neighbours

    def add(self, token: int) -> str:
        """Return the text that ``token`` makes certain, maybe none."""
        if token in self._names:
            text, self._tokens, self._shown = self.rest() + self._names[token], [], 0
            return text
        self._tokens.append(token)
        text = self._pending()
        if text.endswith("�") and len(self._tokens) - self._shown < 8:
            return ""
        self._tokens, self._shown = self._tokens[max(0, self._shown) :], len(self._tokens) - max(0, self._shown)
        return text

    def rest(self) -> str:
        """Return what was held back."""
        return self._pending()

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._tokens[: self._shown], skip_special=True)
        return self._tokenizer.decode(self._tokens, skip_special=True)[len(before) :]


def _around(inner: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return the tokens that the post-processor of ``inner`` puts before and behind a text."""
    text = 2**32 - 1  # no token of any vocabulary
    probe = tokenizers.Tokenizer(models.WordLevel({"text": text}, unk_token="text"))
    probe.post_processor = inner.post_processor or processors.ByteLevel()  # which adds nothing
    numbers = probe.encode("text").ids
    return numbers[: numbers.index(text)], numbers[numbers.index(text) + 1 :]


def _whole_characters(text: str) -> str:
    """Return ``text`` with halves of surrogate pairs, which JSON can hold, as U+FFFD; so does tiktoken."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
