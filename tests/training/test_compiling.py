"""When ``torch_compile = "auto"`` compiles, and that compiled code is kept for the next run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from library.config import load_config
from library.config.run_schema import AccelerateConfig
from library.nn.attention import attend
from library.nn.norms import modulated_norm
from library.training import compiling
from library.training.compiling import WORTH, compile_blocks, plan_compilation
from tests.runs import arguments

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("settings", "device", "steps", "compiles", "words"),
    [
        ({}, GPU, WORTH, True, "blocks are compiled (300 steps)"),
        ({}, GPU, WORTH - 1, False, "299 steps would not earn the minute"),
        ({}, CPU, 10**6, False, ""),
        ({"dynamo_mode": "max-autotune"}, CPU, 10**6, False, "auto compiles on a GPU alone, so dynamo_mode has no eff"),
        ({"torch_compile": "false"}, GPU, 10**6, False, ""),
        ({"torch_compile": True}, CPU, 1, True, ""),
        ({"torch_compile": "auto", "shard": 2}, GPU, 10**6, False, "is not made for shard"),
        ({"blocks_to_swap": 2}, GPU, 10**6, False, "backward of a compiled block would read"),
        ({"blocks_to_swap": 2, "gradient_checkpointing": True}, GPU, 10**6, True, ""),
    ],
)
def test_auto_compiles_where_it_pays_and_may_be(
    settings: dict[str, Any],
    device: torch.device,
    steps: int,
    compiles: bool,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling, "has_triton", lambda: True)
    config = load_config(arguments(tmp_path, tmp_path / "data.toml", tmp_path / "out", model_type="flux", **settings))
    found, line = plan_compilation(config, device, steps)
    assert found is compiles
    assert words in line
    assert bool(line) == ((device is GPU and settings.get("torch_compile") != "false") or "dynamo_mode" in settings)
    if compiles and device is GPU:
        assert not plan_compilation(config, device, steps, lengths_vary=True)[0]
        monkeypatch.setattr(compiling, "has_triton", lambda: False)
        assert "needs triton" in plan_compilation(config, device, steps)[1]


class Modulated(nn.Module):
    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        x = modulated_norm(x, shift, scale, 1e-6).unsqueeze(2)
        return attend(x, x, x, backend="math")


@pytest.mark.slow
def test_a_second_process_finds_the_code_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As do blocks of every family, it switches autocast off within, and names a kernel."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for found in ("autograd_cache_saved", "autograd_cache_hit"):
        torch._dynamo.reset()
        counters.clear()
        block = Modulated()
        compile_blocks([block], AccelerateConfig(torch_compile=True))
        x, shift, scale = (torch.randn(1, n, 8, requires_grad=True) for n in (3, 1, 1))
        block(x, shift, scale).sum().backward()
        assert counters["aot_autograd"][found] == 1
        assert not counters["aot_autograd"]["autograd_cache_bypass"]
