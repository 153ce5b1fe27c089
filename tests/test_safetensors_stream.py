"""Streaming a safetensors file against the safetensors library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from library.safetensors_io import stream_safetensors

TENSORS = {
    "b.weight": torch.randn(3, 5),
    "a.half": torch.randn(7).half(),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 4),
    "flags": torch.tensor([True, False, True]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "count": torch.tensor([1, 2, 3]),
    "brain": torch.randn(3, 3).bfloat16().t(),
    "eight": torch.randn(3).to(torch.float8_e4m3fn),
}


def stream(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    stream_safetensors(path, specs, tensors.__getitem__, metadata)


def test_the_library_reads_back_what_was_streamed(tmp_path: Path) -> None:
    stream(tmp_path / "a", TENSORS, {"key": "välue"})
    read = load_file(tmp_path / "a")
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].float(), tensor.float())
    with safe_open(tmp_path / "a", framework="pt") as file:
        assert file.metadata() == {"key": "välue"}


def test_data_is_laid_out_as_the_library_does(tmp_path: Path) -> None:
    floats = {name: tensor for name, tensor in TENSORS.items() if tensor.dtype in (torch.float32, torch.bfloat16)}
    stream(tmp_path / "ours", floats)
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_tensor_other_than_announced_is_a_bug_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x: torch.float32"):
        stream_safetensors(tmp_path / "a", {"x": (torch.float16, (2,))}, lambda name: torch.zeros(2))
    assert list(tmp_path.iterdir()) == []
