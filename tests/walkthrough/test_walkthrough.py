"""Every step of the walk-through against transformers' own modules, at sizes that the scripts do not have."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from tests.forked import run_script
from tests.walkthrough.compare import random_gpt2, random_llama, tandem
from walkthrough.gpt2 import GPT2, Decoder, Parts, Sizes
from walkthrough.llama2 import LLAMA2, STEPS, RMSNorm, SwiGLU, frequencies, rotate
from walkthrough.llama3 import LLAMA3, LLAMA31, cache_bytes, stretched
from walkthrough.llama32 import LLAMA32

ROOT = Path(__file__).resolve().parents[2]
LONG = {"theta": 500000.0, "factor": 8.0, "original_context": 24}
PUBLISHED: dict[str, tuple[Sizes, Parts]] = {
    "GPT-2": (Sizes(vocabulary=71, context=80, width=60, heads=5, hidden=130, layers=2), GPT2),
    "Llama 2": (Sizes(vocabulary=71, width=60, heads=5, kv_heads=5, hidden=90, layers=2), LLAMA2),
    "Llama 3": (Sizes(vocabulary=71, width=72, heads=9, kv_heads=3, hidden=90, theta=500000.0), LLAMA3),
    "Llama 3.1": (Sizes(vocabulary=71, width=64, heads=2, kv_heads=1, hidden=90, **LONG), LLAMA31),  # type: ignore[arg-type]
    "Llama 3.2": (Sizes(vocabulary=71, width=64, heads=4, kv_heads=2, **LONG | {"factor": 32.0}), LLAMA32),  # type: ignore[arg-type]
}


def pair(name: str) -> tuple[Decoder, PreTrainedModel]:
    sizes, parts = PUBLISHED[name]
    return random_gpt2(sizes, seed=7) if parts is GPT2 else random_llama(sizes, parts, seed=7)


def tokens(length: int = 75) -> Tensor:
    """Return texts beyond Llama 3.1's original context here."""
    return torch.randint(0, 71, (3, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_and_gradients_are_those_of_transformers_and_tandem(name: str) -> None:
    ours, theirs = pair(name)
    others: list[Any] = [theirs, tandem(theirs).requires_grad_(True)]
    logits = ours(tokens())
    logits.logsumexp(-1).mean().backward()
    for other in others:
        answer = other(tokens())
        expected = getattr(answer, "logits", answer)
        # fp32 sums of up to 130 products, in another order
        assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()
        expected.logsumexp(-1).mean().backward()
        embedding = other.embedding if other is not theirs else theirs.get_input_embeddings()
        gradient, own = embedding.weight.grad, ours.embedding.weight.grad
        assert (own - gradient).abs().max() < 1e-4 * gradient.abs().max()


def test_each_step_changes_one_part() -> None:
    before = GPT2
    for parts in (*STEPS.values(), LLAMA31, LLAMA32):
        changed = {field.name for field in fields(Parts) if getattr(parts, field.name) != getattr(before, field.name)}
        assert len(changed - {"learned_positions"}) == 1  # rotations take their place
        before = parts
    assert LLAMA3 is LLAMA2  # fewer keys and a larger base are numbers


def test_rms_norm_and_swiglu_are_transformers() -> None:
    sizes = Sizes(width=40, hidden=52)
    config = LlamaConfig(hidden_size=40, num_attention_heads=4, intermediate_size=52, rms_norm_eps=sizes.eps)
    x = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(0))
    for ours, theirs in ((RMSNorm(sizes), LlamaRMSNorm(40, sizes.eps)), (SwiGLU(sizes, False), LlamaMLP(config))):
        names = {"gate.weight": "gate_proj.weight", "up.weight": "up_proj.weight", "down.weight": "down_proj.weight"}
        state = {name: torch.rand_like(tensor) for name, tensor in ours.state_dict().items()}
        ours.load_state_dict(state)
        theirs.load_state_dict({names.get(name, name): tensor for name, tensor in state.items()})
        torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_rotations_are_transformers(factor: float) -> None:
    sizes = Sizes(width=64, heads=2, theta=10000.0, factor=factor, original_context=40)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if factor != 1:
        rope |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 40
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=200, rope_parameters=rope)
    q, k = (torch.randn(1, 2, 150, 32, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(150)[None])
    turns = stretched(sizes) if factor != 1 else frequencies(sizes)
    for ours, theirs in zip((rotate(q, turns), rotate(k, turns)), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # their angles are fp32


def test_a_decoder_of_any_step_sees_nothing_of_what_comes() -> None:
    for parts in (GPT2, *STEPS.values(), LLAMA31, LLAMA32):
        model: nn.Module = Decoder(replace(Sizes(vocabulary=71, hidden=90), factor=4.0, original_context=8), parts)
        given = tokens(20)
        other = given.clone()
        other[:, 12:] = (other[:, 12:] + 1) % 71
        assert torch.equal(model(given)[:, :12], model(other)[:, :12])


def test_a_token_of_llama_3_8b_takes_128_kib_of_keys_and_values() -> None:
    # 32 layers of 8 heads of 128, keys and values, 2 bytes each
    assert cache_bytes(Sizes(width=4096, layers=32, heads=32, kv_heads=8), 1) == 128 * 1024


@pytest.mark.parametrize("script", ["gpt2", "llama2", "llama3", "llama32"])
def test_a_script_runs_and_says_that_it_is_right(script: str) -> None:
    path = ROOT / "walkthrough" / f"{script}.py"
    done = run_script(path, [], ROOT)
    assert done.returncode == 0, done.stderr
    assert "e-07, to Tandem" in done.stdout or "e-08, to Tandem" in done.stdout
    assert path.read_text(encoding="utf-8").count("# %%") >= 5
    if script == "llama32":
        assert "the same text" in done.stdout
        assert "it writes        the cat sat on the mat and the dog sat on the cat." in done.stdout
