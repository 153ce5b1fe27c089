"""Codes turned back on a CPU are float64's product, rounded once."""

from __future__ import annotations

import pytest
import torch

from library.precision.fp8_numbers import E4M3FN, E5M2, Fp8Format, by_bits

SCALES = {"cast": None, "tensor": (1, 1), "row": (48, 1), "block64": (48, 4)}
KERNELS = [(E4M3FN, kind) for kind in SCALES] + [(E5M2, "row")]  # the rest of e5m2 differs in the cast alone


def every_code(fp8: Fp8Format) -> torch.Tensor:
    """Return 48 x 256 codes, each finite one in every run of 256; infinities and NaNs are zeros."""
    codes = torch.arange(256, dtype=torch.uint8).view(fp8.dtype)
    codes = torch.where(codes.float().isfinite(), codes.float(), torch.zeros(())).to(fp8.dtype)
    return codes.repeat(48, 1)


@pytest.mark.parametrize(("fp8", "kind"), KERNELS, ids=lambda value: getattr(value, "name", value))
def test_every_code_comes_back_as_the_float64_product_rounded_once(fp8: Fp8Format, kind: str) -> None:
    codes, shape = every_code(fp8), SCALES[kind]
    scale = None if shape is None else torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 1e-3
    exact = codes.double()
    if scale is not None:
        exact = (exact.view(48, scale.shape[1], -1) * scale.double().unsqueeze(-1)).view(48, 256)
    expected = exact.float().to(torch.bfloat16)
    assert torch.equal(by_bits(codes, scale, torch.bfloat16), expected)
    blocks = scale if scale is None or scale.shape[1] == 1 else scale[:, :2]
    assert torch.equal(by_bits(codes[:, :128], blocks, torch.bfloat16), expected[:, :128])
    rows = scale if scale is None or scale.shape[0] == 1 else scale[8:24]
    assert torch.equal(by_bits(codes[8:24], rows, torch.bfloat16), expected[8:24])
