"""Steps as graphs: the same training bit for bit, with a stand-in that replays recorded operations on fixed memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from library.data.batches import Batch, TensorBatch
from library.errors import UserError
from library.training import engine as engine_module
from library.training import step_graphs
from library.training.run import Run
from library.training.step_graphs import EAGER_STEPS, Captured, Step, StepGraphs
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
    text = 'batch_size = 1\nenable_bucket = true\nbucket_reso_steps = 16\nmin_bucket_reso = 32\ntrigger_word = "disc"'
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


CASES: dict[str, dict[str, Any]] = {
    "accumulation and average": {"gradient_accumulation_steps": 3, "ema_decay": 0.9, "max_grad_norm": 0.1},
    "recomputed": {"gradient_checkpointing": True, "mixed_precision": "bf16"},
    "recomputed in part": {"gradient_checkpointing": True, "activation_budget_mb": 1},
    "bf16 weights": {"full_bf16": True, "mixed_precision": "bf16"},
    "compiled": {"torch_compile": True, "dynamo_backend": "eager", "gradient_checkpointing": True},
    "fp8": {"fp8_scaled": True, "gradient_checkpointing": True, "mixed_precision": "bf16"},
    "dora": {"network_type": "dora"},
    "preserved, sampled": {
        "preserve": "prior",
        "preserve_class": "ring",
        "preserve_share": 0.5,
        "gradient_accumulation_steps": 2,
        "sample_every_n_steps": 5,
        "sample_prompts": "prompts.txt",
    },
    "qwen_image": {"model_type": "qwen_image", "gradient_checkpointing": True},
    "z_image": {"model_type": "z_image", "gradient_checkpointing": True},
}


SAMPLE = {"accumulation and average", "fp8", "preserved, sampled", "z_image"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in SAMPLE else pytest.mark.slow) for case in CASES]
)
def test_graphs_train_what_eager_steps_train(
    bases: dict[str, Path], three_shapes: Path, tmp_path: Path, graphs: Any, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Bit for bit over 12 batches or more of shapes in random order, of which one is not finite."""
    settings, calls = CASES[case], [0]
    steps = 6 if "gradient_accumulation_steps" in settings else 12
    own = FlowStep.inputs
    (tmp_path / "prompts.txt").write_text("a disc --w 64 --h 64 --s 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(step_graphs, "RARE", 0)  # what sampling drops is captured at once
    monkeypatch.setattr(step_graphs, "EAGER_STEPS", 1)  # a shape comes twice in an epoch of eight

    def inputs(self: FlowStep, batch: Batch, step: int) -> StepInputs:
        given = own(self, batch, step)
        calls[0] += 1
        if calls[0] == 9:
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
                bases[settings.get("model_type", "flux")], three_shapes, tmp_path / name, max_train_steps=steps,
                cuda_graph="true", on_nan="skip", log_every_n_steps=1, network_alpha=4, **settings,
            )  # fmt: skip
        found[name] = state_of(trained)
        assert trained.position.updates_dropped == 1
    eager, captured = graphs
    assert eager.replays == 0
    assert captured.captures >= 3
    assert captured.replays >= calls[0] - captured.captures * step_graphs.EAGER_STEPS - 1
    assert losses_of(tmp_path / "graphs") == losses_of(tmp_path / "eager")
    assert same(lora(tmp_path / "graphs"), lora(tmp_path / "eager"))
    assert len(found["graphs"]) == len(found["eager"]) > 0
    assert all(torch.equal(one, other) for one, other in zip(found["graphs"], found["eager"], strict=True))


@dataclass
class Given(TensorBatch):
    x: Tensor


class WrongAddress(RecordedGraphs):
    """A graph of which one operation reads what another step has left."""

    def __call__(self, step: Step, pool: Any) -> Captured:
        captured = super().__call__(step, pool)
        calls = self.recordings[-1].calls
        at = next(i for i, (func, *_) in enumerate(calls) if func is torch.ops.aten.mm.default)
        func, (one, other), kwargs, outputs = calls[at]
        calls[at] = func, (torch.randn_like(one), other), kwargs, outputs
        return captured


class Regression:
    """A layer, a weight that takes no part in the first shape, and how their steps fail."""

    def __init__(self, capture: RecordedGraphs, required: bool = False) -> None:
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
        self.notes: list[str] = []
        self.fails: dict[int, Exception] = {}  # at the n-th run of the step
        self.runs = 0
        self.graphs = StepGraphs(self.step, self.parameters, capture, self.notes.append, required)

    def step(self, given: Given, weight: Tensor) -> Tensor:
        weights, bias, other = self.parameters
        self.runs += 1
        prediction = given.x @ weights + bias
        if len(given.x) > 4:
            prediction = prediction * other
        loss = prediction.square().mean()
        if error := self.fails.get(self.runs):
            raise error
        (loss * weight).backward()
        return torch.stack([loss.detach()])

    def take(self, rows: int = 4, number: int = 0) -> list[Tensor | None]:
        """Take a step; return loss and gradients, which it adds to those that are there."""
        x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(number))
        loss = self.graphs(Given(x), torch.tensor(0.5))
        return [loss, *(None if p.grad is None else p.grad.clone() for p in self.parameters)]

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def equal(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("capture", [RecordedGraphs, WrongAddress])
def test_gradients_add_up_and_a_weight_that_takes_no_part_has_none(capture: type[RecordedGraphs]) -> None:
    """Steps of two batches of changing shapes; with a wrong address found, they go on eagerly with the same results."""
    graphs, eager = Regression(capture()), Regression(RecordedGraphs())
    eager.graphs.is_off = True
    for number in range(24):
        rows = 4 + 2 * (number % 3 == 2)
        assert equal(graphs.take(rows, number), eager.take(rows, number)), number
        if number % 2:
            graphs.zero_grad()
            eager.zero_grad()
    wrong = "cuda_graph: the step is not captured, the run goes on without: the graph's loss or gradients are not those"
    assert [note[: len(wrong)] for note in graphs.notes] == ([wrong] if capture is WrongAddress else [])
    assert graphs.graphs.is_off == (capture is WrongAddress)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "memory is short"),
        (RuntimeError("CUDA error: out of memory"), "memory is short"),
        (RuntimeError("not permitted"), "not permitted"),
    ],
)
@pytest.mark.parametrize("at", [EAGER_STEPS + 1, EAGER_STEPS + 2], ids=["on its stream", "captured"])
def test_a_capture_that_fails_leaves_the_step_as_it_was(error: Exception, reason: str, at: int) -> None:
    if at == EAGER_STEPS + 1 and reason != "memory is short":
        pytest.skip("an error of the step itself")
    failing, eager = Regression(RecordedGraphs()), Regression(RecordedGraphs())
    eager.graphs.is_off = True
    failing.fails[at] = error
    for number in range(6):
        assert equal(failing.take(number=number), eager.take(number=number))
    assert failing.notes == [f"cuda_graph: the step is not captured, the run goes on without: {reason}"]
    required = Regression(RecordedGraphs(), required=True)
    required.fails[at] = error
    for _ in range(EAGER_STEPS):
        required.take()
    with pytest.raises(UserError, match=f'^cuda_graph: .*{reason}; set cuda_graph = "auto"$'):
        required.take()


def test_a_step_that_does_not_fit_beside_graphs_runs_without_them() -> None:
    capture = RecordedGraphs()
    graphs, eager = Regression(capture), Regression(RecordedGraphs())
    eager.graphs.is_off = True
    for number in range(6):
        assert equal(graphs.take(number=number), eager.take(number=number))
    graphs.fails[graphs.runs + 1] = torch.OutOfMemoryError("CUDA out of memory")
    assert capture.recordings
    assert equal(graphs.take(6, 9), eager.take(6, 9))
    assert not capture.recordings
    assert "no room for graphs" in graphs.notes[0]


def test_dropped_graphs_and_moved_weights_are_captured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_graphs, "RARE", 0)
    capture = RecordedGraphs()
    problem, eager = Regression(capture), Regression(RecordedGraphs())
    eager.graphs.is_off = True
    for number in range(12):
        if number == 6:
            problem.graphs.drop()
            assert not capture.recordings
        if number == 9:
            problem.parameters[0].data = problem.parameters[0].data.clone()
        assert equal(problem.take(number=number), eager.take(number=number))
    assert capture.captures == 3
    assert capture.replays == 12 - EAGER_STEPS
    monkeypatch.setattr(step_graphs, "MOST_GRAPHS", 1)
    for rows in (7, 8) * (EAGER_STEPS + 2):
        problem.take(rows)
    assert len(capture.recordings) == len(problem.notes) == 1
