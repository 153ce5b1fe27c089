"""More tokens for a language model: its tokenizer finds them, its embedding and head have rows for them.

A new token is an added token of the ``tokenizers`` package: found anywhere in a text before it is split, of several the
longest. Two decoders would not give its text back, and get a rule: ``ByteLevel`` takes a token that is spelled in
letters such as e-acute for bytes, and after a normaliser that puts a blank before every piece (Llama 2) a word is found
together with its blank.

New rows are filled from old ones. The default: a word begins as the mean of the tokens that it was split into, which
the model knows how to read; the name of a special token means nothing to the model, so that one begins as the mean of
all rows (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models"). Published models often have
more rows than their tokenizer has tokens; those are used first.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders
from torch import Tensor

from library.errors import UserError
from library.files import read_json, write_text
from library.llm.conversion import read_text_files, write_transformers
from library.llm.tokenizer_files import load_tokenizer
from library.llm.tokenizers import TOKENIZER_CONFIG, Tokenizer
from library.models.llm.files import TransformersFiles, hf_names
from library.safetensors_io import RowRange

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
_BLANK = "\u2581"  # SentencePiece's


@dataclass
class NewTokens:
    """What became of the tokens that were asked for.

    Attributes:
        numbers: new token -> its number.
        pieces: new token -> the tokens it was split into before.
        notes: a line for each that is not new, or not found everywhere.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    pieces: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def extend_model(
    model: Path,
    save_to: Path,
    plain: Sequence[str],
    special: Sequence[str] = (),
    rows: str = "auto",
    tokenizer: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> NewTokens:
    """Write ``model`` with more tokens as a transformers folder; one tensor is in memory at a time.

    Args:
        model: in any layout that is read.
        save_to: a new folder.
        plain, special: the tokens.
        rows: what new rows begin as: the mean of "pieces", of all rows ("mean"), or "auto", see above.
        tokenizer: file or folder; default: the model's own.
        progress: called with (tensors done, tensors in all).

    Raises:
        UserError: a token cannot be added; the tokenizer cannot be read or converted; the folder exists.
    """
    source = tokenizer or model
    ours = load_tokenizer(source)
    first, marks = ours.vocab_size, ours.special
    added = add_tokens(ours, plain, special)
    if not added.numbers and ours.special == marks:
        raise UserError(f"no token is new: {'; '.join(added.notes)}")
    by_pieces = {"auto": added.numbers.keys() - {*special}, "pieces": added.numbers.keys(), "mean": set[str]()}[rows]
    pieces = [added.pieces[token] if token in by_pieces else [] for token in added.numbers]
    with tempfile.TemporaryDirectory() as made:
        _write_tokenizer(ours, source, Path(made))
        write_transformers(ExtendedFiles(model, first, pieces), save_to, tokenizer=Path(made), progress=progress)
    return added


def _write_tokenizer(ours: Tokenizer, source: Path, folder: Path) -> None:
    """Write ``ours`` with the files beside ``source`` that do not hold the vocabulary."""
    ours.save(folder)
    settings = folder / TOKENIZER_CONFIG
    made = read_json(settings)
    for name, content in read_text_files(source).items():
        if name not in _VOCABULARY_FILES:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
    # transformers' other classes make normaliser and decoder anew instead of reading them
    kept = {**made, **read_json(settings), "tokenizer_class": made["tokenizer_class"]}
    write_text(settings, json.dumps(kept, indent=2) + "\n")


def add_tokens(tokenizer: Tokenizer, plain: Sequence[str], special: Sequence[str] = ()) -> NewTokens:
    """Add tokens to ``tokenizer`` in place; return what became of them.

    Raises:
        UserError: one is blank, is asked for as both kinds, or could not be told from another token.
    """
    added, inner, first = NewTokens(), tokenizer.inner, tokenizer.vocab_size
    words, marks = set(plain), set(special)
    for token in dict.fromkeys([*plain, *special]):
        if not token.strip():
            raise UserError(f"{token!r}: a token of blanks alone is not added; remove it")
        if token in words and token in marks:
            raise UserError(f"{token!r}: is asked for as a plain token and as a special one; choose one")
        spelled = token if token in marks else _spelled(inner, token)
        if spelled != token:
            added.notes.append(f"{token!r}: the tokenizer writes it {spelled!r}")
        pieces = tokenizer.encode(spelled, special=True)
        is_one = token not in marks and len(pieces) == 1 and tokenizer.decode(pieces) == spelled
        number = pieces[0] if is_one else inner.token_to_id(spelled)
        if number is None:
            added.numbers.setdefault(spelled, first + len(added.numbers))
            added.pieces[spelled] = tokenizer.encode(spelled)
        elif tokenizer.decode([number]) != spelled:
            taken = tokenizer.decode([number])
            raise UserError(f"{token!r}: is the name of token {number}, which stands for {taken!r}; write it otherwise")
        else:
            becomes = ", and is special now" if token in marks and spelled not in tokenizer.special else ""
            added.notes.append(f"{token!r}: is token {number} already{becomes}")
    new_words = [token for token in added.numbers if token not in marks]
    has_normalizer = inner.normalizer is not None
    inner.add_tokens([tokenizers.AddedToken(word, normalized=has_normalizer) for word in new_words])
    tokenizer.add_special_tokens(special)
    _mend_decoder(tokenizer, added.numbers, new_words)
    _check(tokenizer, added)
    return added


def _puts_blanks_first(inner: tokenizers.Tokenizer) -> bool:
    return inner.normalizer is not None and inner.normalizer.normalize_str("x").startswith(_BLANK)


def _spelled(inner: tokenizers.Tokenizer, token: str) -> str:
    """Return ``token`` as it stands in a normalised text, with ordinary blanks."""
    if inner.normalizer is None:
        return token
    spelled = inner.normalizer.normalize_str(token).replace(_BLANK, " ")
    return spelled.lstrip() if _puts_blanks_first(inner) else spelled


def _mend_decoder(tokenizer: Tokenizer, numbers: Mapping[str, int], words: Sequence[str]) -> None:
    """Let the decoder give back the text of new tokens, of which ``words`` are plain; see the module's text."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    inner, letters, rules = tokenizer.inner, bytes_to_unicode(), []
    if b"ByteLevel" in inner.decoder.__getstate__():
        for token, number in numbers.items():
            if tokenizer.decode([number]) != token:
                as_bytes = "".join(letters[byte] for byte in token.encode())
                rules.append(decoders.Replace(tokenizers.Regex(rf"\A{re.escape(token)}\z"), as_bytes))
    if words and _puts_blanks_first(inner):
        any_word = "|".join(map(re.escape, words))
        rules.append(decoders.Replace(tokenizers.Regex(rf"\A(?=(?:{any_word})\z)"), " "))
    if rules:
        inner.decoder = decoders.Sequence([*rules, inner.decoder])


def _check(tokenizer: Tokenizer, added: NewTokens) -> None:
    """Refuse new tokens that no text has, and note those that longer ones contain."""
    known = [token.content for token in tokenizer.inner.get_added_tokens_decoder().values()]
    together = "\n".join(known)
    for token, number in added.numbers.items():
        if tokenizer.inner.token_to_id(token) != number:
            raise UserError(f"{token!r}: would take the number of another token, as the tokenizer's numbers have gaps")
        if number not in (found := tokenizer.encode(token, special=True)):
            raise UserError(f"{token!r}: {tokenizer.decode(found[:1])!r} is found in it first; leave it out")
        if together.count(token) > 1:
            longer = next((other for other in known if token in other and other != token), None)
            if longer is not None:
                added.notes.append(f"{token!r}: is not found within {longer!r}, which is one token")


class ExtendedFiles(TransformersFiles):
    """A model's weights with rows for more tokens: old rows are as they were."""

    def __init__(self, path: Path, first: int, pieces: Sequence[Sequence[int]]) -> None:
        """Read the headers of ``path``.

        Args:
            path: as of :class:`TransformersFiles`.
            first: number of the first new token; rows from there on belong to no old one.
            pieces: of each new token the old ones of whose rows it is the mean; of none: that of all.
        """
        super().__init__(path)
        self._first, self._pieces = first, pieces
        rows = max(self.config.vocab_size, first + len(pieces))
        self._matrices = [
            parts[0][0] for ours, parts, _ in hf_names(self.config) if ours in ("embedding.weight", "lm_head.weight")
        ]
        self.config = replace(self.config, vocab_size=rows, padded_vocab_size=rows)
        for name in self._matrices:
            entry = self.entries[name]
            self.entries[name] = replace(entry, shape=(rows, entry.shape[1]))

    def read(self, ranges: Sequence[RowRange]) -> Tensor:
        """Return a whole tensor; what was quantised is fp32."""
        old = super().read(ranges)
        if ranges[0].source not in self._matrices:
            return old
        rows = old.new_empty(self.config.vocab_size, old.shape[1])
        rows[: len(old)] = old
        mean = old[: self._first].mean(dim=0, dtype=torch.float32)
        rows[len(old) :] = mean
        for row, pieces in enumerate(self._pieces, self._first):
            rows[row] = old[pieces].mean(dim=0, dtype=torch.float32) if pieces else mean
        return rows
