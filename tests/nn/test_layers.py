"""Norms, cross entropy in pieces and frozen linear layers against PyTorch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from torch import Tensor, nn

import library.nn.cross_entropy as cross_entropy
from library.nn.cross_entropy import token_cross_entropy
from library.nn.frozen_linear import FrozenLinear, has_input_gradient, input_gradient, project_together
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


@pytest.mark.parametrize("frozen", [False, True])
def test_each_row_has_the_sum_of_its_own_losses_and_gradients_by_its_weight(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cross_entropy._LOGITS, "cpu", 64 * VOCABULARY)  # several pieces a row
    hidden, head, targets = case()
    targets[0, : targets.shape[1] // 2] = cross_entropy.IGNORED
    head.requires_grad_(not frozen)
    weights = torch.linspace(-1.0, 2.0, len(targets))
    losses = token_cross_entropy(hidden, head, targets, VOCABULARY, by_row=True)
    (weights * losses).sum().backward()
    logits = hidden.double() @ head.weight.double()[:VOCABULARY].t()
    each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").sum(dim=1)
    wanted = torch.autograd.grad((weights * each).sum(), [hidden] if frozen else [hidden, head.weight])
    torch.testing.assert_close(losses.double(), each, rtol=1e-5, atol=0)
    for own, other in zip((hidden.grad, head.weight.grad), wanted, strict=False):
        assert (own.double() - other).abs().max() <= 1e-5 * other.abs().max()
    with torch.no_grad():
        again = token_cross_entropy(hidden, head, targets, VOCABULARY, by_row=True)
    torch.testing.assert_close(again, losses.detach(), rtol=1e-5, atol=0)


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


def _layers(dtype: torch.dtype = torch.float32, size: int = 48) -> tuple[nn.Linear, FrozenLinear]:
    torch.manual_seed(0)
    linear = nn.Linear(size, size // 2, dtype=dtype).requires_grad_(False)
    return linear, FrozenLinear.adopt(linear)


def _both(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    (gradient,) = torch.autograd.grad(y.float().square().sum(), x)
    return y.detach(), gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_output_and_input_gradient_are_those_of_nn_linear(dtype: torch.dtype, autocast: bool) -> None:
    linear, frozen = _layers(dtype)
    x = torch.randn(2, 5, 48, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, mine = _both(linear, x), _both(frozen, x)
    for a, b in zip(mine, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)  # small: the same kernels


def test_backward_reads_the_weight_as_the_layer_holds_it_then() -> None:
    _, frozen = _layers()
    x = torch.randn(3, 48, requires_grad=True)
    y = frozen(x)
    moved = frozen.weight.data.clone()
    frozen.weight.data.fill_(float("nan"))  # the memory it lay in is used for something else
    frozen.weight.data = moved
    y.sum().backward()
    torch.testing.assert_close(x.grad, moved.sum(0).expand(3, -1))


def test_nothing_is_kept_for_backward() -> None:
    _, frozen = _layers(torch.float32)
    kept: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        torch.autocast("cpu", torch.bfloat16),
    ):
        frozen(torch.randn(3, 48, requires_grad=True))
    assert not kept


def test_a_trained_layer_has_no_place_here() -> None:
    linear, frozen = _layers()
    assert has_input_gradient(linear)
    assert has_input_gradient(frozen)
    assert not has_input_gradient(nn.Linear(3, 3))
    assert torch.equal(input_gradient(linear, torch.ones(1, 24)), torch.ones(1, 24) @ linear.weight)


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
