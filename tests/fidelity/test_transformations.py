"""What was done to a matrix is named in every format; what a format's bytes mean is written here a second time."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from library.fidelity.grids import relative
from library.fidelity.rounding_laws import ServedMatrix
from library.fidelity.transformations import diagnose
from library.precision.files.base import QuantizedWeight
from library.precision.files.comfy_quant import from_tiles, to_tiles
from library.precision.files.fp8 import Fp8Weight
from library.precision.files.gguf import GgufWeight
from library.precision.files.int8 import Int8Weight
from library.precision.files.mxfp8 import Mxfp8Scheme
from library.precision.files.nf4 import Nf4Weight
from library.precision.recipe import scheme_named

# the quantiles of a normal distribution that QLoRA takes (Dettmers 2023, appendix E), at four digits
NF4 = (-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626,
       0.7230, 1)  # fmt: skip
SCHEMES = ("cast", "tensor", "row", "block64", "int8", "int8_row", "int8_convrot", "nvfp4", "mxfp8")
FORMATS = (*SCHEMES, "Q4_0", "Q4_1", "Q8_0", "nf4", "bf16")


def weight(seed: int = 0, rows: int = 256, columns: int = 256) -> Tensor:
    """Normal numbers, rows and columns of several sizes."""
    random = torch.Generator().manual_seed(seed)
    sides = (0.5 + torch.rand(n, generator=random) for n in (rows, columns))
    return torch.randn(rows, columns, generator=random) * 0.03 * torch.outer(*sides)


def stored(name: str, w: Tensor) -> Any:
    """Round ``w`` to nearest into a format; None where it is bf16."""
    w = w.contiguous()
    if name == "bf16":
        return None
    if name == "nf4":
        runs, table = w.reshape(len(w), -1, 64), torch.tensor(NF4)
        absmax = runs.abs().amax(-1)
        codes = ((runs / absmax[..., None]).unsqueeze(-1) - table).abs().argmin(-1).reshape(w.shape).to(torch.uint8)
        return Nf4Weight(codes[:, ::2] << 4 | codes[:, 1::2], absmax, table)
    if name.startswith("Q"):
        made = gguf.quantize(w.numpy(), gguf.GGMLQuantizationType[name])
        return GgufWeight(torch.from_numpy(np.asarray(made)).view(len(w), w.shape[1] // 32, -1), name)
    return (Mxfp8Scheme() if name == "mxfp8" else scheme_named(name)).quantize(w)


def said(made: QuantizedWeight | None, wanted: Tensor, name: str = "bf16", others: dict[str, Tensor] | None = None,
         numbers: Tensor | None = None) -> tuple[str, str]:  # fmt: skip
    """Return what is said of a matrix that is served as ``made``, or in bf16 as ``numbers``."""
    honest = stored(name, wanted)
    expected = 0.0 if honest is None else relative(honest.dequantize(torch.float32), wanted)
    if made is not None:
        numbers = made.dequantize(torch.float32)
    assert numbers is not None
    served = ServedMatrix(numbers, made, expected=expected)
    return diagnose(served, wanted, lambda: others or {}, "own")


def permuted(w: Tensor) -> Tensor:
    return w[torch.randperm(len(w), generator=torch.Generator().manual_seed(1))]


CHANGES: list[tuple[Callable[[Tensor], Tensor], str, str]] = [
    (lambda w: 0.97 * w, "wrong_scale", "times 0.97"),
    (lambda w: 1.5 * w, "wrong_scale", "times 1.5"),
    (lambda w: -w, "wrong_scale", "its sign is flipped"),
    (lambda w: torch.cat([w[:9] * 1.3, w[9:]]), "wrong_scale", r"9 of 256 rows times 1\.(29|3)"),
    (lambda w: w.t(), "permuted", "transposed"),
    (lambda w: w.roll(128, 0), "permuted", "its halves are exchanged"),
    (permuted, "permuted", "rows are in another order"),
    (lambda w: permuted(w) * 0.9, "permuted", "and times 0.9"),
    (lambda w: w.clamp(-0.04, 0.04), "clipped", r"%\) are clipped at 0\.0"),
    (lambda w: torch.cat([w[:20] * 0, w[20:]]), "zeroed", r"20 of 256 rows are zero \(0-19\)"),
    (lambda w: weight(5), "exchanged", "holds the weights of other"),
]  # fmt: skip
# each format with four changes and each change with four formats in every test run, all of them in make test-all
PAIRS = [
    pytest.param(name, *change, id=f"{name}-{row}", marks=() if (row + column) % 3 == 0 else pytest.mark.slow)
    for row, change in enumerate(CHANGES)
    for column, name in enumerate(FORMATS)
]


@pytest.mark.parametrize(("name", "change", "cause", "words"), PAIRS)
def test_a_change_is_named_in_every_format(
    name: str, change: Callable[[Tensor], Tensor], cause: str, words: str
) -> None:
    w = weight().bfloat16().float()
    other = change(w)
    found, text = said(stored(name, other), w, name, {"other.weight": weight(5)}, other.bfloat16().float())
    assert found == cause, text
    assert re.search(words, text)


def swapped(values: Tensor) -> Tensor:
    return torch.from_numpy((values.numpy() >> 4) | (values.numpy() << 4))


def swapped_q4(made: GgufWeight) -> GgufWeight:
    start = {"Q4_0": 2, "Q4_1": 4}[made.type]
    return replace(made, values=torch.cat([made.values[..., :start], swapped(made.values[..., start:])], -1))


def one_less(w: Tensor) -> GgufWeight:
    """Both codes of each byte one less, where they can be."""
    made = stored("Q4_0", w)
    codes = made.values[..., 2:]
    less = (codes & 15).int().sub(1).clamp(0) + 16 * (codes >> 4).int().sub(1).clamp(0)
    return replace(made, values=torch.cat([made.values[..., :2], less.to(torch.uint8)], -1))


def across(w: Tensor) -> Fp8Weight:
    scale = w.abs().amax(0) / 448  # of columns
    return Fp8Weight((w / scale).to(torch.float8_e4m3fn), scale.reshape(-1, 1))


def blocks_across(w: Tensor) -> Fp8Weight:
    scale = w.view(4, 64, 256).abs().amax(1) / 448  # of 64 outputs
    return Fp8Weight((w / scale.repeat_interleave(64, 0)).to(torch.float8_e4m3fn), scale.reshape(256, 4))


def wrapping(w: Tensor) -> Int8Weight:
    scale = w.abs().amax(1, keepdim=True) / 127.6
    return Int8Weight(torch.from_numpy((w / scale).round().numpy().astype(np.int16).astype(np.int8)), scale)


def hadamard(size: int) -> Tensor:
    """Sylvester's."""
    whole = torch.ones(1, 1)
    while len(whole) < size:
        whole = torch.cat([torch.cat([whole, whole], 1), torch.cat([whole, -whole], 1)])
    return whole / size**0.5


def turned_by(matrix: Callable[[int], Tensor], group: int) -> Callable[[Tensor], Int8Weight]:
    def make(w: Tensor) -> Int8Weight:
        values = w.view(-1, group) @ matrix(group) if group else w
        made: Any = scheme_named("int8_row").quantize(values.view(w.shape))
        return replace(made, group=64)

    return make


def signs(size: int) -> Tensor:
    return hadamard(size) * (1 - 2 * (torch.arange(size) % 3 == 0).float())


@pytest.mark.parametrize(
    ("name", "make", "cause", "words"),
    [
        ("nvfp4", lambda w: replace(m := stored("nvfp4", w), values=swapped(m.values)), "permuted", "each byte"),
        ("nf4", lambda w: replace(m := stored("nf4", w), values=swapped(m.values)), "permuted", "each byte"),
        ("Q4_0", lambda w: swapped_q4(stored("Q4_0", w)), "permuted", "each byte"),
        ("Q4_1", lambda w: swapped_q4(stored("Q4_1", w)), "permuted", "each byte"),
        ("nvfp4", lambda w: replace(m := stored("nvfp4", w), block_scale=from_tiles(m.block_scale, (256, 64))),
         "wrong_scale", "lie by rows, and are read as tiles"),
        ("nvfp4", lambda w: replace(m := stored("nvfp4", w), block_scale=to_tiles(m.block_scale)),
         "wrong_scale", "lie in tiles, and are read by rows"),
        ("mxfp8", lambda w: replace(m := stored("mxfp8", w), block_scale=to_tiles(m.block_scale)),
         "wrong_scale", "lie in tiles, and are read by rows"),
        ("row", across, "wrong_scale", "the other axis"),
        ("block64", blocks_across, "wrong_scale", "the other axis"),
        ("int8_row", wrapping, "wrapped", "numbers wrap around"),
        ("int8_row", lambda w: replace(m := stored("int8_row", w), values=(m.values.int() + 1).clamp(-128, 127).char()),
         "zero_point", "one too large"),
        ("Q4_0", one_less, "zero_point", "one too small"),
        ("int8_convrot", turned_by(hadamard, 0), "rotation", "not rotated, and the file says rotated in runs of 64"),
        ("int8_convrot", turned_by(hadamard, 64), "rotation", "another Hadamard matrix"),
        ("int8_convrot", turned_by(signs, 64), "rotation", "another Hadamard matrix"),
        ("int8_convrot", lambda w: replace(stored("int8_convrot", w), group=16), "rotation",
         "it is rotated in runs of 256, and the file says rotated in runs of 16"),
        ("int8_row", lambda w: replace(stored("int8_convrot", w), group=0), "rotation", "the file says not rotated"),
    ],
)  # fmt: skip
def test_bytes_that_are_read_by_another_rule_are_named(
    name: str, make: Callable[[Tensor], QuantizedWeight], cause: str, words: str
) -> None:
    for seed in range(2):
        w = weight(seed, columns=1024 if name in ("nvfp4", "mxfp8") else 256)
        found, text = said(make(w), w, name)
        assert found == cause, text
        assert words in text


@pytest.mark.parametrize("name", SCHEMES)
def test_an_honest_matrix_fits(name: str) -> None:
    for stochastic in (False, True):
        w = weight(3, 96, 320 if name != "block64" else 256)
        scheme: Any = (Mxfp8Scheme() if name == "mxfp8" else scheme_named(name)).fitting(w.shape)
        nearest = scheme.quantize(w).dequantize(torch.float32)
        made = scheme.quantize(w, stochastic=stochastic, generator=torch.Generator().manual_seed(1))
        served = ServedMatrix(made.dequantize(torch.float32), made, expected=relative(nearest, w))
        assert served.fits(w)
        assert not served.fits(0.9 * w)


def toward_zero(name: str, w: Tensor) -> Any:
    """Round to nearest, then put what became larger than it was one code nearer to zero."""
    made = stored(name, w)
    above = made.dequantize(torch.float32).abs() > w.abs()
    if name.startswith("int8"):
        return replace(made, values=(made.values.int() - made.values.int().sign() * above).char())
    if name == "Q8_0":  # 2 bytes of scale, then codes
        codes = made.values.view(torch.int8)[..., 2:].int()
        less = (codes - codes.sign() * above.view(codes.shape)).to(torch.int8).view(torch.uint8)
        return replace(made, values=torch.cat([made.values[..., :2], less], -1))
    if name == "Q4_0":  # 2 bytes of scale, then codes from -8 on: the first half in the low bits
        packed = made.values[..., 2:].int()
        codes = torch.cat([packed & 15, packed >> 4], -1) - 8
        less = codes - codes.sign() * above.view(codes.shape) + 8
        low, high = less.chunk(2, -1)
        return replace(made, values=torch.cat([made.values[..., :2], (low | high << 4).to(torch.uint8)], -1))
    if name == "nf4":  # ascending numbers, the first of each pair in the high bits; 7 is zero
        codes = torch.stack([made.values >> 4, made.values & 15], -1).flatten(1).int()
        less = codes - (codes - 7).sign() * above
    else:  # nvfp4: sign and magnitude
        codes = torch.stack([made.values >> 4, made.values & 15], -1).flatten(1).int()
        less = codes - above.int()
    return replace(made, values=(less[:, ::2] << 4 | less[:, 1::2]).to(torch.uint8))


@pytest.mark.parametrize("name", ["nf4", "nvfp4", "Q4_0", "Q8_0", "int8", "int8_row"])
def test_rounding_toward_zero_is_named_in_every_format(name: str) -> None:
    for seed in range(2):
        w = weight(seed)
        made = toward_zero(name, w)
        assert (made.dequantize(torch.float32).abs() <= w.abs() * (1 + 1e-5)).float().mean() > 0.97
        assert said(made, w, name) == ("rounding_mode", "rounded toward zero instead of to nearest")
        for factor in (1.0, 0.99, 0.97, 0.9):
            assert said(stored(name, factor * w), w, name)[0] != "rounding_mode"
