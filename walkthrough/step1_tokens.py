"""Step 1: text becomes tokens, whole numbers; and each token becomes a vector, which a network can compute with."""

# %% [markdown]
# A network computes with numbers, so text has to become numbers first. Run this file cell by cell, or all of it:
# `python walkthrough/step1_tokens.py`. Pictures are saved in `output/walkthrough`.

# %%
from __future__ import annotations

import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(globals().get("__file__", "here")).resolve().parent.parent))

import regex
import torch
from torch import Tensor

from tools.demo_stories import story
from walkthrough.course import draw

TEXT = "\n".join(story(number) for number in range(2000))  # what all steps read

# %% [markdown]
# **Bytes.** Every text is a row of bytes, so 256 tokens are enough for any language and any emoji. But rows get long: a
# story has 500 bytes, and a model does the same work for each.
#
# **Byte pair encoding** makes longer tokens. Find the two neighbours that stand together most often, make them one new
# token, and repeat. GPT-2 did so 50,000 times. Text is first cut into words (with the blank before them), numbers and
# punctuation, so that no token reaches over the end of a word.

# %%
WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")  # GPT-2's


def joined(tokens: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    """Return ``tokens`` with each ``pair`` of neighbours made one."""
    result: list[bytes] = []
    for token in tokens:
        if result and (result[-1], token) == pair:
            result[-1] += token
        else:
            result.append(token)
    return result


def learn(text: str, merges: int) -> list[tuple[bytes, bytes]]:
    """Return the pairs that become tokens, the most frequent first."""
    words = {word: ([bytes([b]) for b in word.encode()], n) for word, n in Counter(WORDS.findall(text)).items()}
    found = []
    for _ in range(merges):
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for tokens, count in words.values():
            for pair in pairwise(tokens):
                pairs[pair] += count
        found.append(max(pairs, key=lambda pair: (pairs[pair], pair)))
        words = {word: (joined(tokens, found[-1]), count) for word, (tokens, count) in words.items()}
    return found


class Tokenizer:
    """Text to tokens and back."""

    def __init__(self, merges: list[tuple[bytes, bytes]]) -> None:
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self.tokens = [bytes([b]) for b in range(256)] + [left + right for left, right in merges]
        self.numbers = {token: number for number, token in enumerate(self.tokens)}

    def split(self, word: str) -> list[bytes]:
        """Join the bytes of a word as it was learned."""
        tokens = [bytes([b]) for b in word.encode()]
        while len(tokens) > 1:
            best = min(pairwise(tokens), key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if best not in self.ranks:
                break
            tokens = joined(tokens, best)
        return tokens

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``."""
        words = {word: [self.numbers[token] for token in self.split(word)] for word in {*WORDS.findall(text)}}
        return [number for word in WORDS.findall(text) for number in words[word]]

    def decode(self, numbers: list[int]) -> str:
        """Return the text of tokens; half a letter becomes a question mark."""
        return b"".join(self.tokens[number] for number in numbers).decode(errors="replace")


TOKENIZER = Tokenizer(learn(TEXT, merges=512))

# %% [markdown]
# Common words become one token with their blank; rare ones stay several. 512 merges make 768 tokens.

# %%
if __name__ == "__main__":
    for sentence in ("Once upon a time there was a rhinoceros.", "¡Hola! 🦏"):
        print(*(TOKENIZER.decode([number]) for number in TOKENIZER.encode(sentence)), sep="|")

# %% [markdown]
# **Embeddings.** The number of a token says nothing: token 300 is not "more" than token 299. So a model has a table
# with one row of numbers for each token, the *embedding*, and training finds the rows. Looking up a row is the same as
# multiplying a row of zeros with a single 1 by the table.
#
# Training gives tokens that are used alike rows that are alike. A preview without training: count which tokens stand
# beside which, and compare the counts.


# %%
def neighbours(tokens: Tensor, vocabulary: int) -> Tensor:
    """Return how much more often than by chance a token stands before and behind each other, [vocabulary, 2 * same]."""
    counts = torch.zeros(vocabulary, vocabulary).index_put_((tokens[:-1], tokens[1:]), torch.ones(1), accumulate=True)
    chance = counts.sum(1, keepdim=True) * counts.sum(0) / counts.sum()
    more = (counts / chance.clamp_min(1e-9)).clamp_min(1).log()
    return torch.cat((more, more.T), dim=1)


SHOWN = "girl boy cat fox bear red blue green Anna Leo Rosa forest lake river sunny rainy he she his her"

if __name__ == "__main__":
    tokens, words = torch.tensor(TOKENIZER.encode(TEXT)), SHOWN.split()
    numbers = [TOKENIZER.numbers[f" {word}".encode()] for word in words]
    rows = torch.nn.functional.normalize(neighbours(tokens, len(TOKENIZER.tokens))[numbers])
    counts = range(0, 513, 64)
    titles = "Tokens of a story after so many merges", "How alike the neighbours of words are"
    with draw("step1_tokens", *titles, height=4.5) as (left, right):
        left.plot(counts, [len(Tokenizer([*TOKENIZER.ranks][:count]).encode(story(0))) for count in counts], marker="o")
        left.set(xlabel="merges", ylabel="tokens", ylim=(0, None))
        right.imshow(rows @ rows.T, cmap="Blues")
        right.set_xticks(range(len(words)), words, rotation=90)
        right.set_yticks(range(len(words)), words)
        right.grid(False)

# %% [markdown]
# **Is it right?** The `tokenizers` package, which transformers uses, gets our merges and has to give the same tokens.

# %%
if __name__ == "__main__":
    from tests.walkthrough.compare import library_tokenizer

    odd = TEXT[:20_000] + "  Ünïcode 🦏 don't   1234\n\n\tx"
    assert TOKENIZER.encode(odd) == library_tokenizer(TOKENIZER).encode(odd).ids
    assert TOKENIZER.decode(TOKENIZER.encode(odd)) == odd
    print(f"check: {len(odd):,} letters are the same {len(TOKENIZER.encode(odd)):,} tokens, and become the same text")
    table = torch.randn(len(TOKENIZER.tokens), 48)
    assert torch.equal(torch.eye(len(table))[tokens[:9]] @ table, table[tokens[:9]])
    print("check: a row of the table is a product with a single 1, to the bit")
