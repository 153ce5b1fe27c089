"""The fused product without a card: numbers in Triton's interpreter, machine code for six cards, bytes on no device."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from library.errors import UserError
from library.precision import linear
from library.precision.files.base import QuantizedWeight
from library.precision.linear import Compute, QuantizedLinear
from tests.precision.encoded import encoded_weights

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: make test-triton installs it"
)
ROOT = Path(__file__).parents[2]
NAMES = [*encoded_weights(2, 128)]
# compute capability -> the instruction of its tensor cores: A100, RTX 30, RTX 40, H100, B200, RTX 50
CARDS = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma", 120: "mma.sync"}
WIDTH = 256  # inputs, of two runs of the longest
SHARED_KIB = 99  # of a block on 8.6, 8.9 and 12.0, the least of these ("Compute Capabilities", CUDA C++ guide)


def child(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_without_triton_all_else_works_and_fused_says_what_to_install() -> None:
    code = """
import sys
sys.modules["triton"] = None  # as if it were not there
import torch
from library.errors import UserError
from library.precision.linear import QuantizedLinear
from tests.precision.encoded import encoded_weights
weight = encoded_weights(40, 128)["fp8_block64"]
layer = QuantizedLinear(weight)
x = torch.ones(3, 128, requires_grad=True)
layer(x).sum().backward()
assert torch.allclose(x.grad, weight.dequantize(torch.float32).sum(dim=0).expand(3, -1), atol=1e-5)
assert "library.precision.triton_product" not in sys.modules
try:
    layer.set_compute("fused")
except UserError as error:
    print(error)
"""
    ended = child("-c", code)
    assert ended.returncode == 0, ended.stderr
    assert "quantised_compute = fused: needs Triton" in ended.stdout
    assert "install requirements/triton.txt" in ended.stdout


@pytest.mark.slow  # CI runs it by make test-triton
@needs_triton
def test_numbers_are_right_in_tritons_interpreter() -> None:
    ended = child("-m", "pytest", "-q", "-x", "tests/precision/triton_arithmetic.py", TRITON_INTERPRET="1")
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert re.search(r"^\d+ passed", ended.stdout.splitlines()[-1])  # and none was skipped


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("card", CARDS)
def test_every_variant_becomes_machine_code_for_tensor_cores(
    card: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from library.precision import triton_product

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # nothing that was compiled before
    variants = {}  # by what of a weight the machine code depends on
    for weight in encoded_weights(2, WIDTH).values():
        encoded = weight.encoded()
        assert encoded is not None
        codes = {encoded.code, "fp8e4nv" if encoded.code == "e4m3fn" and card >= 89 else encoded.code}
        variants |= {(code, encoded.scale.dtype, encoded.scale.shape[1]): encoded._replace(code=code) for code in codes}
    for variant, encoded in variants.items():
        for backward in (False, True):
            for dtype, rows in (("bf16", 128), ("fp16", 16)):
                compiled = compiled_kernel(encoded, card, backward, dtype, rows)
                what = f"{variant} {'backward' if backward else 'forward'} {dtype} {rows}"
                assert len(compiled.asm["cubin"]) > 1000, what
                assert CARDS[card] in compiled.asm["ptx"], what
                assert ".ftz" not in compiled.asm["ptx"], what  # would make fp8's subnormals zero
                assert compiled.metadata.shared <= SHARED_KIB * 1024, what
                registers, stack = resources(compiled.asm["cubin"], triton_product.triton.__file__, tmp_path)
                assert registers <= 255, what
                assert stack <= 16, what  # a spilled tile would be hundreds of bytes


def compiled_kernel(encoded: Any, card: int, backward: bool, dtype: str, rows: int) -> Any:
    """The kernel as a call on ``card`` would have it compiled, all sizes multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from library.precision import triton_product as product

    pointers = {torch.uint8: "*u8", torch.int8: "*i8", torch.float32: "*fp32"}
    weight = {each: getattr(encoded, each) for each in ("values", "scale", "table")}
    tensors = {each: pointers[product._as_bytes(tensor).dtype] for each, tensor in weight.items()}
    tensors |= dict.fromkeys(("x", "bias", "out"), f"*{dtype}")
    sizes = dict.fromkeys(("n", "outputs", "inputs", "scale_stride", "table_stride"), "i32")
    code, scale = encoded.code, encoded.scale
    kind = {"CODE": code, "SCALE": product._kind(scale), "RUN": product._run(scale, WIDTH), "BIAS": not backward}
    tile = {"BLOCK_N": rows, "BLOCK_F": product.BLOCK_F, "BLOCK_K": product.BLOCK_K, "GROUP": product.GROUP}
    ones = {"n": 1, "table_stride": 1} if rows == 16 else {}  # which are compiled in
    constants = kind | tile | ones | {"BACKWARD": backward}
    names = product.product_kernel.arg_names
    types = tensors | sizes | dict.fromkeys(constants, "constexpr")
    aligned = [index for index, name in enumerate(names) if name in (*tensors, "n", "outputs", "inputs")]
    source = ASTSource(
        product.product_kernel,
        {name: types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    options = {"num_warps": product.WARPS, "num_stages": product.STAGES}
    return triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)


def resources(cubin: bytes, triton: str, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack."""
    (folder / "kernel.cubin").write_bytes(cubin)
    tool = Path(triton).parent / "backends/nvidia/bin/cuobjdump"
    shown = subprocess.run([tool, "-res-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown.stdout)
    assert found, shown.stdout
    return int(found[1]), int(found[2])


@needs_triton
@pytest.mark.parametrize("name", NAMES)
def test_a_fake_card_gets_the_shapes_and_dtypes_of_a_dequantised_product(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from library.precision import triton_product

    monkeypatch.setattr(triton_product, "device_is_capable", lambda _, capability: capability == (8, 0))
    weight, launched = encoded_weights(136, 256)[name], []
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = weight.with_tensors({field: mode.from_tensor(t) for field, t in weight.tensors().items()})
        results: dict[str, list[Tensor]] = {}
        for compute in ("fused", "dequant"):
            layer = QuantizedLinear(fake, torch.zeros(136, dtype=torch.bfloat16), compute=compute)  # type: ignore[arg-type]
            x = torch.ones(2, 3, 256, dtype=torch.bfloat16, requires_grad=True)
            with Allocations() as seen:
                y = layer(x)
                results[compute] = [y, *torch.autograd.grad(y.sum(), x), layer.input_gradient(y[0].detach())]
            launched.append(sum("fused_product" in name for name in seen.operators))
    assert launched == [3, 0]
    for fused, dequantised in zip(*results.values(), strict=True):
        assert (fused.shape, fused.dtype, fused.device) == (dequantised.shape, dequantised.dtype, dequantised.device)


class Allocations(TorchDispatchMode):
    """Counts the bytes that are there besides those of before, and names the operators."""

    def __init__(self, *before: Tensor) -> None:
        super().__init__()
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in before}
        self.peak, self.operators = 0, list[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.operators.append(str(function))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self.sizes:
                self.sizes[key] = tensor.untyped_storage().nbytes()
                weakref.finalize(tensor.untyped_storage(), self.sizes.pop, key)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return made


@needs_triton
def test_a_fused_product_makes_no_copy_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    from library.precision import triton_product

    monkeypatch.setattr(triton_product, "device_is_capable", lambda _, capability: capability == (8, 0))
    mebibytes, weights = {}, encoded_weights(32, 15360)
    for name in ("fp8_row", "fp8_block64", "int8_row", "mxfp8", "nvfp4", "nf4", "nf4_nested", "Q8_0", "Q4_0"):
        weight = without_numbers(weights[name], 96)
        held = list(weight.tensors().values())
        x, gradient = (torch.empty(1, side, dtype=torch.bfloat16, device="meta") for side in (15360, 3072))
        for way in ("dequant", "fused"):
            peaks = [peak_of(way, weight, each, held) for each in (x, gradient)]
            mebibytes[name, way] = [round(peak / 2**20) for peak in peaks]
    # the table in the module's first lines
    dequantised = {"mxfp8": 96, "nvfp4": 190, "nf4": 186, "nf4_nested": 186, "Q8_0": 156, "Q4_0": 172}
    for (name, way), found in mebibytes.items():
        expected = dequantised.get(name, 90) if way == "dequant" else 14 if name == "nf4_nested" else 0
        assert found == [expected, expected], (name, way)


def peak_of(way: Compute, weight: QuantizedWeight, x: Tensor, held: list[Tensor]) -> int:
    """Bytes that a product, or an input gradient, has beside one row of inputs and the weight."""
    with Allocations(x, *held) as seen:
        if x.shape[1] == weight.shape[1]:
            linear._multiplied(x, weight, None, way)
        else:
            linear._input_gradient(x, weight, way)
    return seen.peak


def without_numbers(weight: QuantizedWeight, times: int) -> QuantizedWeight:
    """The same format with so many times the rows, and no memory."""
    sizes = {name: list(tensor.shape) for name, tensor in weight.tensors().items()}
    for name, size in sizes.items():
        if name == "nested_absmax" or (len(size) > 1 and size[0] == weight.shape[0]):
            size[0] *= times
    tensors = {n: torch.empty(sizes[n], dtype=tensor.dtype, device="meta") for n, tensor in weight.tensors().items()}
    return weight.with_tensors(tensors)


@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("name", NAMES)
def test_a_card_multiplies_in_bf16_as_a_dequantised_weight_is_multiplied(name: str) -> None:
    weight = encoded_weights(456, 640)[name].to("cuda")
    for rows in (1, 37, 300):
        layers = [QuantizedLinear(weight, torch.ones(456).cuda(), compute=way) for way in ("fused", "dequant")]  # type: ignore[arg-type]
        results = []
        for layer in layers:
            x = torch.randn(rows, 640, generator=torch.Generator().manual_seed(rows)).cuda().bfloat16().requires_grad_()
            y = layer(x)
            results.append((y, *torch.autograd.grad(y.float().square().sum(), x)))
        for fused, dequantised in zip(*results, strict=True):
            # the same numbers, summed in fp32 and rounded to bf16's 8 bits; the gradient's of outputs rounded likewise
            assert (fused.float() - dequantised.float()).norm() <= 2**-7 * dequantised.float().norm()


@needs_triton
@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_a_card_without_bf16_on_its_tensor_cores_has_the_weight_dequantised(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from library.precision import triton_product

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    weight = encoded_weights(40, 128)["fp8_row"]
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2, 128, dtype=torch.bfloat16, device="cuda")
        fused = triton_product.product(x, weight, None)
    assert (fused is None) == (capability < (8, 0))


@needs_triton
def test_on_a_cpu_a_fused_layer_is_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = encoded_weights(40, 128)["fp8_row"], torch.ones(2, 128, dtype=torch.bfloat16)
    layers = [QuantizedLinear(weight, compute=compute) for compute in ("fused", "dequant")]  # type: ignore[arg-type]
    assert torch.equal(*(layer(x) for layer in layers))
    monkeypatch.setitem(sys.modules, "library.precision.triton_product", None)
    monkeypatch.delattr("library.precision.triton_product")
    with pytest.raises(UserError, match="fused: needs Triton .*; install requirements/triton.txt, or set dequant"):
        QuantizedLinear(weight, compute="fused")
