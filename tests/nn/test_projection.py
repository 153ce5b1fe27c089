"""project_together, with layers that can share work and layers that cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from library.nn.frozen_linear import project_together


class Counting(nn.Linear):
    """A linear layer that notes how often a group of them was asked together."""

    calls: ClassVar[list[int]] = []

    @staticmethod
    def forward_together(layers: Sequence[Counting], x: Tensor) -> list[Tensor]:
        Counting.calls.append(len(layers))
        return [layer(x) for layer in layers]


def test_layers_that_offer_it_are_asked_once_and_the_order_is_kept() -> None:
    Counting.calls.clear()
    layers = [Counting(4, 2), nn.Linear(4, 3), Counting(4, 5)]
    x = torch.randn(2, 4)
    outputs = project_together(layers, x)
    assert Counting.calls == [2]
    for layer, output in zip(layers, outputs, strict=True):
        assert torch.equal(output, layer(x))


def test_plain_layers_are_called_one_by_one() -> None:
    layers = [nn.Linear(4, 2), nn.Linear(4, 3)]
    x = torch.randn(2, 4)
    assert [torch.equal(y, layer(x)) for layer, y in zip(layers, project_together(layers, x), strict=True)] == [
        True
    ] * 2
