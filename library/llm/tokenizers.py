"""Text to tokens and back. ``library.llm.tokenizer_files`` makes one of whichever of these a model was published with.

============================================  =====================================================================
``tokenizer.json``                            Hugging Face's ``tokenizers`` package; what all are saved as
``tokenizer.model``, text                     Llama 3: base64 tokens with their ranks (tiktoken)
``vocab.bpe`` + ``encoder.json``              GPT-2 as OpenAI published it (``merges.txt`` + ``vocab.json`` at Hugging
                                              Face)
``tokenizer.model``, binary                   Llama 2: a SentencePiece model
a GGUF file                                   the vocabulary in its metadata
============================================  =====================================================================

Special tokens (``<|eot_id|>``) are made from text only on request: text that a user typed must not be able to end its
own turn. New ones get the numbers after the last token.

What stands before and behind a text (``begins``, ``ends``) is what transformers' ``AutoTokenizer`` puts there: what the
post-processor of ``tokenizer.json`` says; without that file ``add_bos_token`` and ``add_eos_token`` of
``tokenizer_config.json``; in GGUF the keys of these names, else llama.cpp's defaults. Without any of them it is what
Meta's and OpenAI's own programs do: Llama's texts begin with bos, GPT-2's with nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from library.errors import UserError
from library.files import write_text

# What counts as a word, from openai/gpt-2 encoder.py and meta-llama/llama3 tokenizer.py.
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_FIRST = ("<|begin_of_text|>", "<s>", "<|endoftext|>")
_LAST = ("<|end_of_text|>", "</s>", "<|endoftext|>")
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>")
_HAVE_BOS = ("Llama", "CodeLlama", "GPT2")  # transformers' classes with a bos where tokenizer_config.json names none
TOKENIZER_CONFIG = "tokenizer_config.json"


class Tokenizer:
    """A vocabulary and the way text becomes tokens of it, run by the ``tokenizers`` package.

    Attributes:
        inner: the package's tokenizer; normaliser, splitting and decoder are as it says.
        special: special token -> number.
        bos, eos: the tokens that are called so, where the vocabulary has them.
        begins, ends: the tokens that stand before and behind those of a text, as the post-processor says.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        inner.no_truncation()  # nor does transformers cut or pad, unless it is asked to
        inner.no_padding()
        self.inner = inner
        self._refresh()
        self.bos = next((self.special[name] for name in _FIRST if name in self.special), None)
        self.eos = next((self.special[name] for name in _LAST if name in self.special), None)
        self.begins, self.ends = _around(inner)

    def _refresh(self) -> None:
        added = self.inner.get_added_tokens_decoder().items()
        self.special = {token.content: number for number, token in added if token.special}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included: one more than the highest."""
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Return the tokens that end a text or a turn."""
        names = [self.eos, *(self.special.get(name) for name in _TURN_ENDS)]
        return tuple(dict.fromkeys(number for number in names if number is not None))

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the tokens of ``text``; with ``special`` the names of special tokens in it become those tokens."""
        self.inner.encode_special_tokens = not special
        return self.inner.encode(_whole_characters(text), add_special_tokens=False).ids

    def encode_all(self, texts: Iterable[str]) -> list[list[int]]:
        """Return the tokens of each text, faster than one by one, with all cores."""
        self.inner.encode_special_tokens = True
        found = self.inner.encode_batch_fast([*map(_whole_characters, texts)], add_special_tokens=False)
        return [encoding.ids for encoding in found]

    def encode_whole(self, text: str) -> list[int]:
        """Return ``text`` as a model reads it: its tokens between those that stand before and behind a text."""
        return [*self.begins, *self.encode(text), *self.ends]

    def encode_prompt(self, text: str) -> list[int]:
        """Return ``text`` for a model to go on; eos stands for no text at all, as a model goes on from some token."""
        whole = self.encode_whole(text)
        return whole if whole or self.eos is None else [self.eos]

    def decode(self, tokens: Sequence[int], skip_special: bool = False) -> str:
        """Return the text of ``tokens``; bytes that are no UTF-8 become U+FFFD."""
        return self.inner.decode(list(tokens), skip_special_tokens=skip_special)

    def add_special_tokens(self, names: Sequence[str]) -> list[int]:
        """Add special tokens behind the last one; return the numbers of all ``names``, those that existed too."""
        new = [name for name in dict.fromkeys(names) if name not in self.special]
        self.inner.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in new])
        self._refresh()
        return [self.special[name] for name in names]

    def configure(self, values: Mapping[str, Any]) -> None:
        """Take from a ``tokenizer_config.json``, as transformers does, which tokens are called bos and eos."""
        named = {values.get(key) or "" for key in ("bos_token", "eos_token")}
        self.add_special_tokens([name for name in named if self.inner.token_to_id(name) is not None])
        if "bos_token" in values or not str(values.get("tokenizer_class")).startswith(_HAVE_BOS):
            self.bos = self.special.get(values.get("bos_token", ""))
        self.eos = self.special.get(values.get("eos_token", ""), self.eos)  # answers and documents need one to end with

    def put_ends(self, bos: bool, eos: bool) -> None:
        """Let bos stand before, and eos behind a text, or not; only if there are such tokens."""
        self.begins = [self.bos] if bos and self.bos is not None else []
        self.ends = [self.eos] if eos and self.eos is not None else []
        names = {number: name for name, number in self.special.items()}
        added = [(names[number], number) for number in {*self.begins, *self.ends}]
        single = [*map(names.__getitem__, self.begins), "$A", *map(names.__getitem__, self.ends)]
        self.inner.post_processor = processors.TemplateProcessing(single, special_tokens=added)

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``, which transformers reads too."""
        self.inner.encode_special_tokens = False
        write_text(Path(folder) / "tokenizer.json", self.inner.to_str(pretty=True))
        names: dict[int | None, str] = {number: name for name, number in self.special.items()}
        values = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": names.get(self.bos),
            "eos_token": names.get(self.eos),
            "add_bos_token": bool(self.begins),
            "add_eos_token": bool(self.ends),
        }
        write_text(Path(folder) / TOKENIZER_CONFIG, json.dumps(values, indent=2) + "\n")

    def has_same_tokens(self, other: Tokenizer) -> bool:
        """Return whether each number means the same to ``other``."""
        if self.vocab_size != other.vocab_size or self.special != other.special:
            return False
        return all(self.decode([number]) == other.decode([number]) for number in range(self.vocab_size))

    def fingerprint(self, blank: str = "") -> str:
        """Return 32 hex digits that follow from what each number means and which numbers a text gets.

        The texts of all tokens, and characters with all bytes, are encoded; how a file is written does not count.
        States of earlier versions with a SentencePiece model have the digits of its byte <0x20> as a ``blank``.
        """
        texts = [self.decode([number]) for number in range(self.vocab_size)]
        if blank and (byte := self.inner.token_to_id("<0x20>")) is not None:
            texts[byte] = blank
        usual = [] if self.bos in (None, self.eos) else [self.bos]
        is_usual = self.begins == usual and not self.ends  # states of earlier versions then have the same digits
        encode = self.encode if is_usual else self.encode_whole
        numbers = encode("\n".join([*texts, *map(chr, range(1, 0xD800, 61))]))
        known = repr((sorted(self.special.items()), self.bos, self.eos, texts, numbers))
        return hashlib.sha256(known.encode()).hexdigest()[:32]


def train_bpe(texts: Iterable[str], vocab_size: int, special: Sequence[str] = ("<|endoftext|>",)) -> Tokenizer:
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
    tokenizer = Tokenizer(inner)
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
