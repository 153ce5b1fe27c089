"""Rotary embedding against diffusers (interleaved), transformers (half-split, Llama 3.1) and complex
numbers."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxPosEmbed
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import library.nn.rope as rope
from library.nn.rope import Llama31Scaling, MultiAxisRope


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rotation_is_a_product_with_a_complex_number() -> None:
    x, positions = random(1, 6, 2, 8), torch.tensor([0, 1, 2, 10, 100, 100_000])
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
            x = random(2, 14, 3, 128).to(dtype).requires_grad_()
            y = rotate(x)
            y.backward(random(2, 14, 3, 128, seed=1).to(dtype))
            results.append((y.detach(), x.grad))
        # Numbers up to 8. fp32: fused multiply-adds may move the last bit. bf16: diffusers rounds each of the two
        # terms of a gradient and their sum, we the sum only; half a unit is 2^-9 of the number each time.
        tolerance = 2**-20 if dtype == torch.float32 else 3 * 2**-6
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=tolerance)


def test_compiled_and_plain_rotation_agree() -> None:
    x, table = random(2, 7, 3, 32), rope.rope_table(torch.arange(7), rope.rope_frequencies(32))
    compiled = torch.compile(rope.rotate_interleaved, backend="eager")  # takes the branch for compilers
    torch.testing.assert_close(compiled(x, table), rope.rotate_interleaved(x, table), rtol=0, atol=2**-20)


def test_half_split_rotation_is_that_of_transformers() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, rope_theta=500000.0)
    positions = torch.arange(10)
    query, key = random(1, 10, 2, 32), random(1, 10, 2, 32, seed=1)
    cos, sin = LlamaRotaryEmbedding(config)(query, positions[None])
    theirs = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    theta = LlamaRotaryEmbedding(config).config.rope_parameters["rope_theta"]
    table = rope.rope_table(positions, rope.rope_frequencies(32, theta))
    for mine, reference in zip((query, key), theirs, strict=True):
        # transformers computes angles in fp32; at position 9 that is 1e-6 off.
        torch.testing.assert_close(rope.rotate_half_split(mine, table), reference.transpose(1, 2), rtol=0, atol=5e-6)


def test_both_forms_agree_under_the_permutation() -> None:
    x = random(2, 7, 3, 32)
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
    x = random(2, 1, 3, 32)
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
