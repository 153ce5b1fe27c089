"""A frozen layer with what files change of it: adapters of any kind, at any strength, to generate with and to measure.

Nothing here is trained; the layers that are have the same formulas (``networks.adapters.lora`` and ``lycoris``).
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from networks.adapters.base import AdapterLinear, base_weight, device_of, in_compute_dtype
from networks.files.weights import AdapterWeights, CombinedWeights


class CombinedLinear(AdapterLinear):
    """A layer with a change beside it.

    Attributes:
        change: what it is; of any kind.
        multiplier: its strength.
    """

    kind, from_zero = CombinedWeights.kind, ()
    change: AdapterWeights

    def __init__(self, base: nn.Module) -> None:
        super().__init__(base, 0, 0.0)
        self.multiplier = 1.0

    def misfit(self, weights: AdapterWeights) -> tuple[str, str] | None:
        """Return why a change is none of this layer."""
        made_for = weights.made_for_other((self.out_features, self.in_features))
        here = f"here it has {self.out_features}x{self.in_features}"
        return (f"is for a layer of {made_for}, {here}", "it was trained on another model") if made_for else None

    def load_weights(self, weights: AdapterWeights) -> bool:
        """Take a change, on the layer's device."""
        self.change = weights.to(device_of(self.base))
        return False

    def changed(self, out: Tensor, x: Tensor) -> Tensor:
        """Add the change's outputs."""
        added = self.change.beside(in_compute_dtype(x), self.multiplier, partial(base_weight, self.base))
        return out + added.to(out.dtype)
