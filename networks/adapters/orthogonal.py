"""OFT (https://arxiv.org/abs/2306.07280) and BOFT (https://arxiv.org/abs/2311.06243): rotating a layer's outputs.

    W' = R W        y = R (W x) + b        R = (I + Q) (I - Q)^-1, Q = P - P^T        (Cayley: R is orthogonal)

R consists of blocks along the outputs, trained as P (``oft_blocks``), zero at the start. OFT has one layer of blocks
[blocks, size, size]; BOFT several [stages, blocks, size, size], each on outputs put in another order (a butterfly), so
that every output can reach every other one. ``rank`` is the size of a block; it becomes one that fits the layer.

Which side, which transpose and which order are LyCORIS's, as ComfyUI reads them (``comfy/weight_adapter/oft.py`` and
``boft.py``). peft's layers of these names rotate the *inputs*, W R; nothing but peft loads that, and it cannot be
written in the other form.

The rotation is made of the layer's outputs, not of its weight: it costs a product of N x out x size, and the base may
be fp8.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from library.errors import UserError
from networks.adapters.base import AdapterLinear, fill, new_parameter
from networks.files.weights import AdapterWeights, OftWeights, cayley, rotate


class OFTLinear(AdapterLinear):
    """A frozen layer whose outputs, but for the bias, are rotated in blocks."""

    kind = "oft"

    def __init__(self, base: nn.Module, rank: int, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(base, self._size(base.out_features, rank), 0.0)  # type: ignore[arg-type]
        self.oft_blocks = new_parameter(base, *self._shape(), dtype=dtype)

    @staticmethod
    def _size(out_features: int, wanted: int) -> int:
        """Return the largest size of blocks up to ``wanted`` that divides the outputs."""
        return next(size for size in range(min(wanted, out_features), 0, -1) if out_features % size == 0)

    def _shape(self) -> tuple[int, ...]:
        return self.out_features // self.rank, self.rank, self.rank

    def initialise(self, generator: torch.Generator) -> None:
        """Set the blocks to zero, R to the identity."""
        fill(self.oft_blocks, torch.zeros(self.oft_blocks.shape))

    def load_weights(self, weights: AdapterWeights) -> bool:
        """Copy P, less what the file's limit takes off: there is none here, and the rotation is the file's."""
        assert isinstance(weights, OftWeights)
        return super().load_weights(weights.without_limit())

    def changed(self, out: Tensor, x: Tensor) -> Tensor:
        """Rotate ``out``, but for the bias."""
        rotations = cayley(self.oft_blocks)
        rotated = rotate(out, rotations.to(out.dtype))
        if self.bias is None:
            return rotated
        bias = self.bias.float()
        return rotated + (bias - rotate(bias, rotations)).to(out.dtype)  # R y + b, y being the output without b


class BOFTLinear(OFTLinear):
    """A frozen layer whose outputs, but for the bias, are rotated in blocks of several orders."""

    kind = "boft"

    @staticmethod
    def _size(out_features: int, wanted: int) -> int:
        """Return the largest even size of blocks up to ``wanted`` of which there are a power of two.

        Raises:
            UserError: there is none.
        """
        halves = range(2, out_features + 1, 2)
        sizes = [n for n in halves if out_features % n == 0 and (out_features // n).bit_count() == 1]
        if fitting := [size for size in sizes if size <= wanted]:
            return fitting[-1]
        least = f"set network_dim to at least {sizes[0]}" if sizes else "leave it out with exclude_patterns"
        raise UserError(f"network_type boft: a layer of {out_features} outputs has no blocks of {wanted}; {least}")

    def _shape(self) -> tuple[int, ...]:
        blocks = self.out_features // self.rank
        return blocks.bit_length(), blocks, self.rank, self.rank  # log2(blocks) + 1 stages: each output meets each
