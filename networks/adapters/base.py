"""What every kind of adapter is: a frozen linear layer with a trained change to it.

Kinds differ in the change:

    lora   W + s B A                                   networks.adapters.lora
    dora   m * (W + s B A) / |W + s B A|  (by row)     networks.adapters.lora
    lokr   W + s w1 (x) w2  (Kronecker)                networks.adapters.lycoris
    loha   W + s (a1 b1) * (a2 b2)  (by element)       networks.adapters.lycoris

None of them keeps anything of the weight's size for backward: the base may be fp8, or lie elsewhere between the two.

The plain formulas, on full weights, are in ``networks.files.weights``, as files hold the kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from library.nn.frozen_linear import LinearWrapper
from networks.files.weights import KINDS, AdapterWeights


class AdapterLinear(LinearWrapper):
    """A frozen layer with a trained change.

    Attributes:
        rank, alpha: as the kind understands them.
        scaled: the trained parameter, by the names it may have, of which the change is a multiple.
        from_zero: likewise the one that begins at zero, and the change with it.
        like_file: what gives a layer the shapes that a file has.
        bypassed: whether the layer is its base for the time being, the change left out.
    """

    kind: str
    scaled: tuple[str, ...] = ()
    from_zero: tuple[str, ...]
    like_file = "set network_dim as in the file"

    def __init__(self, base: nn.Module, rank: int, alpha: float) -> None:
        super().__init__(base)
        self.rank = rank
        self.alpha = float(alpha)
        self.bypassed = False  # here: compiled code asks whether there is such an attribute of its own

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the initial weights; the change is zero."""
        raise NotImplementedError

    def measure_base(self) -> None:
        """Measure what the kind keeps of the base's weights: they are others now."""

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by the names they have in files (``lora_A.weight``, ``lokr_w1``)."""
        return dict(self.named_parameters(recurse=False))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]`` in the dtype the base computes in."""
        out = self.base(x)
        return out if self.bypassed else self.changed(out, x)

    @staticmethod
    def forward_together(
        layers: Sequence[Any], x: Tensor, *more: Tensor, prologue: Callable[..., Tensor] | None = None
    ) -> list[Tensor]:
        """Return ``[layer(x) for layer in layers]``; x, or ``prologue(x, *more)``, is cast and kept once for all."""
        x = in_compute_dtype(prologue(x, *more) if prologue else x)
        return [layer(x) for layer in layers]

    def changed(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the base's outputs ``out`` of ``x`` with the change."""
        raise NotImplementedError

    @property
    def scale(self) -> float:
        """Factor of the change, of the kinds that have one."""
        return 1.0

    def state(self) -> dict[str, Tensor]:
        """Return what a training state has to hold: the trained parameters, and what they were begun from."""
        return {name: parameter.detach() for name, parameter in self.trained().items()}

    def weights(self, comfy: bool = True) -> AdapterWeights:
        """Return what files hold of this layer; with ``comfy`` also what ComfyUI alone takes of some kinds."""
        return KINDS[self.kind].of({name: p.detach() for name, p in self.trained().items()}, self.alpha)

    def misfit(self, weights: AdapterWeights) -> tuple[str, str] | None:
        """Return why a file's ``weights`` are none for this layer, and what to do about it; None if they are."""
        if weights.kind != self.kind or "rows" in weights.tensors:
            joined = " of a joined layer" if "rows" in weights.tensors else ""
            remedy = "set network_type" if weights.trained and not joined else "merge it into the model instead"
            return f"is a {weights.title}{joined}, here it is a {KINDS[self.kind].title}", remedy
        for name, parameter in self.trained().items():
            found = weights.tensors.get(name)
            if found is None or found.shape != parameter.shape:
                has = "nothing" if found is None else tuple(found.shape)
                return f"has {name} {has}, here {tuple(parameter.shape)}", self.like_file
        return None

    def load_weights(self, weights: AdapterWeights) -> bool:
        """Copy a file's ``weights`` into the layer, in which :meth:`misfit` sees none; return whether it rescaled.

        Another scale than the layer's goes into the ``scaled`` factor: the change is the file's, alpha the config's.
        """
        ratio = weights.scale / self.scale
        for name, parameter in self.trained().items():
            tensor = weights.tensors[name]
            fill(parameter, tensor if ratio == 1 or name not in self.scaled else tensor.float() * ratio)
        return ratio != 1

    @property
    def size(self) -> str:
        """What the number of trained parameters follows from, as the start of a run shows it."""
        return f"rank {self.rank:<4} alpha {self.alpha:<6g}"

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


def device_of(base: nn.Module) -> torch.device:
    """Return where a layer's weights are; the CPU if it has none."""
    return next((tensor.device for tensor in chain(base.parameters(), base.buffers())), torch.device("cpu"))


def new_parameter(base: nn.Module, *shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter of zeros on the device of ``base``."""
    return nn.Parameter(torch.zeros(*shape, dtype=dtype, device=device_of(base)))


@torch.no_grad()
def fill(parameter: Tensor, values: Tensor) -> None:
    """Copy ``values``, drawn in fp32 on the CPU, into ``parameter`` or a part of one."""
    parameter.copy_(values)
