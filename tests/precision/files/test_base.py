"""What all formats share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from library.precision.files.base import cached_tensor


def test_a_cached_tensor_serves_training_wherever_it_was_made_first() -> None:
    """On tensors that have no numbers, and in sampling's inference mode, whose tensors autograd refuses."""

    @cached_tensor
    def numbers(count: int) -> Tensor:
        return torch.arange(count, dtype=torch.float64)

    with FakeTensorMode():
        assert type(numbers(3)) is not Tensor
    with torch.inference_mode():
        made = numbers(3)
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (x * numbers(3)).sum().backward()
    assert numbers(3) is made
    assert x.grad is not None
    assert x.grad.tolist() == [0, 1, 2]
