"""What every kind of adapter is: a frozen linear layer with a trained change to it.

Kinds differ in the change:

    lora   W + s B A                                   networks.lora
    dora   m * (W + s B A) / |W + s B A|  (by row)     networks.dora
    lokr   W + s w1 (x) w2  (Kronecker)                networks.lycoris
    loha   W + s (a1 b1) * (a2 b2)  (by element)       networks.lycoris
    oft    R W, R orthogonal in blocks                 networks.orthogonal
    boft   R_m ... R_1 W, blocks in butterfly order    networks.orthogonal

None of them keeps anything of the weight's size for backward: the base may be fp8, or lie elsewhere between the two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class AdapterLinear(nn.Module):
    """A frozen layer with a trained change.

    Attributes:
        base: the wrapped layer: any module with ``in_features``, ``out_features`` and a forward.
        rank, alpha: as the kind understands them.
        enabled: False makes the layer its base.
    """

    kind: str

    def __init__(self, base: nn.Module, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.rank = rank
        self.alpha = float(alpha)
        self.enabled = True

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the initial weights; the change is zero."""
        raise NotImplementedError

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by the names they have in files (``lora_A.weight``, ``lokr_w1``)."""
        raise NotImplementedError

    def kept(self) -> dict[str, Tensor]:
        """Return what a training state has to hold: the trained parameters, and what they were begun from."""
        return {name: parameter.detach() for name, parameter in self.trained().items()}

    @property
    def in_features(self) -> int:
        """Input columns of the base."""
        return self.base.in_features  # type: ignore[return-value]

    @property
    def out_features(self) -> int:
        """Output rows of the base."""
        return self.base.out_features  # type: ignore[return-value]

    @property
    def weight(self) -> Tensor:
        """The base's weight: diffusers reads its dtype in places."""
        return self.base.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """The base's bias."""
        return self.base.bias  # type: ignore[return-value]

    def extra_repr(self) -> str:
        """Show rank and alpha in ``print(model)``."""
        return f"rank={self.rank}, alpha={self.alpha:g}"


def in_compute_dtype(x: Tensor) -> Tensor:
    """Return ``x`` in autocast's dtype where autocast is on: cast once here or once per product later."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


@torch.no_grad()
def base_weight(base: Any) -> Tensor:
    """Return the weight of a base layer, [out, in] in fp32, dequantised where it is fp8."""
    return base.dequantized(torch.float32) if hasattr(base, "dequantized") else base.weight.detach().float()


def new_parameter(*shape: int, dtype: torch.dtype, device: torch.device | str | None) -> nn.Parameter:
    """Return a parameter of zeros."""
    return nn.Parameter(torch.zeros(*shape, dtype=dtype, device=device or "cpu"))


@torch.no_grad()
def fill(parameter: nn.Parameter, values: Tensor) -> None:
    """Copy ``values``, drawn in fp32 on the CPU, into ``parameter``."""
    parameter.copy_(values)
