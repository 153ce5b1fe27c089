"""New special tokens for a tokenizer and for the model that goes with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from library.errors import UserError
from library.llm.tokenizers import Tokenizer
from library.models.transformer_lm import TransformerLM, resize_vocabulary


def extend_vocabulary(tokenizer: Tokenizer, model: TransformerLM, names: Sequence[str]) -> list[int]:
    """Add special tokens to both in place; return their numbers. Old rows of embedding and head stay bit for bit.

    A model may have more rows than its tokenizer has tokens (published ones are often padded); they are used up before
    new ones are made. Where the model's rows were padded to a multiple of 64, they are again.

    Raises:
        UserError: the tokenizer has more tokens than the model.
    """
    config = model.config
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {config.vocab_size}; use the model's own"
        )
    numbers = tokenizer.add_special_tokens(names)
    if tokenizer.vocab_size > config.vocab_size:
        grown = replace(config, vocab_size=tokenizer.vocab_size, padded_vocab_size=0)
        padded = config.padded_vocab_size > config.vocab_size
        resize_vocabulary(model, grown.padded(64) if padded else grown)
    return numbers
