"""What a language model is made of: how large (``Sizes``), and of which parts (``Parts``). A step changes one field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Sizes:
    """How large a model is; the last ones are Llama's (step 7).

    Attributes:
        vocabulary, context: tokens that exist, and positions.
        width, layers, heads: numbers in a token's vector, blocks, heads of attention.
        hidden: numbers in the middle of the feed-forward.
        eps: added by the norms, so that they never divide by 0.
        kv_heads: heads of keys and values; as many as ``heads`` before Llama 3.
        theta: base of the rotations that tell positions.
        factor, original_context: how far Llama 3.1 stretches them; 1 is not at all.
    """

    vocabulary: int = 100
    context: int = 64
    width: int = 48
    layers: int = 3
    heads: int = 4
    hidden: int = 192
    kv_heads: int = 4
    theta: float = 10000.0
    factor: float = 1.0
    original_context: int = 8192
    eps: float = 1e-5

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads


@dataclass(frozen=True)
class Parts:
    """What a model is made of; what is not said is GPT-2's.

    Attributes:
        norm, attention, feed_forward: make the layers of a block.
        learned_positions: whether there is a table of positions beside that of tokens.
        biases: whether linear layers add a learned vector.
        tied: whether the head is the table of tokens once more.
    """

    norm: Callable[[Sizes], nn.Module]
    attention: Callable[[Sizes, bool], nn.Module]
    feed_forward: Callable[[Sizes, bool], nn.Module]
    learned_positions: bool = True
    biases: bool = True
    tied: bool = True
