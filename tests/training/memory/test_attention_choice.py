"""What a run says of its attention at the start, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from library.errors import UserError
from library.models.family import Family
from library.models.flux.files import FLUX_TARGETS
from library.training.memory.attention_choice import choose_attention
from networks.files.metadata import build_metadata
from tests.runs import run
from tests.tiny import tiny_flux_transformer
from tests.tiny_flux2 import tiny_flux2_transformer
from tests.tiny_flux3 import tiny_flux3_transformer
from tests.tiny_krea2 import tiny_krea2_transformer
from tests.tiny_qwen import tiny_qwen_transformer
from tests.tiny_qwen_21 import tiny_21_transformer
from tests.tiny_z_image import tiny_z_transformer

CPU = torch.device("cpu")
SHAPE = (1, 32, 2, 64)


def kernels(dtype: torch.dtype, masked: bool) -> set[str]:
    """Ask PyTorch itself, one kernel at a time, which can take a training step on this CPU."""
    names = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    names |= {"cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
    found = set()
    for name, kernel in names.items():
        q = torch.zeros(1, 2, 64, 64, dtype=dtype, requires_grad=True)
        mask = torch.ones(1, 1, 1, 64, dtype=torch.bool) if masked else None
        with sdpa_kernel(kernel):
            try:
                torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()
            except RuntimeError:
                continue
        found.add(name)
    return found


@pytest.mark.parametrize("asked", ["flash", "efficient", "cudnn", "math"])
def test_a_kernel_is_taken_or_refused_as_pytorch_can(asked: str) -> None:
    can = kernels(torch.bfloat16, False) & kernels(torch.bfloat16, True)
    assert "math" in can
    assert can != {"flash", "efficient", "cudnn", "math"} or torch.cuda.is_available()
    if asked in can:
        assert choose_attention(asked, SHAPE, True, torch.bfloat16, CPU) == f"{asked}, as asked"  # type: ignore[arg-type]
        return
    with pytest.raises(UserError, match=re.escape(f"attention: {asked} cannot compute bfloat16 heads of 64 on cpu")):
        choose_attention(asked, SHAPE, True, torch.bfloat16, CPU)  # type: ignore[arg-type]


def test_padded_texts_are_told_where_they_change_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_attention("auto", SHAPE, True, torch.float32, CPU) in kernels(
        torch.float32, True
    )  # one for both, here
    monkeypatch.setattr(
        "library.training.memory.attention_choice.chosen_backend",
        lambda query, key, value, mask: "flash" if mask is None else "efficient",
    )
    assert choose_attention("auto", SHAPE, True, torch.float32, CPU) == "flash; efficient where texts are padded"


def test_a_run_computes_with_the_kernel_it_was_asked_for(base: Path, dataset: Path, tmp_path: Path) -> None:
    done = run(base, dataset, tmp_path / "out", attention="math", max_train_steps=1)
    used = [m.processor.backend for m in done.task.transformer.modules() if hasattr(m, "processor")]
    assert set(used) == {"math"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuDNN attention exists on CUDA")
def test_a_kernel_that_cannot_run_is_refused_before_anything_is_cached(
    base: Path, dataset: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="attention: cudnn cannot compute float32 heads of 32 on cpu; remove it"):
        run(base, dataset, tmp_path / "out", attention="cudnn", cache_directory=tmp_path / "cache")
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(
    "build",
    [
        tiny_flux_transformer,
        tiny_qwen_transformer,
        tiny_z_transformer,
        tiny_flux2_transformer,
        tiny_flux3_transformer,
        tiny_krea2_transformer,
        tiny_21_transformer,
    ],
)
@pytest.mark.parametrize("written", [True, False])
def test_heads_are_known_before_the_transformer_is_loaded(build: Callable[[], Any], written: bool) -> None:
    model = build() if written else None
    kind = type(build())
    if model is None:
        with torch.device("meta"):
            model = kind()  # the published sizes, which a config need not repeat
    attention = [module for module in model.modules() if hasattr(module, "processor") and hasattr(module, "to_q")][-1]
    heads = getattr(attention, "heads", None) or attention.num_heads

    class WithoutFiles(Family):
        def __init__(self) -> None: ...

        transformer_class = kind
        files: Any = SimpleNamespace(transformer_config=dict(model.config) if written else {})

    assert WithoutFiles().attention_heads() == (heads, attention.to_q.out_features // heads)


def test_metadata_name_the_kernel() -> None:
    assert build_metadata({}, FLUX_TARGETS, title="a", timestamp=0, attention="flash")["tandem.attention"] == "flash"
