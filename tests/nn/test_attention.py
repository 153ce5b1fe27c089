"""Attention against the formula written out in float64."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from library.errors import UserError
from library.nn.attention import (
    PackedGradient,
    attend,
    attend_in_order,
    attend_jointly,
    attend_recomputed,
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def formula(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax attention in float64 on [B, S, H, D]; ``allowed`` broadcasts to [B, H, Sq, Sk]."""
    q, k, v = q.double(), k.double(), v.double()
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def assert_formula(actual: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=2e-6)  # fp32 sums over a dozen terms of size 1


def test_plain_attention_is_the_formula() -> None:
    q, k, v = random(2, 5, 4, 16), random(2, 9, 4, 16, seed=1), random(2, 9, 4, 16, seed=2)
    assert_formula(attend(q, k, v), formula(q, k, v))


def test_key_heads_are_shared_among_query_heads() -> None:
    q, k, v = random(2, 5, 6, 16), random(2, 5, 2, 16, seed=1), random(2, 5, 2, 16, seed=2)
    assert_formula(attend(q, k, v), formula(q, k, v))


@pytest.mark.parametrize("queries", [1, 3, 8])
def test_causal_queries_are_the_last_positions(queries: int) -> None:
    q, k, v = random(2, queries, 2, 16), random(2, 8, 2, 16, seed=1), random(2, 8, 2, 16, seed=2)
    allowed = torch.arange(8)[None, :] <= torch.arange(8 - queries, 8)[:, None]
    assert_formula(attend(q, k, v, causal=True), formula(q, k, v, allowed))


def test_padding_mask_hides_keys() -> None:
    q, k, v = random(2, 5, 2, 16), random(2, 5, 2, 16, seed=1), random(2, 5, 2, 16, seed=2)
    padding = torch.tensor([[True] * 5, [True, True, True, False, False]])
    assert_formula(attend(q, k, v, mask=padding), formula(q, k, v, padding[:, None, None]))


@pytest.mark.parametrize("additive", [False, True])
def test_mask_and_causal_hold_together(additive: bool) -> None:
    q, k, v = random(1, 4, 2, 16), random(1, 4, 2, 16, seed=1), random(1, 4, 2, 16, seed=2)
    seen = torch.tensor([True, False, True, True])
    mask = torch.zeros(1, 1, 1, 4).masked_fill(~seen, float("-inf")) if additive else seen[None, None, None]
    allowed = torch.ones(4, 4, dtype=torch.bool).tril() & seen
    assert_formula(attend(q, k, v, mask=mask, causal=True), formula(q, k, v, allowed))


def test_forced_math_backend_agrees() -> None:
    q, k, v = random(1, 5, 2, 16), random(1, 5, 2, 16, seed=1), random(1, 5, 2, 16, seed=2)
    assert_formula(attend(q, k, v, backend="math"), formula(q, k, v))


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuDNN attention exists on CUDA")
def test_backend_that_cannot_run_here_is_refused() -> None:
    q = random(1, 5, 2, 16)
    with pytest.raises(UserError, match=r"'cudnn' cannot run .* choose 'auto'"):
        attend(q, q, q, backend="cudnn")


@pytest.mark.parametrize("padded", [False, True])
def test_one_token_with_grouped_keys_attends_as_with_repeated_keys(padded: bool) -> None:
    torch.manual_seed(3)
    query, key, value = torch.randn(2, 1, 6, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = not padded
    repeated = [tensor.double().repeat_interleave(3, dim=2) for tensor in (key, value)]
    scores = torch.einsum("bqhd,bkhd->bhqk", query.double(), repeated[0]) / 8**0.5
    scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), repeated[1])
    ours = attend(query, key, value, mask=mask if padded else None, causal=True)
    torch.testing.assert_close(ours, expected.float(), rtol=1e-5, atol=1e-6)


def test_the_gradient_of_attention_reaches_its_kernel_packed() -> None:
    """As cuDNN's backward needs it; the numbers are those of the gradient that came."""
    x, wide = random(2, 5, 4, 16).requires_grad_(), random(2, 5, 4 * 48, seed=1)
    came = wide[..., :64].unflatten(-1, (4, 16))  # a part of a wider tensor, as torch.cat's backward hands it on
    assert not came.is_contiguous()
    PackedGradient.apply(x).backward(came)
    assert x.grad is not None
    assert x.grad.is_contiguous()
    assert torch.equal(x.grad, came)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cuDNN attention exists on CUDA")
@pytest.mark.parametrize("keys", [64, 320, 333, 4608])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_on_a_gpu_are_those_of_the_formula_whatever_is_concatenated_to_the_output(
    keys: int, masked: bool
) -> None:
    tensors = [random(1, keys, 2, 64, seed=seed).cuda().bfloat16() for seed in range(3)]
    mask = torch.ones(1, keys, dtype=torch.bool, device="cuda") if masked else None
    tensors[0][..., 0], tensors[1][..., 0] = 1.0, -120 * 8.0  # scores near -120: the sums of exponentials underflow
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        q, k, v = leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        out = attend(q, k, v, mask=mask, backend="auto" if dtype == torch.bfloat16 else "math")
        joined = torch.cat([out.flatten(2), v.detach().flatten(2)], dim=-1)
        joined.backward(random(*joined.shape, seed=4).cuda().to(dtype))
        found.append([leaf.grad for leaf in leaves])
    for ours, exact in zip(*found, strict=True):
        assert ours is not None
        assert ours.isfinite().all()
        assert (ours - exact).norm() < 0.05 * exact.norm()  # bf16: 0.3 % where scores are small, more near -120


def prologue(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return products, which save their factors."""
    return query.sin() * query, key.tanh() * key


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_recomputed_queries_and_keys_give_the_same_bits(masked: bool, checkpointed: bool) -> None:
    """Forward and backward, twice from one graph; with autocast, which backward has to enter again."""
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3]) if masked else None
    found = []
    for recomputed in (False, True):
        q, k, v = (random(2, 7, 3, 16, seed=i).requires_grad_() for i in range(3))

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recomputed: bool = recomputed) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                if recomputed:
                    return attend_recomputed(prologue, [q, k], v, partial(attend, mask=mask))
                return attend(*prologue(q, k), v, mask=mask)

        out = checkpoint(run, q, k, v, use_reentrant=False) if checkpointed else run(q, k, v)
        for seed in (7, 8):
            out.backward(random(2, 7, 3, 16, seed=seed).to(out.dtype), retain_graph=not checkpointed and seed == 7)
            if checkpointed:
                break
        found.append([out, q.grad, k.grad, v.grad])
    for plain, ours in zip(*found, strict=True):
        assert torch.equal(plain, ours)


def test_values_of_a_checkpointed_block_are_not_kept_until_its_second_run() -> None:
    values: list[weakref.ref[torch.Tensor]] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        query, key, value = (x * factor for factor in (1.0, 2.0, 3.0))
        values.append(weakref.ref(value))
        return attend_jointly([((query, key, value), (nn.Identity(), nn.Identity()))], None)

    out = checkpoint(block, random(2, 7, 3, 16, seed=1).requires_grad_(), use_reentrant=False)
    assert values[0]() is None
    out.sum().backward()
    assert len(values) == 2


def test_what_is_made_again_is_not_kept_and_nothing_is_kept_after_backward() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def watched(query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = prologue(query, key)
        made.extend(weakref.ref(tensor.untyped_storage()) for tensor in both)
        return both

    gc.disable()  # nothing may wait for it
    try:
        q, k, v = (random(2, 7, 3, 16, seed=i).requires_grad_() for i in range(3))
        out = attend_recomputed(watched, [q * 1, k * 1], v)
        assert [reference() for reference in made] == [None, None]
        saved = weakref.ref(out.untyped_storage())
        out.sum().backward()
        assert len(made) == 4
        assert all(reference() is None for reference in made)
        del out
        assert saved() is None
    finally:
        gc.enable()


def test_texts_and_images_in_order_see_what_is_before_them_and_images_themselves() -> None:
    q, k, v = (random(2, 15, 2, 8, seed=seed) for seed in range(3))
    segments = [(0, 3, True), (3, 7, False), (7, 8, True), (8, 10, True), (10, 15, False)]
    seen = torch.ones(2, 15, dtype=torch.bool)
    seen[1, 9] = False
    allowed = torch.ones(15, 15, dtype=torch.bool).tril()
    for start, end, causal in segments:
        allowed[start:end, start:end] |= not causal
    hidden = allowed.expand(2, -1, -1).clone()
    hidden[:, 10:] &= seen[:, None]  # from the last image alone
    for mask, shown in ((None, allowed), (seen, hidden[:, None])):
        ours = attend_in_order(q, k, v, segments=segments, mask=mask)
        torch.testing.assert_close(ours.double(), formula(q, k, v, shown), rtol=1e-5, atol=1e-6)

    inputs = [each.clone().requires_grad_() for each in (q, k, v)]
    kernel = partial(attend_in_order, segments=segments, mask=seen)
    again = [each.clone().requires_grad_() for each in (q, k, v)]
    attend_recomputed(lambda a, b: (a * 2, b + 1), inputs[:2], inputs[2], kernel).square().sum().backward()
    kernel(again[0] * 2, again[1] + 1, again[2]).square().sum().backward()
    for one, other in zip(inputs, again, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
