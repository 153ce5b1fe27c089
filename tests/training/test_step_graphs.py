"""Steps as graphs: the same training bit for bit, with a stand-in that replays recorded operations on fixed memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from library.data.batches import Batch
from library.training import engine as engine_module
from library.training import step_graphs
from library.training.run import Run
from library.training.step_graphs import EAGER_STEPS
from library.training.tasks import image_lora
from library.training.tasks.image_step import FlowStep, StepInputs
from tests.runs import lora, losses_of, run, same, write_dataset
from tests.tiny_qwen import tiny_qwen_pipeline
from tests.tiny_z_image import tiny_z_pipeline
from tests.training.recorded_graph import RecordedGraphs

SIZES = [(64, 64)] * 4 + [(96, 48)] * 2 + [(48, 96)] * 2


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraphs]:
    """Let runs on the CPU capture their steps; the stand-in of each run."""
    made: list[RecordedGraphs] = []

    def new() -> RecordedGraphs:
        made.append(RecordedGraphs())
        return made[-1]

    monkeypatch.setattr(engine_module, "CudaCapture", new)
    monkeypatch.setattr(image_lora, "why_eager", lambda *_: None)
    return made


@pytest.fixture(scope="module")
def three_shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight images of three sizes, whose captions differ in length."""
    text = "batch_size = 1\nenable_bucket = true\nbucket_reso_steps = 16\nmin_bucket_reso = 32"
    toml = write_dataset(tmp_path_factory.mktemp("shapes"), text=text)
    for i, size in enumerate(SIZES):
        file = toml.parent / "images" / f"{i}.png"
        Image.open(file).resize(size).save(file)
        file.with_suffix(".txt").write_text("a disc" + ", plain" * i)
    return toml


@pytest.fixture(scope="module")
def bases(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {
        "flux": base,
        "qwen_image": tiny_qwen_pipeline(folder / "qwen", blocks=3),
        "z_image": tiny_z_pipeline(folder / "z", layers=3),
    }


def state_of(trained: Run) -> list[Tensor]:
    """Return what the optimizer and the average hold."""
    parts = trained.task.engine.parts()
    states = [*parts["optimizer"].state_dict()["state"].values()]
    tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return tensors + ([*parts["average"].state_dict()["averages"]] if "average" in parts else [])


KEPT = {"preserve": "prior", "preserve_prompts": "kept.txt", "sample_at_end": False}
CASES: dict[str, dict[str, Any]] = {
    "accumulation and average": {"gradient_accumulation_steps": 3, "ema_decay": 0.9, "max_grad_norm": 0.1},
    "recomputed": {"gradient_checkpointing": True, "mixed_precision": "bf16"},
    "recomputed in part": {"gradient_checkpointing": True, "activation_budget_mb": 1},
    "bf16 weights": {"full_bf16": True, "mixed_precision": "bf16"},
    "compiled": {"torch_compile": True, "dynamo_backend": "eager", "gradient_checkpointing": True},
    "fp8": {"fp8_scaled": True, "mixed_precision": "bf16"},
    "dora": {"network_type": "dora"},
    "qwen_image": {"model_type": "qwen_image", "gradient_checkpointing": True},
    "z_image": {"model_type": "z_image", "gradient_checkpointing": True},
}


@pytest.mark.parametrize("case", CASES)
def test_graphs_train_what_eager_steps_train(
    bases: dict[str, Path], three_shapes: Path, tmp_path: Path, graphs: Any, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Bit for bit over 20 steps of shapes in random order, of which one is not finite."""
    settings, calls = CASES[case], [0]
    own = FlowStep.inputs

    def inputs(self: FlowStep, batch: Batch, step: int) -> StepInputs:
        given = own(self, batch, step)
        calls[0] += 1
        if calls[0] == 15:
            given.noisy[0, 0, 0, 0] = torch.nan
        return given

    monkeypatch.setattr(FlowStep, "inputs", inputs)
    found = {}
    for name in ("eager", "graphs"):
        calls[0] = 0
        with monkeypatch.context() as patch:
            if name == "eager":
                patch.setattr(step_graphs, "EAGER_STEPS", 10**9)
            trained = run(
                bases[settings.get("model_type", "flux")], three_shapes, tmp_path / name, max_train_steps=20,
                cuda_graph="true", on_nan="skip", log_every_n_steps=1, network_alpha=4, **settings,
            )  # fmt: skip
        found[name] = state_of(trained)
        assert trained.position.updates_dropped == 1
    eager, captured = graphs
    assert eager.replays == 0
    assert captured.captures >= 3
    assert captured.replays >= calls[0] - captured.captures * EAGER_STEPS - 1
    assert losses_of(tmp_path / "graphs") == losses_of(tmp_path / "eager")
    assert same(lora(tmp_path / "graphs"), lora(tmp_path / "eager"))
    assert len(found["graphs"]) == len(found["eager"]) > 0
    assert all(torch.equal(one, other) for one, other in zip(found["graphs"], found["eager"], strict=True))
