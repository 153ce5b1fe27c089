"""An exponential moving average of the LoRA's weights (Polyak averaging), shown and saved instead of them.

After every optimizer step ``average = decay * average + (1 - decay) * weights``. A long memory would hold on to the
untrained weights for as long, so the decay grows with the number t of updates up to the one asked for:
``min(decay, (1 + t) / (10 + t))``, the warm-up of TensorFlow's and diffusers' averages. Averages are fp32 whatever
dtype the weights have: in bf16 an update by a thousandth would be rounded away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class WeightAverage:
    """Averages of a list of parameters; costs four bytes for each."""

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self._parameters = list(parameters)
        self._decay = decay
        self.updates = 0
        self.averages = [p.detach().float().clone() for p in parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are after an optimizer step."""
        share = 1 - min(self._decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        torch._foreach_lerp_(self.averages, [p.detach().float() for p in self._parameters], share)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside the block the parameters hold their averages; afterwards they are back bit for bit."""
        weights = [p.detach().clone() for p in self._parameters]
        self._write(self.averages)
        try:
            yield
        finally:
            self._write(weights)

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Return averages and number of updates."""
        return {"updates": self.updates, "averages": list(self.averages)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self.updates = state_dict["updates"]
        for average, saved in zip(self.averages, state_dict["averages"], strict=True):
            average.copy_(saved)
