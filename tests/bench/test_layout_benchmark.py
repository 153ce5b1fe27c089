"""Does each layout's benchmark take steps? Tiny models, on the CPU; that layouts train alike is tests/training's."""

from __future__ import annotations

import pytest
import torch

import bench.gpu as gpu
from bench.families import FAMILIES, example_inputs, target_of
from bench.gpu import LAYOUTS, Images, all_jobs, layout_job, measure_layout, sizes_of

CPU = torch.device("cpu")


def test_one_process_has_two_devices() -> None:
    row = measure_layout("flux", "device_map", CPU, tiny=True)
    assert row["step_s"] > 0
    assert row["images"] == 1
    assert row["placed"].count("blocks") == 2  # a part on each


@pytest.mark.parametrize("layout", [pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS])
def test_a_layout_is_a_row(layout: str) -> None:
    (row,) = gpu.run([layout_job("flux", layout, CPU)], gpu.Children("cpu", True, minutes=4))
    assert "error" not in row, row
    assert row["images"] == (1 if layout == "tp" else 2)


def test_a_machine_with_one_gpu_is_asked_for_device_map_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, expected in ((1, ["device_map"]), (2, [*LAYOUTS, "device_map"])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        jobs = all_jobs(["qwen_image"], torch.device("cuda"))
        assert [job.case["layout"] for job in jobs if "layout" in job.case] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_is_cut_by_images(family: str) -> None:
    inputs = example_inputs(family, sizes_of(family, tiny=True, batch=4), CPU)
    pieces = Images(inputs, target_of(inputs)).chunk(2)
    assert [len(piece) for piece in pieces] == [2, 2]
    for name, value in inputs.items():
        parts = [piece.inputs[name] for piece in pieces]
        if isinstance(value, list):  # shapes
            assert parts[0] + parts[1] == value
        else:
            shared = name in ("img_ids", "txt_ids")  # the positions of all images' tokens
            assert torch.equal(parts[0] if shared else torch.cat(parts), value), name
