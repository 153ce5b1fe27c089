"""Does each layout's benchmark take steps? Tiny models, on the CPU; that layouts train alike is tests/training's."""

from __future__ import annotations

import pytest
import torch

import bench.gpu as gpu
from bench.families import FAMILIES, target_of
from bench.gpu import LAYOUTS, GpuCase, Images, layouts_for, measure_layout, sizes_of

CPU = torch.device("cpu")


def test_one_process_has_two_devices() -> None:
    row = measure_layout("flux", "device_map", CPU, tiny=True)
    assert row["step_s"] > 0
    assert row["images"] == 1
    assert row["placed"].count("blocks") == 2  # a part on each


@pytest.mark.parametrize("layout", [pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS])
def test_a_layout_is_a_row(layout: str) -> None:
    (row,) = gpu.run_layouts([("flux", layout)], gpu.Children("cpu", True, minutes=4), CPU)
    assert "error" not in row, row
    assert row["images"] == (1 if layout == "tp" else 2)


def test_a_machine_with_one_gpu_is_asked_for_device_map_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, expected in ((1, ["device_map"]), (2, [*LAYOUTS, "device_map"])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert layouts_for(torch.device("cuda")) == expected


def test_a_batch_is_cut_by_images() -> None:
    inputs = FAMILIES["flux"].inputs(sizes_of(GpuCase("flux", batch=4), tiny=True), CPU)
    whole = Images(inputs, target_of(inputs))
    pieces = whole.chunk(2)
    assert [len(piece) for piece in pieces] == [2, 2]
    for name, tensor in inputs.items():
        joined = torch.cat([piece.inputs[name] for piece in pieces])
        shared = name in ("img_ids", "txt_ids")  # the positions of all images' tokens
        assert torch.equal(pieces[0].inputs[name] if shared else joined, tensor), name
