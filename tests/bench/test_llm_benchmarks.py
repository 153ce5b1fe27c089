"""Do the language model benchmarks measure the same work for everyone?"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bench.gpu as gpu
import bench.llm_generate as llm_generate
import bench.llm_ladder as llm_ladder
from bench.llm_train import SIZES, WHO, build, build_step
from library.models.llm.files import export_hf
from library.models.llm.model import TransformerLM
from library.models.llm.spec import preset
from tools.command import load_language_model


@pytest.mark.parametrize("family", SIZES)
def test_everyone_has_as_many_weights_and_begins_at_the_same_loss(family: str) -> None:
    counts = {who: sum(p.numel() for p in build(who, family).parameters()) for who in WHO}
    assert len(set(counts.values())) == 1, counts
    for who in WHO:
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
    ours = llm_generate.tandem(load_language_model(tmp_path, dtype, False))
    theirs = llm_generate.transformers(tmp_path, torch.float32)
    prompts = [[1, 5, 9], [7, 3, 200]]
    written = theirs(prompts, 4)
    assert isinstance(written, torch.Tensor)
    assert written[:, 3:].tolist() == ours(prompts, 4)


def test_a_token_reads_all_weights_but_the_embedding(tmp_path: Path) -> None:
    model = TransformerLM(preset("llama-tiny")).initialise()
    export_hf(model, tmp_path)
    loaded = load_language_model(tmp_path, "bf16", False)
    assert llm_generate.bytes_read(loaded) == 2 * sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=pytest.mark.slow if m.startswith("gpt2") else ()) for m in llm_ladder.LADDERS]
)
def test_the_ladder_climbs_to_the_top_with_the_peer_beside_flash(model: str) -> None:
    precision = torch.get_float32_matmul_precision()
    rows = list(llm_ladder.climb(model, True, torch.device("cpu")))
    assert [row.get("error") for row in rows] == [None] * len(rows)
    steps = ["textbook", "blocks", "TF32", "bf16", "SDPA flash", "SDPA flash", "compile", "fused AdamW", "batch 2"]
    if model == "gpt2-124m":  # 50257 tokens; Llama's 128256 are a multiple of 64
        steps.insert(-1, "padded vocabulary")
    assert [row["step"] for row in rows] == steps
    assert [row["step"] for row in rows if row["who"] == "transformers"] == ["SDPA flash"]
    last = rows[-1]
    assert all(last[name] for name in ("tf32", "bf16", "flash", "compiled", "fused"))
    assert torch.get_float32_matmul_precision() == precision
    # 6 operations a weight and token, and 12 * layers * width * context for attention, of the unpadded model
    config = llm_ladder.config_of(model, tiny=True)
    matrices = {"gpt2-124m": 2 * 12 * 64 * 64, "llama3.2-1b": 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128)}[model]
    needed = 6 * (matrices + config.vocab_size * 64) + 12 * 2 * 64 * 32
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 32 / row["step_s"])
        assert row["flops_per_s"] == pytest.approx(row["tokens_per_s"] * needed)


def test_ladders_are_compared_where_transformers_stands() -> None:
    row = {"case": "", "model": "gpt2-124m", "who": "tandem", "step_s": 1.0, "peak_gib": 2.0}
    rows = [
        row | {"step": "textbook", "tokens_per_s": 10.0, "who": "textbook"},
        row | {"step": "SDPA flash", "tokens_per_s": 60.0},
        row | {"step": "SDPA flash", "tokens_per_s": 40.0, "who": "transformers", "peak_gib": 4.0},
        {"case": "", "model": "gpt2-124m", "who": "tandem", "step": "compile", "error": "out of memory"},
    ]
    found = gpu.ratios(rows)
    assert found == {
        "gpt2-124m_speed_over_transformers": 1.5,
        "gpt2-124m_memory_over_transformers": 0.5,
        "gpt2-124m_speed_over_textbook": 6.0,
    }
