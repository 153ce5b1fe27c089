"""RMSNorm against PyTorch's, diffusers' and the formula in float64."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm

from library.nn.norms import RMSNorm, beside_gelu, gelu, join_tokens, modulated_norm, split_tokens, swiglu


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_output_is_the_published_formula() -> None:
    x, norm = random(4, 7, 32), RMSNorm(32, eps=1e-6)
    norm.weight.data = random(32, seed=1)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    # fp32 arithmetic on 32 numbers: a few units in the last place.
    torch.testing.assert_close(norm(x).double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adopted_torch_norm_gives_the_same_bits_forward_and_backward(dtype: torch.dtype) -> None:
    theirs = torch.nn.RMSNorm(32, eps=1e-6).to(dtype)
    theirs.weight.data = random(32, seed=1, dtype=dtype)
    ours = RMSNorm.adopt(theirs)
    assert ours.weight is theirs.weight
    gradients = []
    for norm in (theirs, ours):
        x = random(2, 5, 32, dtype=dtype).requires_grad_()
        y = norm(x)
        y.backward(random(2, 5, 32, seed=2, dtype=dtype))
        gradients.append((y.detach(), x.grad))
    assert torch.equal(gradients[0][0], gradients[1][0])
    assert torch.equal(gradients[0][1], gradients[1][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_fixed_weight_gives_torchs_bits_and_the_formulas_gradient(dtype: torch.dtype, weighted: bool) -> None:
    """More rows than go through at once, a part of a wider tensor; the gradient is rounded once, to 2^-9 in bf16."""
    norm = RMSNorm(32, eps=1e-6, elementwise_affine=weighted).to(dtype)
    if weighted:
        norm.weight = torch.nn.Parameter(random(32, seed=1, dtype=dtype), requires_grad=False)
    wide = random(3, 700, 4, 64, dtype=dtype)
    x, given = wide[..., :32].requires_grad_(), random(3, 700, 4, 32, seed=2, dtype=dtype)
    y = norm(x)
    y.backward(given)
    assert torch.equal(y, torch.nn.functional.rms_norm(x, (32,), norm.weight, 1e-6))
    exact = wide[..., :32].double().requires_grad_()
    weight = norm.weight.double() if weighted else 1.0
    (exact / (exact.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight).backward(given.double())
    assert x.grad is not None
    assert exact.grad is not None
    tolerance = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=tolerance, atol=tolerance * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adopted_diffusers_norm_agrees_within_rounding(dtype: torch.dtype) -> None:
    theirs = DiffusersRMSNorm(32, eps=1e-6).to(dtype)
    theirs.weight.data = random(32, seed=1, dtype=dtype)
    x = random(2, 5, 32, dtype=dtype)
    # diffusers rounds before and after the product with the weight, we once: two half units of bf16 (2^-8).
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(RMSNorm.adopt(theirs)(x), theirs(x), rtol=tolerance, atol=1e-6)


def test_fp32_weight_keeps_bf16_input_in_bf16() -> None:
    norm = RMSNorm(32)
    norm.weight.data = random(32, seed=1)
    x = random(2, 32, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    assert y.dtype == torch.bfloat16
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=1e-6)  # weight and result each rounded to 2^-9


def test_norm_without_epsilon_uses_that_of_fp32_as_torch_does() -> None:
    theirs = torch.nn.RMSNorm(8, eps=None)
    x = random(3, 8) * 1e-4  # so small that the epsilon matters
    assert torch.equal(RMSNorm.adopt(theirs)(x), theirs(x))


def test_norm_over_several_axes_is_refused() -> None:
    with pytest.raises(ValueError, match="several axes"):
        RMSNorm.adopt(torch.nn.RMSNorm((2, 8)))


@pytest.mark.parametrize("tokens", [1, 24], ids=["a vector a sample", "a vector a token"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_modulation_is_that_of_the_paper(dtype: torch.dtype, most: float, batch: int, tokens: int) -> None:
    """LayerNorm(x) (1 + scale) + shift and its gradients in float64; bf16 rounds results and terms of sums, 2^-8."""
    x, shift, scale = (random(batch, n, 64, seed=n).to(dtype) for n in (24, tokens, tokens))
    gradient = random(batch, 24, 64, seed=5)
    found = [each.clone().requires_grad_() for each in (x, shift, scale)]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        result = modulated_norm(*found, eps=1e-6)
    exact = [each.double().requires_grad_() for each in (x, shift, scale)]
    centred = exact[0] - exact[0].mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + exact[2]) + exact[1]
    assert result.dtype == dtype
    result.backward(gradient.to(result.dtype))
    expected.backward(gradient.to(result.dtype).double())
    pairs = [(result, expected), *((one.grad, other.grad) for one, other in zip(found, exact, strict=True))]
    for one, other in pairs:
        assert one is not None
        assert other is not None
        assert (one.double() - other).norm() <= most * other.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_and_its_gradients_are_autograds_bit_for_bit(dtype: torch.dtype) -> None:
    weight, found = random(64, 8, seed=3).to(dtype), []
    for formula in (swiglu, lambda gate, up: torch.nn.functional.silu(gate) * up):
        inputs = [random(3, 5, 64, seed=seed).to(dtype).requires_grad_() for seed in (1, 2)]
        out = formula(*inputs)
        (out @ weight).square().sum().backward()
        found.append((out, *(each.grad for each in inputs)))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_without_a_shift_modulation_has_none() -> None:
    x, scale = random(2, 5, 64), random(2, 1, 64, seed=1)
    for vectors in (scale, scale.expand(-1, 5, -1)):
        shifted = modulated_norm(x, torch.zeros_like(vectors), vectors, eps=1e-6)
        assert torch.equal(modulated_norm(x, None, vectors, eps=1e-6), shifted)


@pytest.mark.parametrize("batch", [1, 2])
def test_joining_what_was_split_copies_nothing(batch: int) -> None:
    stream = random(batch, 7, 4).requires_grad_()
    parts = split_tokens(stream * 1, 3)
    joined = join_tokens(*parts)
    assert joined.data_ptr() == parts[0].data_ptr()
    assert torch.equal(joined, stream)
    (joined * random(batch, 7, 4, seed=1)).sum().backward()
    assert stream.grad is not None
    assert torch.equal(stream.grad, random(batch, 7, 4, seed=1))


@pytest.mark.parametrize("order", ["others", "swapped", "apart"])
def test_joining_other_tokens_is_a_concatenation(order: str) -> None:
    """Of two tensors, of one's parts the other way round, and of one with a gap; only one of them with a gradient."""
    one, other = random(2, 3, 4).requires_grad_(), random(2, 5, 4, seed=1)
    text, image = {
        "others": (one * 1, other),
        "swapped": split_tokens(torch.cat([other, one], dim=1), 5)[::-1],
        "apart": tuple(torch.cat([one, other[:, :1], other], dim=1).split([3, 1, 5], dim=1))[::2],
    }[order]
    (join_tokens(text, image) * (weights := random(2, 8, 4, seed=2))).sum().backward()
    assert torch.equal(join_tokens(text, image), torch.cat([one, other], dim=1))
    assert one.grad is not None
    assert torch.equal(one.grad, weights[:, :3])


def test_one_part_of_a_split_may_be_all_that_is_used() -> None:
    stream = random(1, 7, 4).requires_grad_()
    split_tokens(stream, 3)[1].sum().backward()
    assert stream.grad is not None
    assert torch.equal(stream.grad, torch.cat([torch.zeros(1, 3, 4), torch.ones(1, 4, 4)], dim=1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gelu_is_the_published_formula(dtype: torch.dtype) -> None:
    """In the tanh form, x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2; more than a piece, and large numbers."""
    x = torch.cat([4 * random(2, 70, 2000, seed=3), 40 * random(2, 3, 2000, seed=4)], dim=1).to(dtype)
    wide = x.double()
    exact = wide * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))) / 2
    # One rounding to the dtype, and that of the arithmetic, in fp32 or fp64, where values are small beside x.
    arithmetic = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    torch.testing.assert_close(gelu(x).double(), exact, rtol=torch.finfo(dtype).eps, atol=4 * arithmetic)


def test_gelu_beside_another_tensor_is_both_side_by_side_with_its_gradient() -> None:
    first, x = (random(2, 5, width, seed=width, dtype=torch.float64).requires_grad_() for width in (3, 7))
    assert torch.equal(beside_gelu(first, x), torch.cat([first, gelu(x)], dim=-1))
    assert torch.autograd.gradcheck(lambda a, b: beside_gelu(a, b) * 1.0, (first, x))
