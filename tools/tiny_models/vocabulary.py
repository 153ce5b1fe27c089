"""Tokenizers without a download: every word of the domain is one piece, anything else falls back to
characters.

CLIP's is byte-level BPE: its merges are learnt from the word list until each word is whole. T5's is a
unigram model: each word scores better than its characters. A word that neither knows, a LoRA's trigger for
example, becomes a row of single characters (T5) or bytes (CLIP), all of which training has seen inside
invented words.
"""

import string
from collections import Counter
from itertools import pairwise

from tokenizers import pre_tokenizers
from transformers import CLIPTokenizer, T5TokenizerFast

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
WORD_END = "</w>"
WORD_START = "▁"


def build_t5_tokenizer(words: list[str]) -> T5TokenizerFast:
    """Scores are log-probabilities: a word costs 1, a character 10, so a known word is never cut."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(WORD_START + word, -1.0) for word in words]
    single = [WORD_START, *string.ascii_letters, *string.digits, *string.punctuation]
    known = {piece for piece, _ in pieces}
    pieces += [(character, -10.0) for character in single]
    pieces += [(WORD_START + letter, -5.0) for letter in string.ascii_uppercase if WORD_START + letter not in known]
    return T5TokenizerFast(vocab=pieces, extra_ids=0, model_max_length=512)


def build_clip_tokenizer(words: list[str]) -> CLIPTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = learn_merges(words)
    pieces = [*alphabet, *(character + WORD_END for character in alphabet), *map("".join, merges), BOS, EOS]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=77)


def learn_merges(words: list[str]) -> list[tuple[str, str]]:
    """Byte-pair encoding until every word is one piece.

    Written out because `tokenizers.BpeTrainer` settles ties by hash order, differently in every run: the ids that
    a model was trained on would not be those of the tokenizer that is saved with it.
    """
    spelt = [[*word[:-1], word[-1] + WORD_END] for word in words]
    merges: list[tuple[str, str]] = []
    while pairs := Counter(pair for pieces in spelt for pair in pairwise(pieces)):
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        spelt = [_merged(pieces, best) for pieces in spelt]
    return merges


def _merged(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    result: list[str] = []
    for piece in pieces:
        if result and (result[-1], piece) == pair:
            result[-1] += piece
        else:
            result.append(piece)
    return result
