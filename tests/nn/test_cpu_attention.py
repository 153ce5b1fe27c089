"""Attention for CPUs against PyTorch's in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import library.nn.cpu_attention as cpu_attention
from library.nn.attention import Stream, attend, attend_together
from library.nn.norms import RMSNorm
from library.nn.rope import multi_axis_table


@pytest.fixture(autouse=True)
def _not_on_intel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "blas_suits", lambda: False)


def test_pytorchs_own_is_left_where_its_blas_suits(monkeypatch: pytest.MonkeyPatch) -> None:
    large = [Stream(*(torch.zeros(1, 1024, 2, 64) for _ in range(3)))]
    assert cpu_attention.fits(large)
    monkeypatch.setattr(cpu_attention, "blas_suits", lambda: True)
    assert not cpu_attention.fits(large)


def _reference(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2)


def _with_gradients(attention: object, tensors: list[Tensor], direction: Tensor, scale: float | None) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = attention(*leaves, scale)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, leaves, direction.to(out.dtype))]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("keys", [70, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients_are_no_further_from_float64_than_pytorchs(
    dtype: torch.dtype, keys: int, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_attention, "_SCORES", 64 * keys)  # two blocks of rows
    torch.manual_seed(0)
    tensors = [torch.randn(2, n, 3, 16, dtype=dtype) for n in (70, keys, keys)]
    before = [t.clone() for t in tensors]
    direction = torch.randn(2, 70, 3, 16)
    exact = _with_gradients(_reference, [t.double() for t in tensors], direction, scale)
    plain = _with_gradients(_reference, tensors, direction, scale)
    mine = _with_gradients(
        lambda *t: cpu_attention.attend_on_cpu([Stream(*t[:3])], scale=t[3]), tensors, direction, scale
    )
    for ours, theirs, truth in zip(mine, plain, exact, strict=True):
        assert ours.dtype == dtype
        # the same roundings in another order: 30 % to spare for luck, and for fp32 the rounding of one number
        limit = 1.3 * (theirs - truth).norm() + torch.finfo(torch.float32).eps * truth.norm()
        assert (ours - truth).norm() <= limit
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_attend_takes_it_for_large_full_attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    plain = cpu_attention.attend_on_cpu
    monkeypatch.setattr(
        cpu_attention, "attend_on_cpu", lambda s, **a: calls.append(tuple(s[0].query.shape)) or plain(s, **a)
    )
    large, small = torch.randn(1, 512, 1, 64), torch.randn(1, 64, 1, 64)
    attend(small, small, small)
    attend(large, large, large, causal=True)
    attend(large, large, large, mask=torch.ones(1, 512, dtype=torch.bool))
    attend(large, large, large, backend="math")
    assert not calls
    mine = attend(large, large, large)
    assert calls == [(1, 512, 1, 64)]
    torch.testing.assert_close(mine, _reference(large, large, large, None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_streams_with_norms_and_rotation_agree_with_the_separate_operations(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    norms = [RMSNorm(16, eps=1e-6).requires_grad_(False) for _ in range(4)]
    for norm in norms:
        norm.weight.data.normal_(mean=1.0, std=0.3)
    rope = multi_axis_table(torch.randn(50, 2) * 20, (8, 8))
    tensors = [torch.randn(2, n, 3, 16, dtype=dtype) for n in (20, 20, 20, 30, 30, 30)]
    direction = torch.randn(2, 50, 3, 16)

    def together(*t: Any) -> Tensor:
        return attend_together([Stream(*t[:3], *norms[:2]), Stream(*t[3:6], *norms[2:])], rope)

    exact = _with_gradients(together, [t.float() for t in tensors], direction, None)
    plain = _with_gradients(together, tensors, direction, None)
    monkeypatch.setattr(cpu_attention, "_LARGE", 1)
    mine = _with_gradients(together, tensors, direction, None)
    assert not any(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))  # it was the other way indeed
    for ours, theirs, truth in zip(mine, plain, exact, strict=True):
        assert ours.dtype == dtype
        # in fp32 "exact" is the separate operations themselves: a dozen roundings; in bf16 fewer roundings than theirs
        limit = 1.1 * (theirs - truth).norm() + 1e-6 * truth.norm()
        assert (ours - truth).norm() <= limit


def test_norms_that_are_trained_take_the_separate_operations() -> None:
    large = torch.randn(1, 512, 1, 64)
    assert cpu_attention.fits([Stream(large, large, large, RMSNorm(64).requires_grad_(False))])
    assert not cpu_attention.fits([Stream(large, large, large, RMSNorm(64))])
