"""Random numbers as functions, not as history.

Noise, timesteps, crops, caption choices and dropout are drawn from generators seeded with what they belong to
(the run's seed, the step, the sample) rather than from a global stream. A run that is resumed, sharded over
other processes or read by another number of workers therefore draws exactly the same numbers.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on every part and on their order (BLAKE2b of their text)."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """Return a CPU ``torch.Generator`` seeded from ``parts``."""
    import torch  # the masks' settings are read where nothing is computed yet, for --help

    return torch.Generator().manual_seed(derive_seed(*parts))


def python_random(*parts: int | str) -> random.Random:
    """Return a ``random.Random`` seeded from ``parts``, for choices and shuffles."""
    return random.Random(derive_seed(*parts))
