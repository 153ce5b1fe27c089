"""What the text encoders of all families share: weights that come with the first caption, and tokenizers.

Captions become conditioning tensors, a dict a caption, which are cached; so a run whose captions are all cached never
loads an encoder. A language model's captions keep their own lengths; a batch fills them up and carries the mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from huggingface_hub import snapshot_download
from PIL.Image import Image
from tokenizers import pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen2Tokenizer

from library.errors import UserError


class TokenCount(NamedTuple):
    """How many tokens of a caption a text encoder reads, and how many it leaves out, without those around it."""

    kept: int
    cut: int


class TextEncoder:
    """Captions to conditioning tensors.

    Attributes:
        title: of the model, for messages.
        weights_fingerprint: of weights and settings.
        fingerprint: of these and the tokenizers; a part of the names of cached embeddings.
        sees_references: whether the embeddings depend on the reference images too.
        most_tokens: of a caption with what is put around it; what is longer is cut, as in the pipeline. None: never.
        tokenizers: by the names of :meth:`models`.
    """

    title: str
    weights_fingerprint: str
    fingerprint: str
    sees_references: bool = False
    most_tokens: int | None = None
    tokenizers: Mapping[str, PreTrainedTokenizerBase]
    _model: Any = None  # once there was a caption

    def encode(self, captions: list[str], references: list[list[Image]] | None = None) -> list[dict[str, Tensor]]:
        """Return one dict of tensors a caption, without a batch axis, on the CPU.

        Args:
            captions: to encode, in one batch.
            references: of an encoder that sees them: each caption's RGB reference images, at the size at which their
                latents are made; what the encoder wants smaller it resizes itself.
        """
        raise NotImplementedError

    def count(self, captions: Sequence[str]) -> list[TokenCount]:
        """Return how many of each caption's tokens :meth:`encode` reads and leaves out; no weights are needed."""
        raise NotImplementedError

    def ids(self, caption: str) -> dict[str, list[int]]:
        """Return the tokens that each encoder reads of a caption without images, filling too; no weights are needed."""
        raise NotImplementedError

    def fill_other_end(self) -> None:
        """Fill captions up at the other end, where the filling is a part of the text that the tokenizer adds."""

    def too_long(self, captions: Iterable[str]) -> dict[str, TokenCount]:
        """Return those captions that are not read to their end, with the counts of their tokens."""
        if (most := self.most_tokens) is None:
            return {}
        # a token has a letter or more, and templates take less than half of the tokens
        long = [each for each in captions if 2 * len(each) >= most or not each.isascii()]
        return {each: count for each, count in zip(long, self.count(long), strict=True) if count.cut}

    def release(self) -> None:
        """Free the weights; the next caption loads them again."""
        self._model = None

    def models(self) -> dict[str, nn.Module]:
        """Load every encoder, by its name in diffusers' pipeline, to look at its weights."""
        raise NotImplementedError

    def load_modules(self, names: Collection[str]) -> nn.Module:
        """Load single encoders, by their names in diffusers' pipeline, for training; each is a child of that name.

        Called with a list of captions the module returns their entries of the conditioning, batched, on its device
        and with gradient. ``enable_gradient_checkpointing()`` makes it recompute its layers in backward. Language
        models are not trained as text encoders.
        """
        raise UserError(f"text_encoder_lr: {self.title}, is not trained; remove text_encoder_lr")


_MARK = "\0"  # stands for a caption in a template


class LanguageModelEncoder(TextEncoder):
    """Captions in, ``prompt_embeds`` [L, D] and ``prompt_embeds_mask`` [L] (all true) out, of a language model.

    Attributes:
        prompt: what the model reads, ``{}`` for the caption.
        adds_specials: whether the tokenizer puts tokens of its own around that.
        dropped: tokens of the prompt's beginning whose vectors are left out; ``most_tokens`` does not count them.
        reserved: of ``most_tokens``, for what is put behind the prompt once it is cut.
        layers: after which the vectors are read, to be put side by side; none: what the model gives.
        fills_first: whether captions are filled up at their beginning.
    """

    prompt = "{}"
    adds_specials = True
    dropped = reserved = 0
    layers: tuple[int, ...] = ()
    fills_first = False

    def __init__(self, load: Callable[[], Any], tokenizer: PreTrainedTokenizerBase, fingerprint: str) -> None:
        """``load`` gives the language model."""
        self._load, self.tokenizer, self.weights_fingerprint = load, tokenizer, fingerprint
        self.tokenizers = {"text_encoder": tokenizer}
        self.fingerprint = f"{fingerprint}-{tokenizer_fingerprint(tokenizer)}"

    @torch.no_grad()
    def encode(self, captions: list[str], references: list[list[Image]] | None = None) -> list[dict[str, Tensor]]:
        """Encode ``captions`` in one batch."""
        if not captions:
            return []
        inputs = self.inputs(captions, references)
        if self._model is None:
            self._model = self._load()
        model = self._model
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        hidden = self.hidden(model, inputs).to(model.dtype).cpu()  # [B, T, D]
        lengths = [self.kept(int(length)) for length in inputs["attention_mask"].sum(dim=1)]
        kept = [slice(self.dropped, length) for length in lengths]
        rows = zip(kept, hidden, inputs["input_ids"].cpu(), strict=True)
        return [self.conditioning(row[part], ids[part]) for part, row, ids in rows]

    def inputs(self, captions: list[str], references: list[list[Image]] | None) -> dict[str, Tensor]:
        """Return what the model is called with, ``input_ids`` and ``attention_mask`` [B, T] among it.

        Here these are the prompts, filled up to what the longest caption keeps. No images are looked at.
        """
        assert references is None
        rows = [self.cut(self.prompt_of(caption))[0] for caption in captions]
        return padded(rows, max(self.kept(len(row)) for row in rows), self.filling, self.fills_first)

    @property
    def filling(self) -> Any:
        """The token that captions are filled up with."""
        return self.tokenizer.pad_token_id

    def ids(self, caption: str) -> dict[str, list[int]]:
        """Return the language model's tokens."""
        return {"text_encoder": self.inputs([caption], None)["input_ids"][0].tolist()}

    def prompt_of(self, caption: str) -> str:
        """Return what the model reads of a caption without images, uncut."""
        return self.prompt.replace("{}", caption)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, uncut."""
        return self.tokenizer(text, add_special_tokens=self.adds_specials).input_ids

    def cut(self, prompt: str) -> tuple[list[int], int]:
        """Return the tokens of a prompt that the model reads, and how many are left out at its end."""
        tokens = self.tokens(prompt)
        read = tokens if self.most_tokens is None else tokens[: self.most_tokens + self.dropped - self.reserved]
        return read, len(tokens) - len(read)

    def count(self, captions: Sequence[str]) -> list[TokenCount]:
        """Return how many of each caption's tokens are read and left out; the template's end is left out first."""
        before, after = (len(self.tokens(part)) for part in self.prompt_of(_MARK).split(_MARK))
        after -= len(self.tokens(""))  # what the tokenizer puts around any text is counted once
        rows = [self.cut(self.prompt_of(caption)) for caption in captions]
        cuts = [max(0, left_out - after) for _, left_out in rows]
        own = [len(read) + left_out - before - after for read, left_out in rows]
        return [TokenCount(tokens - cut, cut) for tokens, cut in zip(own, cuts, strict=True)]

    def hidden(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Return the vectors of all tokens [B, T, D]; those of several layers side by side."""
        if not self.layers:
            return model(**inputs, use_cache=False).last_hidden_state
        states = model(**inputs, use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([states[layer] for layer in self.layers], dim=-1)

    def conditioning(self, row: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """Return one caption's entry of :meth:`encode`: ``row`` [L, D] are its vectors, ``ids`` [L] its tokens.

        Of clones: a cached row must not keep its batch alive.
        """
        return {"prompt_embeds": row.clone(), "prompt_embeds_mask": torch.ones(len(row), dtype=torch.bool)}

    def kept(self, length: int) -> int:
        """Return how many vectors a prompt of ``length`` tokens keeps: more where padding is a part of the text."""
        return length

    def models(self) -> dict[str, nn.Module]:
        """Load the language model."""
        return {"text_encoder": self._load()}


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 16 hex digits of all by which a tokenizer turns text into tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = repr(tokenizer) if backend is None else backend.to_str()
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def padded(rows: list[list[int]], length: int = 0, token: int = 0, first: bool = False) -> dict[str, Tensor]:
    """Return ``input_ids`` and ``attention_mask`` [B, T] of token ids, filled up at the end.

    What stands at the end is seen by no real token: attention looks back only.

    Args:
        rows: of each caption.
        length: T, at least that of the longest row, which it is by default.
        token: what rows are filled with.
        first: whether the filling comes before the row.
    """
    length = length or max(map(len, rows))

    def filled(row: list[int], filling: int) -> list[int]:
        more = [filling] * (length - len(row))
        return more + row if first else row + more

    return {
        "input_ids": torch.tensor([filled(row, token) for row in rows]),
        "attention_mask": torch.tensor([filled([1] * len(row), 0) for row in rows]),
    }


CAPTION_MULTIPLE = 128


def round_caption(text: dict[str, Tensor], multiple: int = CAPTION_MULTIPLE) -> dict[str, Tensor]:
    """Return ``text`` with captions filled up with zeros at their end, and a mask also where nothing is filled up.

    By default to a multiple of 128. Captions of up to 512 tokens then have four sizes. A caption gets 64 tokens more on
    average, which is 1.5 % of an image's 4,096. And the keys of attention end in a tile of 128 where the image's tokens
    do, so cuDNN's kernel is kept from no image that it is sound for (``library.nn.attention``).

    Args:
        text: ``prompt_embeds`` [B, L, D] and, unless all tokens are real, ``prompt_embeds_mask`` [B, L].
        multiple: what L is rounded up to.
    """
    embeds = text["prompt_embeds"]
    mask = text.get("prompt_embeds_mask", torch.ones_like(embeds[..., 0], dtype=torch.bool))
    more = -embeds.shape[1] % multiple
    return text | {"prompt_embeds": F.pad(embeds, (0, 0, 0, more)), "prompt_embeds_mask": F.pad(mask, (0, more))}


# One of these must be there: without any, transformers 5 silently makes a tokenizer with an empty vocabulary.
_VOCABULARIES = ("tokenizer.json", "vocab.json", "spiece.model")
_TOKENIZER_FILES = [*_VOCABULARIES, "merges.txt", "tokenizer_config.json", "special_tokens_map.json"]


def load_tokenizer(
    load: Callable[..., Any], folder_or_name: str | Path, option: str, token: str = "", title: str = ""
) -> PreTrainedTokenizerBase:
    """Load a tokenizer with ``load`` from a folder or the hub (cache first); errors name ``option``.

    One without ``token`` is another model's than that called ``title``.
    """
    folder = Path(folder_or_name).expanduser()
    if not folder.is_dir():
        folder = _tokenizer_from_hub(str(folder_or_name), option)
    if not _has_vocabulary(folder):
        raise UserError(
            f"{option}: {folder} holds no tokenizer (none of {', '.join(_VOCABULARIES)}); give a tokenizer folder"
        )
    files = [folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt")]
    if [file.is_file() for file in files] == [False, True, False]:
        raise UserError(f"{option}: {folder} has vocab.json without merges.txt; download the tokenizer again")
    try:
        tokenizer = load(str(folder), local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{option}: {folder} holds no readable tokenizer; download it again") from error
    if token and token not in tokenizer.get_vocab():
        raise UserError(f"{option}: {folder_or_name} has no {token}; give the tokenizer of {title}")
    return tokenizer


def _has_vocabulary(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _VOCABULARIES)


def byte_tokenizer(*specials: str) -> Qwen2Tokenizer:
    """Return a tokenizer that takes each byte for a token, to count with where the published one is not there.

    ``specials`` are its special tokens, by default Qwen's.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ("im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
    specials = specials or tuple(f"<|{name}|>" for name in names)
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, "<|endoftext|>"])}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], extra_special_tokens=[*specials], model_max_length=32768)


def load_qwen_tokenizer(folder_or_name: str | Path, token: str, title: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Qwen model from a folder or the hub; one without ``token`` is another model's."""
    return load_tokenizer(Qwen2Tokenizer.from_pretrained, folder_or_name, "qwen_tokenizer", token, title)


def _tokenizer_from_hub(name: str, option: str) -> Path:
    """Return the folder of hub tokenizer ``name``: from the cache if it is there, else downloaded."""
    try:
        cached = Path(snapshot_download(name, allow_patterns=_TOKENIZER_FILES, local_files_only=True))
        if _has_vocabulary(cached):  # else the cache may have other files of the model alone
            return cached
    except (OSError, ValueError):  # not cached, or no name of the hub's
        pass
    try:
        return Path(snapshot_download(name, allow_patterns=_TOKENIZER_FILES))
    except Exception as error:  # the hub's client lets its transport's exceptions through
        raise UserError(
            f"{option}: tokenizer {name!r} is neither a folder nor cached, and the hub did not give it; "
            f"point {option} to a local tokenizer folder"
        ) from error
