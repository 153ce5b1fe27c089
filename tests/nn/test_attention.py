"""Attention against the formula written out in float64; rotary embedding against diffusers and transformers."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxPosEmbed
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import library.nn.rope as rope
from library.errors import UserError
from library.nn.attention import PackedGradient, attend, attend_in_order, attend_jointly, attend_recomputed
from library.nn.rope import Llama31Scaling, MultiAxisRope


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


def rope_random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rotation_is_a_product_with_a_complex_number() -> None:
    x, positions = rope_random(1, 6, 2, 8), torch.tensor([0, 1, 2, 10, 100, 100_000])
    frequencies = rope.rope_frequencies(8)
    pairs = torch.view_as_complex(x.double().reshape(1, 6, 2, 4, 2))
    turn = torch.polar(torch.ones(6, 4, dtype=torch.float64), torch.outer(positions.double(), frequencies))
    exact = torch.view_as_real(pairs * turn[None, :, None]).flatten(-2)
    rotated = rope.rotate_interleaved(x, rope.rope_table(positions, frequencies))
    # Angles are float64, only cosines and sines are rounded to fp32: position 100,000 is as exact as 1.
    torch.testing.assert_close(rotated.double(), exact, rtol=0, atol=1e-6)


def test_table_and_rotation_are_those_of_diffusers_flux() -> None:
    axes = (16, 56, 56)
    positions = torch.cat(
        [torch.zeros(5, 3), torch.stack([torch.zeros(9), torch.arange(9.0), torch.arange(9.0) * 3], 1)]
    )
    theirs = FluxPosEmbed(theta=10000, axes_dim=list(axes))(positions)
    ours = MultiAxisRope(axes)(positions)
    for mine, reference in zip(ours, theirs, strict=True):
        assert torch.equal(mine.repeat_interleave(2, dim=-1), reference)
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for rotate in (
            lambda x: apply_rotary_emb(x, theirs, sequence_dim=1),
            lambda x: rope.rotate_interleaved(x, ours),
        ):
            x = rope_random(2, 14, 3, 128).to(dtype).requires_grad_()
            y = rotate(x)
            y.backward(rope_random(2, 14, 3, 128, seed=1).to(dtype))
            results.append((y.detach(), x.grad))
        # Numbers up to 8. fp32: fused multiply-adds may move the last bit. bf16: diffusers rounds each of the two
        # terms of a gradient and their sum, we the sum only; half a unit is 2^-9 of the number each time.
        tolerance = 2**-20 if dtype == torch.float32 else 3 * 2**-6
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=tolerance)


def test_compiled_and_plain_rotation_agree() -> None:
    x, table = rope_random(2, 7, 3, 32), rope.rope_table(torch.arange(7), rope.rope_frequencies(32))
    compiled = torch.compile(rope.rotate_interleaved, backend="eager")  # takes the branch for compilers
    torch.testing.assert_close(compiled(x, table), rope.rotate_interleaved(x, table), rtol=0, atol=2**-20)


def test_half_split_rotation_is_that_of_transformers() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, rope_theta=500000.0)
    positions = torch.arange(10)
    query, key = rope_random(1, 10, 2, 32), rope_random(1, 10, 2, 32, seed=1)
    cos, sin = LlamaRotaryEmbedding(config)(query, positions[None])
    theirs = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    theta = LlamaRotaryEmbedding(config).config.rope_parameters["rope_theta"]
    table = rope.rope_table(positions, rope.rope_frequencies(32, theta))
    for mine, reference in zip((query, key), theirs, strict=True):
        # transformers computes angles in fp32; at position 9 that is 1e-6 off.
        torch.testing.assert_close(rope.rotate_half_split(mine, table), reference.transpose(1, 2), rtol=0, atol=5e-6)


def test_both_forms_agree_under_the_permutation() -> None:
    x = rope_random(2, 7, 3, 32)
    table = rope.rope_table(torch.arange(7), rope.rope_frequencies(32))
    order = rope.half_split_order(32)
    ours, theirs = rope.rotate_half_split(x[..., order], table), rope.rotate_interleaved(x, table)[..., order]
    # one of them adds a product without rounding it first
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_1_scaling_is_that_of_transformers(factor: float) -> None:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=128 * 4, num_attention_heads=4, rope_parameters=parameters)
    theirs = LlamaRotaryEmbedding(config).inv_freq
    ours = rope.rope_frequencies(128, 500000.0, Llama31Scaling(factor=factor))
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-5, atol=0)  # theirs is computed in fp32
    plain = rope.rope_frequencies(128, 500000.0)
    assert torch.equal(ours[0], plain[0])  # short waves stay
    torch.testing.assert_close(ours[-1], plain[-1] / factor)  # long ones are stretched


def test_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match="even"):
        rope.rope_frequencies(7)


def test_one_token_is_turned_like_many() -> None:
    x = rope_random(2, 1, 3, 32)
    tables = rope.RopeTables(32, 500000.0)
    cos, sin = (part[torch.tensor([[7], [3]])] for part in tables.table(8, torch.device("cpu")))  # a position a row
    ours = rope.turn_token(x[:, 0], rope.whole_head((cos, sin)))
    for row, position in enumerate((7, 3)):
        table = rope.rope_table(torch.tensor([position]), rope.rope_frequencies(32, 500000.0))
        expected = rope.rotate_interleaved(x[row : row + 1][..., _interleaving(32)], table)[
            ..., rope.half_split_order(32)
        ]
        torch.testing.assert_close(ours[row : row + 1][:, None], expected, rtol=1e-6, atol=1e-6)


def test_tables_grow_when_a_longer_text_comes() -> None:
    tables = rope.RopeTables(16, 10000.0)
    short = tables.table(5, torch.device("cpu"))
    assert tables.table(8, torch.device("cpu"))[0] is short[0]  # one table for all layers
    long = tables.table(100, torch.device("cpu"))
    assert long[0].shape == (128, 8)
    assert torch.equal(long[1][:5], short[1][:5])


def _interleaving(dim: int) -> torch.Tensor:
    return torch.argsort(rope.half_split_order(dim))
