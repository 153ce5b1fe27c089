"""tools/resize_lora.py, merge_lora.py without a model: against numpy in float64 and sums by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import tools.merge_lora as merge_lora
import tools.resize_lora as resize_lora
from library.models.flux.files import FLUX_TARGETS
from networks.files.adapters import load_lora
from networks.files.weights import LoraWeights
from networks.files.writing import save_adapter
from tests.runs import call, refusal

Q, K, OUT = (f"transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_out.0"))
CLIP = "text_encoder.encoder.layers.0.mlp.fc1"
SHAPES = {Q: (32, 32), K: (32, 32), OUT: (32, 32), CLIP: (48, 24)}


def make(seed: int, rank: int, alpha: float, names: tuple[str, ...] = (Q, K, OUT, CLIP)) -> dict[str, LoraWeights]:
    """Return a LoRA whose singular values fall: column i of ``up`` is scaled by 2^-i."""
    rng = torch.Generator().manual_seed(seed)
    falling = 2.0 ** -torch.arange(rank)
    return {
        name: LoraWeights(
            torch.randn(rank, SHAPES[name][1], generator=rng),
            torch.randn(SHAPES[name][0], rank, generator=rng) * falling,
            alpha,
        )
        for name in names
    }


def write(path: Path, lora: dict[str, LoraWeights], save_format: str = "kohya", **metadata: str) -> Path:
    save_adapter(path, lora, FLUX_TARGETS, save_format, metadata=metadata)
    return path


def full(module: LoraWeights) -> np.ndarray:
    return module.alpha / module.rank * module.up.double().numpy() @ module.down.double().numpy()


def best(matrix: np.ndarray, rank: int) -> np.ndarray:
    u, s, vh = np.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] * s[:rank] @ vh[:rank]


@pytest.mark.parametrize("save_format", ["kohya", "comfy", "diffusers"])
def test_the_full_rank_is_the_identity(save_format: str, tmp_path: Path) -> None:
    lora = make(0, rank=6, alpha=2.5)
    source = write(tmp_path / "a.safetensors", lora, save_format)
    target = tmp_path / "b.safetensors"
    call(resize_lora, "--lora", source, "--save_to", target, "--new_rank", 6)
    resized = load_lora(target, FLUX_TARGETS)
    assert resized.layout == save_format
    for name, module in resized.weights.items():
        assert (module.rank, module.alpha) == (6, 6.0)
        # decomposed in float64, each factor rounded to fp32 once
        np.testing.assert_allclose(full(module), full(lora[name]), atol=2e-6)


def test_a_smaller_rank_is_the_best_one(tmp_path: Path) -> None:
    lora = make(1, rank=6, alpha=2.5)
    source, target = write(tmp_path / "a.safetensors", lora), tmp_path / "b.safetensors"
    call(resize_lora, "--model", source, "--save_to", target, "--new_rank", 3)
    resized = load_lora(target, FLUX_TARGETS)
    for name, module in resized.weights.items():
        assert module.rank == 3
        np.testing.assert_allclose(full(module), best(full(lora[name]), 3), atol=2e-6)  # fp32 factors
    assert resized.metadata["ss_training_comment"] == "resized by rank 3"
    # of the whole file: kohya's q, k, v have one alpha for the fused layer, 3 x 3
    assert resized.metadata["ss_network_dim"] == "3"


@pytest.mark.parametrize(("method", "parameter"), [("sv_fro", 0.9), ("sv_cumulative", 0.7), ("sv_ratio", 3.0)])
def test_each_layer_gets_the_rank_that_sd_scripts_gives_it(method: str, parameter: float, tmp_path: Path) -> None:
    lora = make(2, rank=6, alpha=4.0)
    source, target = write(tmp_path / "a.safetensors", lora), tmp_path / "b.safetensors"
    flags = ["--dynamic_method", method, "--dynamic_param", parameter, "--new_rank", 4]
    call(resize_lora, "--model", source, "--save_to", target, *flags)
    resized = load_lora(target, FLUX_TARGETS).weights
    for name, module in lora.items():
        s = np.linalg.svd(full(module))[1][:6]
        # sd-scripts' index_sv_*, on the whole matrix's values in float64
        rank = {
            "sv_fro": lambda s: np.searchsorted((s**2).cumsum() / (s**2).sum(), parameter**2) + 1,
            "sv_cumulative": lambda s: np.searchsorted(s.cumsum() / s.sum(), parameter) + 1,
            "sv_ratio": lambda s: (s > s[0] / parameter).sum(),
        }[method](s)
        assert resized[name].rank == min(rank, 4), name
        np.testing.assert_allclose(full(resized[name]), best(full(module), min(rank, 4)), atol=2e-6)


def test_a_concatenation_is_the_sum(tmp_path: Path) -> None:
    one, two = make(3, rank=4, alpha=1.5), make(4, rank=3, alpha=7.0, names=(Q, CLIP))
    a, b = write(tmp_path / "a.safetensors", one, "comfy"), write(tmp_path / "b.safetensors", two, "diffusers")
    target = tmp_path / "both.safetensors"
    call(merge_lora, "--lora", f"{a}:0.8", f"{b}:-0.5", "--save_to", target)
    both = load_lora(target, FLUX_TARGETS)
    assert both.layout == "comfy"
    assert {name: module.rank for name, module in both.weights.items()} == {Q: 7, K: 4, OUT: 4, CLIP: 7}
    for name, module in both.weights.items():
        expected = 0.8 * full(one[name]) - (0.5 * full(two[name]) if name in two else 0)
        np.testing.assert_allclose(full(module), expected, atol=2e-6)  # fp32 factors
    as_kohya_says = tmp_path / "kohya.safetensors"
    call(merge_lora, "--models", a, b, "--ratios", 0.8, -0.5, "--save_to", as_kohya_says)
    assert all(np.array_equal(full(module), full(both.weights[name]))
               for name, module in load_lora(as_kohya_says, FLUX_TARGETS).weights.items())  # fmt: skip


def test_svd_is_the_best_of_that_rank_to_the_sum(tmp_path: Path) -> None:
    one, two = make(5, rank=4, alpha=1.5), make(6, rank=3, alpha=7.0)
    a, b = write(tmp_path / "a.safetensors", one), write(tmp_path / "b.safetensors", two)
    target = tmp_path / "both.safetensors"
    call(merge_lora, "--lora", f"{a}:0.8", b, "--save_to", target, "--method", "svd", "--new_rank", 2,
        "--save_format", "diffusers")  # fmt: skip
    both = load_lora(target, FLUX_TARGETS)
    assert both.layout == "diffusers"
    for name, module in both.weights.items():
        assert module.rank == 2
        expected = best(0.8 * full(one[name]) + full(two[name]), 2)
        np.testing.assert_allclose(full(module), expected, atol=2e-6)


def test_flags_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a.safetensors", make(0, 2, 1.0))
    to = ["--save_to", tmp_path / "o.safetensors"]
    checked = [
        (merge_lora, ["--lora", a, "--method", "svd"], "--method svd and --new_rank go together"),
        (merge_lora, ["--lora", a, "--transformer_only"], "--transformer_only: has no effect without --model"),
        (merge_lora, ["--lora", a, "--model", a, "--new_rank", 4], "--new_rank: has no effect on a model"),
        (merge_lora, ["--lora", f"{a}:0"], "--lora: every strength is 0"),
        (merge_lora, ["--lora", a, a, "--ratios", 0.5], "--ratios: 1 for 2 LoRAs; give one for each"),
        (merge_lora, ["--lora", f"{a}:0.5", "--ratios", 0.5], "--ratios: 1 for 1 LoRA; give one for each, or write"),
        (resize_lora, ["--lora", a], "give --new_rank"),
        (resize_lora, ["--model", a], "give --new_rank"),  # as sd-scripts says
        (resize_lora, ["--model", a, "--dynamic_param", 0.5, "--new_rank", 2], "--dynamic_method and --dynamic_param"),
        (resize_lora, ["--model", a, "--dynamic_method", "sv_ratio", "--dynamic_param", 0.5], "--dynamic_param 0.5"),
    ]
    for tool, flags, message in checked:
        assert refusal(tool, *flags, *to).startswith(f"error: {message}"), message
