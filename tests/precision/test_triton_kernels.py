"""The Triton kernels in Triton's interpreter against float64, and compiled for every card that trains."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# The interpreter cuts numbers to bf16 instead of rounding them, and rounds to fp8 wrongly (124.2 to 64), so it is asked
# for dtypes in which the results are exact; on a card these casts are instructions.
INTERPRETED = """
import torch
from torch import nn
import library.precision.fp8_numbers as fp8_numbers
from library.precision import triton_kernels
from library.precision.files.fp8 import Fp8Weight
from library.precision.linear import QuantizedLinear

random = torch.Generator().manual_seed(0)
for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
    values = torch.randint(-128, 128, (6, 5120), generator=random).to(torch.int8)
    values[(values & 0x7C) == 0x7C] = 0  # infinities and NaN of fp8 are among them
    values = values.view(dtype)
    for shape in ((6, 1), (1, 1), (6, 20)):
        steps = torch.rand(shape, generator=random)
        expected = (values.double().view(6, shape[1], -1) * steps.double()[..., None]).view(6, -1).float()
        assert torch.equal(triton_kernels.dequantize(values, steps, torch.float32), expected), (dtype, shape)
triton_kernels.check(torch.device("cpu"))  # what a card is asked first; exact in bf16 too
x = torch.randn(5, 200, generator=random)
x[2], x[3, 4], x[4, 4] = 0, torch.nan, torch.inf
units, scales = triton_kernels.round_rows(x, 448.0, 1e-30, torch.float32)
expected = (x[:2].double().abs().amax(1, keepdim=True) / 448).clamp_min(1e-30)
torch.testing.assert_close(scales[:2].double(), expected, rtol=1e-6, atol=0)
torch.testing.assert_close((units * scales)[:3], x[:3], rtol=1e-6, atol=0)
assert units[3, 4].isnan() and units[4, 4].isnan()

# in a block that is compiled as one graph, and in the gradient
layer = QuantizedLinear(Fp8Weight(torch.randn(32, 64).to(torch.float8_e4m3fn), torch.rand(32, 1)))
x = torch.randn(3, 64, requires_grad=True)
reference = nn.functional.linear(x, layer.dequantized(torch.float32))
(wanted,) = torch.autograd.grad(reference.square().sum(), x)
fp8_numbers.dequantize = lambda values, scale, dtype: torch.ops.tandem.dequantize(values, scale, dtype)
import library.precision.files.fp8 as files
files.dequantize = fp8_numbers.dequantize
out = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
(found,) = torch.autograd.grad(out.square().sum(), x)
torch.testing.assert_close(out, reference)
torch.testing.assert_close(found, wanted)
"""

COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from library.precision import triton_kernels as kernels

aligned = {(place,): [["tt.divisibility", 16]] for place in range(4)}
for card in (80, 86, 89, 90, 100, 120):
    for name, warps, pointers, constants in (
        ("dequantize_kernel", 4, ("*i8", "*fp32", "*bf16"), {"SHIFT": 7, "COLUMNS": 4096}),
        ("dequantize_kernel", 4, ("*i8", "*bf16", "*fp16"), {"SHIFT": 0, "COLUMNS": 4096}),
        ("round_rows_kernel", 16, ("*bf16", "*fp8e4nv", "*fp32"), {"LARGEST": 448.0, "LEAST": 1e-30, "COLUMNS": 16384}),
    ):
        if card < 89 and "*fp8e4nv" in pointers:
            continue  # has no products in fp8
        kernel = getattr(kernels, name)
        types = dict(zip(kernel.arg_names, pointers))
        signature = {x: "constexpr" if x in constants else types.get(x, "i32") for x in kernel.arg_names}
        made = compile(
            ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
            target=GPUTarget("cuda", card, 32), options={"num_warps": warps},
        )
        assert "ld.global.v4.b32" in made.asm["ptx"], (card, name)  # 16 bytes at a time
"""


@pytest.mark.parametrize(("code", "interpret"), [(INTERPRETED, "1"), (COMPILED, "0")], ids=["interpreted", "compiled"])
def test_kernels_give_the_formulas_numbers_and_compile_for_every_card(code: str, interpret: str) -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": interpret}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
