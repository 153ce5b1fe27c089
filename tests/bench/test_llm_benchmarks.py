"""Do the language model benchmarks measure the same work for everyone?"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bench.llm_generate as llm_generate
from bench.llm_train import IMPLEMENTATIONS, SIZES, build, build_step
from library.models.llm.files import export_hf
from library.models.llm.model import TransformerLM
from library.models.llm.spec import preset


@pytest.mark.parametrize("family", SIZES)
def test_everyone_has_as_many_weights_and_begins_at_the_same_loss(family: str) -> None:
    counts = {who: sum(p.numel() for p in build(who, family).parameters()) for who in IMPLEMENTATIONS}
    assert len(set(counts.values())) == 1, counts
    for who in IMPLEMENTATIONS:
        first = build_step(who, family, "fp32", batch=1, length=64).step()
        assert first == pytest.approx(math.log(8192), rel=0.05), who  # fresh weights know nothing


@torch.no_grad()
@pytest.mark.parametrize("family", SIZES)
def test_the_textbook_model_computes_what_ours_does(family: str) -> None:
    ours, theirs = build("tandem", family), build("textbook", family)
    assert isinstance(ours, TransformerLM)
    state = {"embedding.weight": ours.embedding.weight, "head.weight": ours.lm_head.weight}
    if ours.positions is not None:
        state["positions.weight"] = ours.positions.weight
    for i, block in enumerate(ours.blocks):
        keys = ours.config.kv_heads * ours.config.head_dim
        parts = dict(zip("qkv", block.attention.qkv.weight.split((ours.config.width, keys, keys)), strict=True))
        own = {f"attention.{name}": weight for name, weight in parts.items()}
        own |= {"attention.out": block.attention.out.weight, "feed_forward.down": block.feed_forward.down.weight}
        if family == "llama":
            own |= zip(
                ("feed_forward.gate", "feed_forward.up"), block.feed_forward.gate_up.weight.chunk(2), strict=True
            )
        else:
            own["feed_forward.up"] = block.feed_forward.up.weight
        state |= {f"blocks.{i}.{name}.weight": weight for name, weight in own.items()}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(name.endswith("bias") or "norm" in name for name in missing)
    for name in missing:  # ours are 0 and 1
        theirs.get_parameter(name).fill_(0.0 if name.endswith("bias") else 1.0)
    tokens = torch.randint(0, 8192, (2, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(tokens), theirs(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_both_generate_the_same_tokens(dtype: str, tmp_path: Path) -> None:
    """Of a model with decided opinions: its embedding is large, so that a token is followed by itself."""
    torch.manual_seed(0)
    model = TransformerLM(replace(preset("llama-tiny"), layers=2)).initialise()
    with torch.no_grad():
        model.embedding.weight.mul_(20)
    export_hf(model, tmp_path)
    ours = llm_generate.tandem(tmp_path, dtype)
    theirs = llm_generate.transformers(tmp_path, "fp32")
    prompts = [[1, 5, 9], [7, 3, 200]]
    written = theirs(prompts, 4)
    assert isinstance(written, torch.Tensor)
    assert written[:, 3:].tolist() == ours(prompts, 4)
