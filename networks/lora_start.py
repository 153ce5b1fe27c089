"""LoRAs that begin at the weights' own directions instead of at random.

    pissa   A = diag(sqrt(s/c)) V^T, B = U diag(sqrt(s/c)): the largest singular directions of W, c being the scale
            (https://arxiv.org/abs/2404.02948)
    olora   W = Q R: A = the first rows of R, B = the first columns of Q (https://arxiv.org/abs/2406.01775)

Both papers, and peft, take ``c B A`` off W, so that the layer begins as it was, and train A and B. Here W stays as it
is and the layer keeps the start instead, computing W + c (B A - B_0 A_0): the same numbers, but W is not rounded (a
bf16 weight minus its largest directions loses bits), it may be fp8, and switching the LoRA off gives the base. It costs
a product of the rank's size. The file then is a plain LoRA of twice the rank, [A; A_0] and [B, -B_0], as the one that
peft converts to.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from library.errors import UserError
from networks.adapter import base_weight
from networks.lora import LoRALinear, LoraStart
from networks.spectrum import decompose

StartName = Literal["default", "pissa", "olora"]


@torch.no_grad()
def begin_at_weight(layer: LoRALinear, name: str, start: StartName, generator: torch.Generator) -> None:
    """Set A and B of ``layer`` from its base's weight and let the layer take them off again.

    Args:
        layer: freshly made.
        name: of the layer, for messages.
        start: "pissa" or "olora".
        generator: on the CPU, for pissa's approximate decomposition of large weights.

    Raises:
        UserError: the weight has fewer directions than the rank.
    """
    weight = base_weight(layer.base)
    if layer.rank > min(weight.shape):
        raise UserError(
            f"init_lora_weights = {start}: {name} is {weight.shape[0]}x{weight.shape[1]} and has no "
            f"{layer.rank} directions; lower network_dim or leave the layer out"
        )
    down, up = _pissa(weight, layer, generator) if start == "pissa" else _olora(weight, layer.rank)
    layer.lora_A.weight.copy_(down)
    layer.lora_B.weight.copy_(up)
    layer.start = LoraStart(layer.lora_A.weight.detach().clone(), layer.lora_B.weight.detach().clone())


def _pissa(weight: Tensor, layer: LoRALinear, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    spectrum = decompose(weight, layer.rank, generator)
    root = (spectrum.values / layer.scale).sqrt()
    return root[:, None] * spectrum.right, spectrum.left * root


def _olora(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    # The first columns of Q follow from the first columns of W alone, the first rows of R from them.
    columns = torch.linalg.qr(weight[:, :rank])[0]
    return columns.t() @ weight, columns
