"""Both ways of turning codes back give float64's product, rounded once; whichever is quicker serves."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from library.precision.fp8_numbers import E4M3FN, E5M2, Fp8Format, by_bits, compiled

SCALES = {"cast": None, "tensor": (1, 1), "row": (48, 1), "block64": (48, 4)}
KERNELS = [(E4M3FN, kind) for kind in SCALES] + [(E5M2, "row")]  # the rest of e5m2 differs in the cast alone


def every_code(fp8: Fp8Format) -> torch.Tensor:
    """Return 48 x 256 codes, each finite one in every run of 256; infinities and NaNs are zeros."""
    codes = torch.arange(256, dtype=torch.uint8).view(fp8.dtype)
    codes = torch.where(codes.float().isfinite(), codes.float(), torch.zeros(())).to(fp8.dtype)
    return codes.repeat(48, 1)


@pytest.mark.parametrize(("fp8", "kind"), KERNELS, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("way", [by_bits, compiled])
def test_every_code_comes_back_as_the_float64_product_rounded_once(way, fp8: Fp8Format, kind: str) -> None:
    codes, shape = every_code(fp8), SCALES[kind]
    scale = None if shape is None else torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 1e-3
    exact = codes.double()
    if scale is not None:
        exact = (exact.view(48, scale.shape[1], -1) * scale.double().unsqueeze(-1)).view(48, 256)
    expected = exact.float().to(torch.bfloat16)
    assert torch.equal(way(codes, scale, torch.bfloat16), expected)
    blocks = scale if scale is None or scale.shape[1] == 1 else scale[:, :2]
    assert torch.equal(way(codes[:, :128], blocks, torch.bfloat16), expected[:, :128])
    rows = scale if scale is None or scale.shape[0] == 1 else scale[8:24]
    assert torch.equal(way(codes[8:24], rows, torch.bfloat16), expected[8:24])


def test_without_a_compiler_a_large_weight_is_turned_back_all_the_same() -> None:
    code = """
import warnings, torch
from library.precision.fp8_numbers import dequantize
weight = torch.linspace(-2, 2, 1 << 20).view(1024, 1024)
codes = weight.to(torch.float8_e4m3fn)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    back = dequantize(codes, None, torch.bfloat16)
assert torch.equal(back, codes.to(torch.bfloat16))
print([str(warning.message) for warning in said if "compiled kernel" in str(warning.message)])
"""
    environment = {"PATH": "/nowhere", "CXX": "/nowhere/g++", "PYTHONPATH": ".", "HOME": "/nowhere"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "without a compiled kernel, more slowly" in ran.stdout
