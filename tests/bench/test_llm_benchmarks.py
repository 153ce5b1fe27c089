"""Do the language model benchmarks measure the same work for everyone?"""

from __future__ import annotations

import math

import pytest
import torch

from bench.llm_generate import Generator
from bench.llm_peers import SIZES, Textbook, build
from bench.llm_train import WHO, LMStepper
from library.models.transformer_lm import TransformerLM


@pytest.mark.parametrize("family", SIZES)
def test_everyone_has_as_many_weights_and_begins_at_the_same_loss(family: str) -> None:
    counts = {who: sum(p.numel() for p in build(who, family).parameters()) for who in WHO}
    assert len(set(counts.values())) == 1, counts
    for who in WHO:
        first = LMStepper(who, family, "fp32", batch=1, length=64).step()
        assert first == pytest.approx(math.log(8192), rel=0.05), who  # fresh weights know nothing


@torch.no_grad()
@pytest.mark.parametrize("family", SIZES)
def test_the_textbook_model_computes_what_ours_does(family: str) -> None:
    ours, theirs = build("tandem", family), build("textbook", family)
    assert isinstance(ours, TransformerLM)
    assert isinstance(theirs, Textbook)
    theirs.embedding.weight.copy_(ours.embedding.weight)
    if ours.positions is not None:
        theirs.positions.weight.copy_(ours.positions.weight)
    for block, layer in zip(ours.blocks, theirs.layers, strict=True):
        sizes = [layer[name].out_features for name in "qkv"]
        for name, weight in zip("qkv", block.attention.qkv.weight.split(sizes), strict=True):
            layer[name].weight.copy_(weight)
        layer["o"].weight.copy_(block.attention.out.weight)
        layer["down"].weight.copy_(block.feed_forward.down.weight)
        if family == "llama":
            gate, up = block.feed_forward.gate_up.weight.chunk(2)
            layer["gate"].weight.copy_(gate)
            layer["up"].weight.copy_(up)
        else:
            layer["up"].weight.copy_(block.feed_forward.up.weight)
        for name in ("q", "k", "v", "o", "up", "down"):
            if layer[name].bias is not None:
                layer[name].bias.zero_()
    tokens = torch.randint(0, 8192, (2, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(tokens), theirs(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("who", ["tandem", "transformers"])
def test_both_generate_as_many_tokens(who: str) -> None:
    assert Generator(who, "llama", batch=2, new_tokens=3).step() == 6
