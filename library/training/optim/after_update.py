"""What happens to the weights after an update: an average follows them, and their norms are limited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from networks.adapters.base import AdapterLinear


class WeightAverage:
    """An exponential moving average of the LoRA's weights (Polyak averaging), shown and saved instead of them.

    After every optimizer step ``average = decay * average + (1 - decay) * weights``. A long memory would hold on to the
    untrained weights for as long, so the decay grows with the number t of updates up to the one asked for:
    ``min(decay, (1 + t) / (10 + t))``, the warm-up of TensorFlow's and diffusers' averages. Averages are fp32 whatever
    dtype the weights have: in bf16 an update by a thousandth would be rounded away. They cost
    four bytes for each weight.
    """

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


class WeightNormLimit:
    """Max norm regularisation: no layer's update grows beyond a norm (``scale_weight_norms``, kohya's sd-scripts).

    After each optimizer step the update ``D = s B A`` of every layer, s = alpha / rank, is compared with the limit m
    (``apply_max_norm_regularization`` in ``networks/lora_flux.py`` there):

        r = min(|D|, m) / max(|D|, m / 2)        if |D| > m:  A *= sqrt(r), B *= sqrt(r)

    so that what was larger has the norm m. The Frobenius norm needs no product of the weight's size:
    ``|B A|^2 = sum((B^T B) * (A A^T))``, two matrices of rank x rank. What is measured stays on the device until a step
    is logged.

    Attributes:
        limit: m above.
        layers: with ``lora_A``, ``lora_B`` and a scale.
    """

    def __init__(self, limit: float, layers: Sequence[AdapterLinear]) -> None:
        self.limit, self.layers = limit, layers
        self._norms: Tensor | None = None  # [layers] fp32, before scaling

    @torch.no_grad()
    def apply(self, is_taken: Tensor) -> None:
        """Scale down what is too large, after a step of the optimizer that is taken; ``is_taken`` [] tells."""
        norms = []
        for layer in self.layers:
            down, up = (part for name, part in layer.trained().items() if name in ("lora_A.weight", "lora_B.weight"))
            norm = product_norm(up, down) * layer.scale
            norms.append(norm)
            factor = (self.limit / norm.clamp(min=self.limit)).sqrt()
            for part in (down, up):
                part.copy_(torch.where((factor < 1) & is_taken.to(factor.device), part.float() * factor, part.float()))
        self._norms = torch.stack([norm.to(norms[0].device) for norm in norms])

    def metrics(self) -> dict[str, float]:
        """Return what sd-scripts logs of the last step, under its names; the device is waited for.

        How many layers were scaled, and the largest and the mean norm after that.
        """
        if self._norms is None:
            return {}
        kept = self._norms.clamp(max=self.limit)
        return {
            "max_norm/keys_scaled": float((self._norms > self.limit).sum()),
            "max_norm/max_key_norm": float(kept.max()),
            "norm/avg_key_norm": float(kept.mean()),
        }


def product_norm(up: Tensor, down: Tensor) -> Tensor:
    """Return the Frobenius norm [] fp32 of ``up @ down``, [out, rank] and [rank, in]."""
    up, down = up.float(), down.float()
    with torch.autocast(up.device.type, enabled=False):
        return ((up.t() @ up) * (down @ down.t())).sum().clamp_min(0).sqrt()
