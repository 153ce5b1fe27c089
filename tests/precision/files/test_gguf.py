"""GGUF: blocks and files against the ``gguf`` package's own reader and dequantiser."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType

from library.errors import UserError
from library.precision.checkpoint import WeightFiles
from library.precision.files.gguf import TYPES, GgufWeight
from library.precision.linear import QuantizedLinear
from library.safetensors_io import RowRange, read_entries
from tests.precision.files.gguf_files import blocks_of, dequantized, random_blocks, weight_of, write_gguf

ISSUE = ("Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1")


def test_sizes_of_blocks_are_those_of_the_package() -> None:
    assert set(ISSUE) <= TYPES.keys()
    for kind, (block, block_bytes, _) in TYPES.items():
        assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]] == (block, block_bytes)


@pytest.mark.parametrize("kind", TYPES)
def test_numbers_are_the_packages_bit_for_bit_and_rounded_once(kind: str) -> None:
    weight = weight_of(kind)
    expected = dequantized(random_blocks((24, 512), kind), kind)
    assert weight.shape == (24, 512)
    assert torch.equal(weight.dequantize(torch.float32), expected)
    assert torch.equal(weight.dequantize(torch.bfloat16), expected.bfloat16())
    assert torch.equal(weight.part(slice(3, 11), slice(256, 512)).dequantize(torch.float32), expected[3:11, 256:])
    stacked = GgufWeight.stack([weight.part(slice(12, 24)), weight.part(slice(0, 12))])
    assert torch.equal(stacked.dequantize(torch.float32), expected.roll(12, dims=0))
    joined = GgufWeight.join([weight.part(columns=slice(256, 512)), weight.part(columns=slice(0, 256))])
    assert torch.equal(joined.dequantize(torch.float32), expected.roll(256, dims=1))


def test_parts_are_views_and_never_cut_a_block() -> None:
    weight = weight_of("Q4_K")
    assert weight.part(slice(2, 4), slice(0, 256)).values.data_ptr() == weight.values[2:].data_ptr()
    with pytest.raises(ValueError, match="column 32 lies within a block of 256"):
        weight.part(columns=slice(32, 256))
    with pytest.raises(ValueError, match="one is Q4_K and one Q8_0"):
        GgufWeight.stack([weight, weight_of("Q8_0")])


@pytest.mark.parametrize("kind", ISSUE)
def test_gradients_are_those_of_the_dequantised_weight_and_nothing_of_its_size_is_kept(kind: str) -> None:
    weight = weight_of(kind, 512, 1024)
    layer = QuantizedLinear(weight)
    kept: list[int] = []
    x = torch.randn(16, 1024, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        layer(x).square().sum().backward()
    reference = x.detach().clone().requires_grad_()
    torch.nn.functional.linear(reference, weight.dequantize(torch.float32)).square().sum().backward()
    assert x.grad is not None
    assert reference.grad is not None
    torch.testing.assert_close(x.grad, reference.grad, rtol=1e-4, atol=1e-4 * float(reference.grad.abs().max()))
    assert max(kept, default=0) <= 16 * 1024
    assert sum(tensor.nbytes for tensor in layer.state_dict().values()) == weight.values.nbytes


def mixed(name: str, tensor: torch.Tensor) -> str:
    """Types as a Q4_K_M file has them."""
    return {"v": "Q6_K", "up": "Q5_K", "in": "F16", "out": "BF16", "exact": "F32"}.get(name.split(".")[0], "Q4_K")


def mixed_tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    sides = {"q": (20, 256), "v": (8, 512), "up": (6, 256), "in": (7, 24), "out": (5, 24), "exact": (3, 8)}
    tensors = {f"{name}.weight": torch.randn(*shape, generator=random) for name, shape in sides.items()}
    return tensors | {"q.bias": torch.randn(20, generator=random), "table": torch.randn(2, 3, 4, generator=random)}


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_file_of_mixed_types_holds_what_the_packages_reader_reads(prefix: str, tmp_path: Path) -> None:
    tensors = {prefix + name: tensor for name, tensor in mixed_tensors().items()}
    kinds = lambda name, tensor: "F32" if name.endswith("table") else mixed(name.removeprefix(prefix), tensor)  # noqa: E731
    path = write_gguf(tmp_path / "m.gguf", tensors, kinds, tokens=["a", "bé", ""] * 50, strings={"x.y": "zü"})
    weights = WeightFiles(path)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert weights.names == list(theirs)
    assert weights.metadata["general.architecture"] == "flux"
    assert weights.metadata["x.y"] == "zü"
    for name, tensor in theirs.items():
        expected = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        assert weights.shape(name) == tuple(expected.shape) == tuple(tensors[name].shape)
        whole = weights.read_float(RowRange(name))
        assert torch.equal(whole, expected)
        assert torch.equal(weights.read_float(RowRange(name, 1, 2)), expected[1:2])
    assert weights.quantized is not None
    assert {stored.layout for stored in weights.quantized.weights.values()} == {"gguf"}
    assert "GGUF: 1 Q4_K; 1 Q6_K; 1 Q5_K; 5 in higher precision" in weights.quantized.describe()
    assert all(stored.served_rounding is None for stored in weights.quantized.weights.values())


def test_shapes_that_a_converter_changed_are_given_back(tmp_path: Path) -> None:
    values = torch.randn(24, 96, generator=torch.Generator().manual_seed(0))
    flat = {"a.weight": values.view(9, 256), "b.weight": values.view(9, 256)}
    path = write_gguf(
        tmp_path / "m.gguf", flat, lambda name, _: {"a": "Q8_0"}.get(name[0], "F16"),
        orig_shapes={"a.weight": (24, 96), "b.weight": (24, 8, 12)},
    )  # fmt: skip
    weights = WeightFiles(path)
    expected = dequantized(blocks_of(flat["a.weight"], "Q8_0"), "Q8_0").view(24, 96)
    assert torch.equal(weights.read_float(RowRange("a.weight", 4, 9)), expected[4:9])
    assert torch.equal(weights.read([RowRange("b.weight")]), values.half().view(24, 8, 12))
    odd = write_gguf(tmp_path / "odd.gguf", flat, "Q4_K", orig_shapes={"a.weight": (24, 96)})
    with pytest.raises(UserError, match=r"'a.weight' of shape \[24, 96\] is Q4_K with rows that are no whole blocks"):
        WeightFiles(odd)


@pytest.mark.parametrize("kind", TYPES)
def test_a_compiled_layer_gives_the_same(kind: str) -> None:
    """As one graph: a break in each layer would make compiling slower than none."""
    layer, x = QuantizedLinear(weight_of(kind)), torch.randn(3, 512)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


def test_a_gguf_file_is_never_written(tmp_path: Path) -> None:
    scheme = weight_of("Q5_K").scheme
    remedy = "Q5_K of GGUF is read only here; its servers add a LoRA at run time, so nothing needs to be merged"
    with pytest.raises(UserError, match=remedy):
        scheme.quantize(torch.ones(2, 256))
    weights = WeightFiles(write_gguf(tmp_path / "m.gguf", {"a.weight": torch.randn(4, 64)}))
    assert weights.quantized is not None
    with pytest.raises(UserError, match="read only here"):
        weights.quantized.weights["a.weight"].specs()


@pytest.mark.parametrize("kind", ["IQ2_XXS", "IQ1_S", "TQ1_0", "MXFP4"])
def test_types_that_are_not_read_are_named(kind: str, tmp_path: Path) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "flux")
    blocks = torch.zeros(4, 256 // block * block_bytes, dtype=torch.uint8).numpy()
    writer.add_tensor("a.weight", blocks, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=f"m.gguf: 'a.weight' is of GGUF's type {kind}, which is not read; use a file"):
        WeightFiles(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K"])
def test_a_damaged_scale_is_named(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"a.weight": torch.randn(4, 256)}, kind)
    place = read_entries([path])[0]["a.weight"].offset + TYPES[kind][2][-1]
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(struct.pack("<e", float("inf")))
    with pytest.raises(UserError, match=r"m.gguf: 'a.weight' holds NaN or infinity; download or convert it again"):
        WeightFiles(path).read_quantized([RowRange("a.weight")])
