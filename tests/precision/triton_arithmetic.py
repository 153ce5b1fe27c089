"""The fused product's numbers in Triton's interpreter, on a CPU; ``test_triton_product.py`` runs this in a process.

The interpreter is chosen for a whole process, before Triton is imported (TRITON_INTERPRET=1). Its conversions are those
of a card and its products in fp32 are numpy's; its products in bf16 are wrong, so inputs are fp32 here.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from library.precision import triton_product
from library.precision.files.base import Encoded, QuantizedWeight
from library.precision.files.fp8 import Fp8Weight
from library.precision.files.gguf import GgufWeight
from library.precision.files.int8 import Int8Weight
from library.precision.files.mxfp8 import Mxfp8Weight
from library.precision.files.nf4 import Nf4Weight
from library.precision.files.nvfp4 import Nvfp4Weight
from library.precision.fp8_numbers import E4M3FN, FORMATS, FP8_DTYPES, Fp8Format
from library.precision.linear import QuantizedLinear
from networks.adapters.lora import LoRALinear
from tests.precision.encoded import encoded_weights

assert os.environ["TRITON_INTERPRET"] == "1"
NAMES = [*encoded_weights(2, 128)]
BYTES = torch.arange(256).to(torch.uint8)


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_product, "device_is_capable", lambda _, capability: capability == (8, 0))
    monkeypatch.setattr(triton_product, "_DTYPES", (torch.float32,))


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@triton.jit
def _decode_kernel(
    values, scale, table, out, outputs, inputs, scale_stride, table_stride,
    CODE: tl.constexpr, SCALE: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    w = triton_product._tile(
        values, scale, table, row, column, outputs, inputs, scale_stride, table_stride, CODE, SCALE, RUN, ROWS, COLUMNS
    )
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    at = out + rows[:, None] * inputs + columns[None, :]
    tl.store(at, w, mask=(rows < outputs)[:, None] & (columns < inputs)[None, :])


def decoded(
    encoded: Encoded | None, shape: tuple[int, ...], code: str | None = None, rows: int = 16, columns: int = 64
) -> Tensor:
    """The weight as the kernel's tiles have it, [out, in] fp32."""
    assert encoded is not None
    own, values, scale, table = encoded
    out = torch.full(shape, 77.0)
    _decode_kernel[(triton.cdiv(shape[0], rows), triton.cdiv(shape[1], columns))](
        triton_product._as_bytes(values), triton_product._as_bytes(scale), table, out, *shape,
        0 if len(scale) == 1 else scale.shape[1], 0 if len(table) == 1 else 1,
        CODE=code or own, SCALE=triton_product._kind(scale), RUN=triton_product._run(scale, shape[1]),
        ROWS=rows, COLUMNS=columns,
    )  # fmt: skip
    return out


def same(left: Tensor, right: Tensor) -> bool:
    """Bit for bit, zeros' signs too; one NaN is as good as another."""
    equal = left.view(torch.int32) == right.view(torch.int32)
    return bool((equal | (left.isnan() & right.isnan())).all())


@pytest.mark.parametrize("fp8", FORMATS, ids=lambda fp8: fp8.name)
def test_every_byte_in_fp8_is_what_torchs_cast_makes_of_it(fp8: Fp8Format) -> None:
    values = BYTES.view(fp8.dtype).view(2, 128)
    assert same(decoded(Fp8Weight(values).encoded(), (2, 128)), values.float())
    scale = torch.tensor([[3.7], [1e-9]])
    assert same(decoded(Fp8Weight(values, scale).encoded(), (2, 128)), values.float() * scale)


def test_a_cards_own_conversion_of_e4m3_gives_the_same() -> None:
    values = BYTES[(BYTES & 0x7F) != 0x7F].view(E4M3FN.dtype).view(2, 127)  # the interpreter's makes 480 of NaN
    assert same(decoded(Fp8Weight(values).encoded(), (2, 127), "fp8e4nv"), values.float())


def test_every_byte_of_the_other_formats_is_what_their_own_dequantising_makes_of_it() -> None:
    scales = torch.rand(2, 8, generator=torch.Generator().manual_seed(0)) + 0.5
    weights: list[QuantizedWeight] = [
        Int8Weight(BYTES.view(torch.int8).view(2, 128), scales[:, :1].contiguous()),
        Nvfp4Weight(BYTES.view(1, 256), BYTES[64:96].view(torch.float8_e4m3fn).view(1, 32), torch.tensor([[0.3]])),
        Nf4Weight(BYTES.view(2, 128), scales[:, :4].contiguous(), torch.randn(16)),
    ]
    for weight in weights:
        assert same(decoded(weight.encoded(), weight.shape), weight.dequantize(torch.float32))
    finite = BYTES[(BYTES & 0x7F) != 0x7F]
    for kind, size in (("Q8_0", 32), ("Q4_0", 16)):
        blocks = torch.cat([torch.randn(256 // size, 1).half().view(torch.uint8), BYTES.view(-1, size)], dim=1)
        weight = GgufWeight(blocks.view(2, -1, size + 2), kind)
        assert same(decoded(weight.encoded(), weight.shape), weight.dequantize(torch.float32))
    # Every exponent of mxfp8 but NaN, a block each. Not by ``dequantize``, whose way on a CPU overflows sooner.
    exponents = BYTES[:255].view(255, 1)
    values = finite[:32].expand(255, 32).contiguous().view(E4M3FN.dtype)
    powers = torch.cat([torch.zeros(1), torch.ldexp(torch.ones(254), torch.arange(1, 255) - 127)])
    assert same(decoded(Mxfp8Weight(values, exponents).encoded(), (255, 32)), values.float() * powers[:, None])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (64, 128)])  # of a tile in forward, in backward
def test_scales_of_a_tensor_rows_and_blocks_reach_their_numbers(name: str, rows: int, columns: int) -> None:
    weight = encoded_weights(136, 384)[name].unrotated()
    assert same(decoded(weight.encoded(), weight.shape, None, rows, columns), weight.dequantize(torch.float32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "outputs", "inputs"), [(1, 72, 128), (37, 200, 384), (130, 130, 640)])
def test_output_and_input_gradient_are_those_of_the_dequantised_weight(
    name: str, n: int, outputs: int, inputs: int
) -> None:
    weight = encoded_weights(outputs, inputs, seed=n)[name]
    x, gradient, bias = numbers(n, inputs, seed=1), numbers(n, outputs, seed=2), numbers(outputs, seed=3)
    exact, turned = weight.unrotated().dequantize(torch.float32).double(), weight.rotate(x).double()
    y, dx = triton_product.product(x, weight, bias), triton_product.input_gradient(gradient, weight.unrotated())
    assert y is not None
    assert dx is not None
    # A sum of k products in fp32, in any order, is off by at most k roundings of the sum of their magnitudes.
    unit = 2.0**-24
    bound = (inputs + 2) * unit * (turned.abs() @ exact.abs().t() + bias.double().abs())
    assert ((y.double() - (turned @ exact.t() + bias.double())).abs() <= bound).all()
    bound = (outputs + 2) * unit * (gradient.double().abs() @ exact.abs())
    assert ((dx.double() - gradient.double() @ exact).abs() <= bound).all()


@pytest.mark.parametrize("name", ["fp8_block64", "int8_convrot", "nvfp4", "nf4_nested", "Q4_0"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_lora_trains_on_fused_layers_as_on_dequantised_ones(name: str, compiled: bool) -> None:
    torch.compiler.reset()
    weight = encoded_weights(136, 256)[name]
    results = []
    for compute in ("fused", "dequant"):
        base = QuantizedLinear(weight, torch.nn.Parameter(numbers(136, seed=5)), compute=compute)  # type: ignore[arg-type]
        layer = LoRALinear(base, rank=4, alpha=4.0)
        layer.lora_A.weight.data.copy_(numbers(4, 256, seed=6))
        layer.lora_B.weight.data.copy_(numbers(136, 4, seed=7))
        called = torch.compile(copy.deepcopy(layer), backend="aot_eager", fullgraph=True) if compiled else layer
        x = numbers(2, 9, 256, seed=8).requires_grad_()
        y = called(x)
        trained = [parameter for parameter in called.parameters() if parameter.requires_grad]
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *trained])))
    for fused, dequantised in zip(*results, strict=True):
        assert (fused - dequantised).norm() <= 1e-6 * dequantised.norm()  # fp32 sums in another order


def test_what_the_kernel_does_not_take_is_dequantised() -> None:
    weight, x = encoded_weights(136, 256)["fp8_row"], numbers(3, 256, seed=0)
    assert isinstance(weight, Fp8Weight)
    assert triton_product.product(x, weight, None) is not None
    assert triton_product.product(x.bfloat16(), weight, None) is None  # as the fixture has it
    assert triton_product.product(x[:0], weight, None) is None
    uneven = Fp8Weight(weight.values[:, :192].contiguous(), torch.ones(136, 2))  # runs of 96 do not fit a tile
    assert triton_product.product(x[:, :192], uneven, None) is None
    columns = weight.part(columns=slice(0, 128))  # not in one piece
    assert triton_product.product(x[:, :128], columns, None) is None
    layers = [QuantizedLinear(columns, compute=compute) for compute in ("fused", "dequant")]  # type: ignore[arg-type]
    assert torch.equal(*(layer(x[:, :128]) for layer in layers))


@pytest.mark.parametrize("backward", [False, True])
def test_the_operator_has_the_shape_that_it_says(backward: bool) -> None:
    for weight in encoded_weights(40, 128).values():
        encoded = weight.encoded()
        assert encoded is not None
        x = numbers(5, 40 if backward else 128, seed=0)
        arguments = (x, *encoded, 40, 128, None if backward else numbers(40, seed=1), backward)
        checks = ["test_faketensor"]
        if not any(tensor.dtype in FP8_DTYPES for tensor in (encoded.values, encoded.scale)):
            checks.append("test_schema")  # which compares tensors by a product that torch has not in fp8
        torch.library.opcheck(triton_product.fused_product, arguments, test_utils=checks)
