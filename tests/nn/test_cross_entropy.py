"""The loss that is made piece by piece, against torch's on whole logits: value and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import library.nn.cross_entropy as cross_entropy
from library.nn.cross_entropy import token_cross_entropy

VOCABULARY, ROWS, WIDTH = 50, 64, 24


def case(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(3, 70, WIDTH, dtype=dtype, requires_grad=True)
    head = nn.Linear(WIDTH, ROWS, bias=False, dtype=dtype)
    targets = torch.randint(0, VOCABULARY, (3, 70))
    targets[1, 5:40] = cross_entropy.IGNORED
    return hidden, head, targets


def whole(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss in float64, the padding rows cut off."""
    logits = hidden.double() @ weight.double()[:VOCABULARY].t()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("pieces", [1, 4], ids=["one piece", "several"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_loss_and_gradients_are_those_of_the_whole_logits(
    dtype: torch.dtype, tolerance: float, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cross_entropy._LOGITS, "cpu", 210 * VOCABULARY // pieces)  # at least 64 rows a piece
    hidden, head, targets = case(dtype)
    loss = token_cross_entropy(hidden, head, targets, VOCABULARY)
    ours = torch.autograd.grad(3 * loss, [hidden, head.weight])
    expected = whole(hidden, head.weight, targets)
    theirs = torch.autograd.grad(3 * expected, [hidden, head.weight])
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    for own, other in zip(ours, theirs, strict=True):
        assert own.dtype == dtype
        assert (own.double() - other).abs().max() <= tolerance * other.abs().max()
    assert ours[1][VOCABULARY:].abs().max() == 0
    with torch.no_grad():
        assert token_cross_entropy(hidden, head, targets, VOCABULARY).item() == pytest.approx(loss.item(), rel=1e-5)


def test_a_frozen_head_passes_the_gradient_on() -> None:
    hidden, head, targets = case()
    head.requires_grad_(False)
    token_cross_entropy(hidden, head, targets, VOCABULARY).backward()
    (expected,) = torch.autograd.grad(whole(hidden, head.weight, targets), [hidden])
    torch.testing.assert_close(hidden.grad, expected.float(), rtol=1e-4, atol=1e-7)
    assert head.weight.grad is None


def test_a_head_that_was_compiled_by_itself_keeps_no_logits() -> None:
    # so accelerate's regional compilation hands it over
    hidden, head, targets = case()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        loss = token_cross_entropy(hidden, torch.compile(head, backend="eager"), targets, VOCABULARY)
    loss.backward()
    assert loss.item() == pytest.approx(whole(hidden, head.weight, targets).item(), rel=1e-5)
    assert head.weight.grad is not None
    assert max(kept) < targets.numel() * VOCABULARY


def test_autocast_multiplies_in_bf16_and_sums_in_fp32() -> None:
    hidden, head, targets = case()
    with torch.autocast("cpu", torch.bfloat16):
        loss = token_cross_entropy(hidden, head, targets, VOCABULARY)
    loss.backward()
    rounded = whole(hidden.bfloat16(), head.weight.bfloat16(), targets)
    assert loss.dtype == head.weight.grad.dtype == torch.float32
    assert loss.item() == pytest.approx(rounded.item(), rel=4e-3)  # logits are rounded to 8 bits


def test_nothing_to_learn_from_is_a_loss_of_zero() -> None:
    hidden, head, targets = case()
    loss = token_cross_entropy(hidden, head, torch.full_like(targets, cross_entropy.IGNORED), VOCABULARY)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None
    assert hidden.grad.abs().max() == 0
