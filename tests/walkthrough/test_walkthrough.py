"""The course: every step runs cell by cell, and its parts are those of transformers at sizes that it does not show."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from tests.walkthrough.compare import compare, library_tokenizer, random_gpt2, random_llama
from walkthrough import step4_training
from walkthrough.sizes import Parts, Sizes
from walkthrough.step1_tokens import TEXT, Tokenizer, learn
from walkthrough.step2_gpt2 import GPT2, Decoder
from walkthrough.step3_loss import windowed
from walkthrough.step5_decoding import Cache, cache_bytes
from walkthrough.step7_llama import LLAMA2, LLAMA32, STEPS, RMSNorm, SwiGLU, frequencies, rotate
from walkthrough.step9_speed import padded

FOLDER = Path(__file__).resolve().parents[2] / "walkthrough"
SCRIPTS = sorted(path.name for path in FOLDER.glob("step*.py"))
LONG = {"theta": 500000.0, "original_context": 24}
PUBLISHED: dict[str, tuple[Sizes, Parts]] = {
    "GPT-2": (Sizes(vocabulary=71, context=80, width=60, heads=5, hidden=130, layers=2), GPT2),
    "Llama 2": (Sizes(vocabulary=71, width=60, heads=5, kv_heads=5, hidden=90, layers=2), LLAMA2),
    "Llama 3": (Sizes(vocabulary=71, width=72, heads=9, kv_heads=3, hidden=90, theta=500000.0), LLAMA2),
    "Llama 3.1": (Sizes(vocabulary=71, width=64, heads=2, kv_heads=1, hidden=90, factor=8.0, **LONG), LLAMA2),  # type: ignore[arg-type]
    "Llama 3.2": (Sizes(vocabulary=71, width=64, heads=4, kv_heads=2, factor=32.0, **LONG), LLAMA32),  # type: ignore[arg-type]
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the scripts save pictures, and the model that step 4 trains for steps 5 and 8."""
    return tmp_path_factory.mktemp("course")


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a script changes in this process."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    plt.close("all")


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.usefixtures("untouched")
def test_a_step_runs_cell_by_cell_and_checks_itself(
    script: str, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (FOLDER / script).read_text(encoding="utf-8")
    assert text.count("\n") < 150
    quick: dict[str, Any] = {"UPDATES": 8, "SECONDS": 0.0}
    if script == "step9_speed.py":
        quick["SIZES"] = Sizes(vocabulary=4097, context=64, width=64, layers=2, heads=4, hidden=256)
    monkeypatch.chdir(desk)
    monkeypatch.setattr(step4_training, "UPDATES", quick["UPDATES"])
    monkeypatch.setattr(nn.Module, "compile", lambda module: None)  # a minute
    names: dict[str, Any] = {"__name__": "__main__"}  # as in a notebook: no __file__
    for cell in re.split(r"^# %%.*$", text, flags=re.MULTILINE)[1:]:
        exec(compile(cell, script, "exec"), names)
        names |= {name: value for name, value in quick.items() if name in names}
    said = capsys.readouterr().out
    assert "check: " in said
    for picture in re.findall(r"^drawn: (.*)$", said, flags=re.MULTILINE):
        assert (desk / picture).stat().st_size > 2000


def tokens(length: int = 75) -> Tensor:
    """Return texts beyond Llama 3.1's original context here."""
    return torch.randint(0, 71, (3, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_and_gradients_are_those_of_transformers_and_tandem(name: str) -> None:
    sizes, parts = PUBLISHED[name]
    compare(name, *(random_gpt2(sizes, seed=7) if parts is GPT2 else random_llama(sizes, parts, seed=7)), length=75)


def test_each_step_changes_one_field() -> None:
    steps = [asdict(sizes) | vars(parts) for parts, sizes in STEPS.values()]
    for before, after in pairwise(steps):
        changed = {name for name in after if before[name] != after[name]}
        allowed = {"learned_positions", "factor"}  # rotations take their place; Llama 3.2 also stretches further
        assert len(changed - allowed) == 1 or changed == {"factor"}


@pytest.mark.parametrize("merges", [0, 40, 512])
def test_tokens_are_those_of_the_tokenizers_package(merges: int) -> None:
    tokenizer = Tokenizer(learn(TEXT, merges))
    theirs = library_tokenizer(tokenizer)
    for text in ("", " ", "it's  1,234\n\n don't", "Ünïcode 🦏\t\r\n", "\x00 half\u00a0space", TEXT[:3000]):
        assert tokenizer.encode(text) == theirs.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text


@torch.no_grad()
def test_windows_score_each_token_once_with_what_is_before_it() -> None:
    model = Decoder(Sizes(vocabulary=71, context=20), GPT2)
    text = tokens(49)[0]
    losses = windowed(model, text, stride=7)
    ends = range(20, 49, 7)  # of full windows; the last one is shorter
    for place in range(1, 49):
        start = next((end - 20 for end in ends if place < end), 35)
        expected = F.cross_entropy(model(text[None, start:place])[0, -1], text[place])
        torch.testing.assert_close(losses[place - 1], expected)


@torch.no_grad()
def test_a_cache_that_reads_in_pieces_gives_the_same_logits() -> None:
    model, text = Decoder(Sizes(vocabulary=71), GPT2), tokens(40)
    cache = Cache(model)
    for piece in text.split((13, 1, 1, 20, 5), dim=1):
        logits = cache.read(piece)
        torch.testing.assert_close(logits, model(text[:, : cache.length])[:, -1], rtol=1e-4, atol=1e-5)
    assert sum(part.nbytes for kept in cache.kept for part in kept) == 3 * cache_bytes(model.sizes, 40, itemsize=4)
    # Llama 3 8B: 32 layers of 8 heads of 128, keys and values, 2 bytes each
    assert cache_bytes(Sizes(width=4096, layers=32, heads=32, kv_heads=8), 1) == 128 * 1024


def test_training_learns_and_the_vocabulary_is_padded() -> None:
    torch.manual_seed(0)
    small = replace(step4_training.SIZES, width=32, hidden=64, layers=1)
    losses = step4_training.train(Decoder(small, GPT2), 60, size=4)
    assert losses[-1] < 0.9 * losses[0]
    assert (padded(50257), padded(50304), padded(1)) == (50304, 50304, 64)


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
    turns = frequencies(sizes)
    for ours, theirs in zip((rotate(q, turns), rotate(k, turns)), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # their angles are fp32


def test_a_decoder_of_any_step_sees_nothing_of_what_comes() -> None:
    for parts, sizes in STEPS.values():
        model = Decoder(sizes, parts)
        given = tokens(20)
        other = given.clone()
        other[:, 12:] = (other[:, 12:] + 1) % 71
        assert torch.equal(model(given)[:, :12], model(other)[:, :12])
