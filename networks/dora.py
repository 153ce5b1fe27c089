"""Weight-decomposed low-rank adaptation (Liu et al. 2024, https://arxiv.org/abs/2402.09353) of a linear layer.

    W' = m * V / |V|        V = W + s B A, its rows divided by their length, m [out] trained

As in peft, whose file diffusers loads: a length for each output row, m beginning at |W|, and |V| a constant to the
gradient (section 4.3 of the paper). With c = m / |V| and z = V x + b, what a LoRA computes,

    y = c * z + (1 - c) * b

so all of LoRA's fast paths serve here too. |V| is had without forming V:

    |v_i|^2 = |w_i|^2 + 2 s b_i . (A w_i) + s^2 b_i (A A^T) b_i^T

in fp32. |w_i|^2 is computed once; A W^T anew in every forward, a product with as many columns as the rank, for which a
weight in bf16 or fp8 is there in fp32 for a moment.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from networks.adapter import base_weight, new_parameter
from networks.lora import LoRALinear
from networks.lora_product import Make


class DoRALinear(LoRALinear):
    """A LoRA layer whose merged weight has trained row lengths.

    Attributes:
        magnitude: m, [out].
    """

    kind = "dora"
    squares: Tensor

    def __init__(
        self,
        base: nn.Module,
        rank: int,
        alpha: float,
        *,
        dropout: float = 0.0,
        rank_dropout: float = 0.0,
        rank_stabilised: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            base,
            rank,
            alpha,
            dropout=dropout,
            rank_dropout=rank_dropout,
            rank_stabilised=rank_stabilised,
            dtype=dtype,
            device=device,
        )
        self.register_buffer("squares", base_weight(base).square().sum(dim=1).to(device or "cpu"), persistent=False)
        # fp32 always: rounded to bf16, the layer would not begin as its base, and small steps would be lost
        self.magnitude = new_parameter(self.out_features, dtype=torch.float32, device=device)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw A as a LoRA does, set B to zero and m to the row lengths of the base."""
        super().initialise(generator)
        with torch.no_grad():
            self.magnitude.copy_(self.squares.sqrt())

    def trained(self) -> dict[str, nn.Parameter]:
        """Return A, B and m."""
        return super().trained() | {"magnitude": self.magnitude}

    @torch.no_grad()
    def row_lengths(self) -> Tensor:
        """Return |V|, [out] fp32."""
        down, up = self.lora_A.weight.float(), self.lora_B.weight.float()
        with torch.autocast(down.device.type, enabled=False):
            crossed = (up * (base_weight(self.base) @ down.t())).sum(dim=1)
            own = ((up @ (down @ down.t())) * up).sum(dim=1)
        scale = self.scale
        return (self.squares + 2 * scale * crossed + scale**2 * own).clamp_min(0).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in]`` to ``[..., out]`` in the dtype the base computes in."""
        return DoRALinear.forward_together([self], x)[0]

    @staticmethod
    def forward_together(  # type: ignore[override]
        layers: Sequence[DoRALinear], x: Tensor, *more: Tensor, make: Make | None = None
    ) -> list[Tensor]:
        """Return ``[layer(x) for layer in layers]``; see :meth:`networks.lora.LoRALinear.forward_together`."""
        outputs = LoRALinear.forward_together(layers, x, *more, make=make)
        return [layer._with_lengths(z) if layer.enabled else z for layer, z in zip(layers, outputs, strict=True)]

    def _with_lengths(self, z: Tensor) -> Tensor:
        """Return c z + (1 - c) b."""
        ratio = self.magnitude.float() / self.row_lengths()
        out = z * ratio.to(z.dtype)
        return out if self.bias is None else out + ((1 - ratio) * self.bias.float()).to(z.dtype)
