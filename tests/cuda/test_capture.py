"""A step captured on the fake device: what is refused, what a pool holds, and that two steps issue the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cuda.device import FakeDevice

# Of ``captured.STEPS`` those that a capture takes, as CUDA does; it refuses the others.
TAKEN = {
    "numbers as arguments",
    "a number on the host as an argument",
    "a draw of the device's generator",
    "a checkpoint that preserves nothing",
    "places on the device",
    "work on the host",
}


def test_a_capture_refuses_what_cuda_refuses(device: FakeDevice, tmp_path: Path) -> None:
    """And names the line that asks."""
    found = device.walk("refusals", tmp_path)
    assert {name for name, refused in found.items() if not refused} == TAKEN
    assert all("tests/cuda/captured.py" in refused[0] for refused in found.values() if refused)


def test_graphs_of_a_pool_hold_the_most_that_lived_in_one(device: FakeDevice, tmp_path: Path) -> None:
    """Two tensors of 20 MiB, then of 30; the small outputs take 512 bytes each."""
    found = device.walk("memory", tmp_path)
    assert found["live"] == [10, 50, 70, 70, 10, 0]
    assert found["peak"] == 70
    assert found["activations"] == 60 + 10  # what is kept outside is called so too, here


RECOMPUTED = ["--gradient_checkpointing"]
COMPILED = [*RECOMPUTED, "--torch_compile", "--dynamo_backend", "aot_eager"]
FAMILIES = [
    "flux", "flux_fill", "flux_kontext", "flux2_klein", "flux2_klein_edit", "flux2_dev", "flux2_dev_edit",
    "flux3_klein", "flux3_klein_edit", "qwen_image", "qwen_image_edit", "qwen_image_edit_plus", "qwen_image_21",
    "qwen_image_21_edit", "z_image", "krea2", "ernie_image",
]  # fmt: skip
FILES = ["nf4", "nvfp4", "mxfp8", "Q4_K", "Q8_0", "int8_row", "int8_convrot"]
CAPTURED: dict[str, dict[str, Any]] = {
    **{name: {"model_type": name, "flags": RECOMPUTED} for name in FAMILIES},
    **{f"z_image, {file}": {"model_type": "z_image", "file": file, "flags": RECOMPUTED} for file in FILES},
    **{
        f"z_image, fp8 by {unit}": {"flags": [*RECOMPUTED, "--fp8_scaled", "--fp8_granularity", unit]}
        for unit in ("tensor", "row", "block64")
    },
    "z_image, a batch of two, nothing recomputed": {"model_type": "z_image", "batch": 2, "flags": []},
    "z_image, products in fp8": {
        "model_type": "z_image",
        "flags": ["--fp8_scaled", "--quantised_compute", "quantised", "--fp8_granularity", "row"],
    },
    "z_image, products in int8": {
        "model_type": "z_image",
        "file": "int8_convrot",
        "flags": [*RECOMPUTED, "--quantised_compute", "quantised"],
    },
    "z_image, compiled": {"model_type": "z_image", "flags": COMPILED},
    "z_image, DoRA": {"model_type": "z_image", "flags": [*RECOMPUTED, "--network_type", "dora"]},
}
SAMPLE = {"z_image, Q4_K", "z_image, products in fp8", "z_image, products in int8"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in CAPTURED]
)
def test_two_steps_issue_the_same_on_the_same_addresses(device: FakeDevice, tmp_path: Path, name: str) -> None:
    """Of other noise, noise levels and captions of another length; so the second may be the first's graph again."""
    found = device.walk("capture", tmp_path, **CAPTURED[name])
    assert found["refused"] == []
    assert found["differ"] is None
    assert found["operations"][0] == found["operations"][1] > 1000


def test_a_number_of_the_step_shows(device: FakeDevice, tmp_path: Path) -> None:
    found = device.walk("capture", tmp_path, model_type="z_image", planted="step")
    assert [pair.split()[0] for pair in found["differ"]] == ["aten.mul.Tensor"] * 2


def test_what_a_run_takes_is_counted_with_its_graphs(device: FakeDevice, tmp_path: Path) -> None:
    """Between steps a pool holds what a step takes for activations, and the gradients lie still: all else is equal."""
    found = {}
    for flag in ("--no-cuda_graph", "--cuda_graph"):
        (folder := tmp_path / flag).mkdir()
        found[flag] = device.walk("plan", folder, model_type="z_image", side=256, flags=[*RECOMPUTED, flag])
    (eager, captured) = (each["phases"]["step"] for each in found.values())
    assert found["--cuda_graph"]["graphs"] == 1
    assert found["--cuda_graph"]["refused"] == []
    assert captured["weights"] == eager["weights"]
    assert captured["gradients"] == pytest.approx(captured["LoRA"], rel=0.01)  # fp32 both
    assert eager["activations"] <= captured["activations"] <= 1.1 * eager["activations"]
