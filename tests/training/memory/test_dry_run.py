"""Steps taken before the run, and running out of memory for real: a process with a limit on its address space."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import library.training.memory.dry_run as dry_run
from library.config.schema import ParallelConfig, TrainingConfig
from library.errors import UserError
from library.training.memory.budget import MemoryEstimate, available_bytes
from library.training.memory.dry_run import MemoryProbe, suggestions
from library.training.memory.estimator import BlockMemory, ModelMemory, StepOptions, estimate
from library.training.memory.fake_cuda import library_path
from library.training.memory.plan import RESERVE
from tests.forked import run_script
from tests.processes import run_command
from tests.runs import ROOT, arguments, largest_difference, lora, run, write_dataset

# train_lora.py, with the room that is left after the first step of the run limited to so many MiB
LIMITED = """
import resource, sys
from library.training.events import RunEvents
after_step, room = RunEvents.after_step, int(sys.argv.pop(1))
def limit(self, position):
    after_step(self, position)
    pages = int(open("/proc/self/statm").read().split()[0])
    most = pages * resource.getpagesize() + room * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
RunEvents.after_step = limit
from train_lora import main
main()
"""


def two_sizes(folder: Path, side: int = 256) -> Path:
    """Seven images of 64 x 64 and, in a dataset of its own, a large one."""
    toml = write_dataset(folder, images=7)
    write_dataset(folder / "large", images=1, size=(side, side))
    text = toml.read_text()
    more = f'[[datasets]]\nresolution = {side}\n[[datasets.subsets]]\nimage_dir = "large/images"\n'
    toml.write_text(text + more)
    return toml


@pytest.mark.parametrize("optimizer", [{}, {"optimizer_type": "Prodigy", "learning_rate": 1.0}])
def test_a_run_is_the_same_with_and_without(base: Path, tmp_path: Path, optimizer: dict[str, object]) -> None:
    settings = {"network_dropout": 0.3, "max_train_steps": 3, **optimizer}
    for name, memory_dry_run in (("with", True), ("without", False)):
        run(
            base,
            write_dataset(tmp_path / f"data-{name}", images=4),
            tmp_path / name,
            memory_dry_run=memory_dry_run,
            **settings,
        )
    one, other = lora(tmp_path / "with"), lora(tmp_path / "without")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_it_tells_what_the_largest_batch_takes(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = run(base, two_sizes(tmp_path), tmp_path / "out", memory_dry_run=True, max_train_steps=1)
    printed = " ".join(capsys.readouterr().out.split())
    assert "memory dry run: a step of 1 at 256x256 takes " in printed
    # what the LoRA takes is known from its shapes
    mib = sum(p.numel() for p in events.task.network.parameters()) * 4 / 2**20
    assert f"LoRA {mib:.0f} MiB, gradients {mib:.0f} MiB, optimizer {2 * mib:.0f} MiB" in printed


def test_what_does_not_fit_is_refused_before_anything_is_cached(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = two_sizes(tmp_path)
    monkeypatch.setattr(dry_run, "available_bytes", lambda device: 3 * 2**20)  # a device of 3 MiB
    with pytest.raises(UserError, match="memory dry run: a step of 1 at 256x256 needs about .* of 3 MiB; ") as caught:
        run(base, data, tmp_path / "out", memory_dry_run=True)
    assert "\n" not in str(caught.value)
    assert "with gradient_checkpointing = true: about" in capsys.readouterr().out
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_the_full_step_is_what_was_estimated_and_recomputing_takes_less(base: Path, tmp_path: Path) -> None:
    """The estimate against the measurement, within a tenth; recomputing holds one block's activations of three."""
    taken: list[int] = []
    measured = dry_run.measured_memory

    def keep(run: object, activations: int, device: torch.device) -> MemoryEstimate:
        taken.append(activations)
        return measured(run, activations, device)  # type: ignore[arg-type]

    guesses: list[int] = []
    guess = MemoryProbe._extrapolated

    def keep_guess(probe: MemoryProbe, *steps: MemoryEstimate) -> int:
        guesses.append(guess(probe, *steps))
        return guesses[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run, "measured_memory", keep)
        patch.setattr(MemoryProbe, "_extrapolated", keep_guess)
        for recompute in (False, True):
            run(
                base, two_sizes(tmp_path / str(recompute)), tmp_path / "out", memory_dry_run=True, max_train_steps=1,
                gradient_checkpointing=recompute,
            )  # fmt: skip
    assert guesses[0] == pytest.approx(taken[2], rel=0.1)
    assert len(taken) == 6  # three sizes each
    assert taken[5] < taken[2] / 2


def run_code(code: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "code.py").write_text(code)
    return run_script(folder / "code.py", words, folder)


def test_the_limits_of_the_process_count(tmp_path: Path) -> None:
    script = (
        "import resource, torch; from library.training.memory.budget import available_bytes as free, _status;"
        "before = free(torch.device('cpu'));"
        "resource.setrlimit(resource.RLIMIT_AS, (_status('VmSize') + 2**26, -1));"
        "held = _status('VmRSS'); print(before > held + 2**26, abs(free(torch.device('cpu')) - held - 2**26) < 2**23)"
    )
    done = run_code(script, tmp_path)
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_running_out_of_memory_names_the_batch_and_what_to_change(base: Path, tmp_path: Path) -> None:
    data = two_sizes(tmp_path, 768)
    settings = {"max_train_steps": 16, "save_state": True, "seed": 1}
    # cached by another process: what the encoder gave back to this one's heap would be room that no limit sees
    run(base, data, tmp_path / "first", max_train_steps=1)
    flags = arguments(base, data, tmp_path / "out", **settings)
    done = run_command([sys.executable, "-c", LIMITED, "28", *flags], ROOT, {"MALLOC_ARENA_MAX": "1"})
    assert done.returncode == 2, done.stderr[-2000:]
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith("error: out of memory in step ")
    assert "the batch of 1 at 768x768" in message
    assert "large/images/0.png" in message
    assert "set gradient_checkpointing = true" in message
    assert "Traceback" not in done.stderr
    step = int(message.split("in step ")[1].split(":")[0])
    if step > 1:
        saved = tmp_path / "out" / f"lora-step{step - 1:08d}.safetensors"
        assert saved.exists()
        run(base, data, tmp_path / "clean", max_train_steps=step - 1, seed=1)
        # On some CPUs MKL's order of summing follows where memory lies, which differs between processes: fp32 rounding.
        assert largest_difference(lora(tmp_path / "out", saved.stem), lora(tmp_path / "clean")) < 1e-5


@pytest.mark.parametrize("limited", [True, False])
def test_onednn_out_of_memory_is_told_from_an_operation_it_lacks(limited: bool, tmp_path: Path) -> None:
    """oneDNN says "could not create a primitive" of both; it can be out of memory only where addresses are limited."""
    code = """
import resource, sys
from library.training.memory.budget import is_out_of_memory
if sys.argv[1] == "True":
    pages = int(open("/proc/self/statm").read().split()[0]) + 2**12
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))
print(is_out_of_memory(RuntimeError("could not create a primitive")), is_out_of_memory(RuntimeError("std::bad_alloc")))
"""
    done = run_code(code, tmp_path, str(limited))
    assert done.stdout.split() == [str(limited), "True"], done.stderr


def test_suggestions_add_up() -> None:
    """By hand: ten blocks of 50 weights, 40 of them matrices, and 200 weights outside; a batch of two."""
    block = BlockMemory(10, {1: (50, 40)}, lora=1, activations=200, inputs=3, temporary=20)
    model = ModelMemory((block,), BlockMemory(1, {1: (200, 0)}, 0, 30, 0, 0), largest_matrix=40, ends=None)
    options = StepOptions(batch=2)
    activations = 2 * (10 * 200 + 20 + 30)
    assert vars(estimate(model, ParallelConfig(), options)) == vars(MemoryEstimate(1400, 40, 40, 80, 120, activations))
    measured = MemoryEstimate(1400, 40, 40, 80, 120, activations - 100)  # what is measured goes in front
    assert measured.total == 1400 + 160 + 4000
    totals = {name: total for name, total, _ in suggestions(measured, model, options, 5360, 8)}
    recomputed = 2 * (10 * 3 + 200 + 20 + 30)  # so few blocks stand alone
    assert totals["gradient_checkpointing = true"] == 5560 - activations + recomputed
    assert totals["blocks_to_swap = 2"] == 5560 - 2 * 100  # 200 too much, 100 a block
    assert totals["fp8_scaled = true"] == 5560 - 400 + 80  # and a matrix is unpacked
    assert totals["batch_size = 1"] == 5560 - activations // 2
    assert totals['optimizer_type = "AdamW8bit"'] == 5560 - 80 + 2 * 10
    least = 200 * 2 + 2 * (40 + 10 * 2) + 40 + 40 + 20 + (10 * 3 + 200 + 20 + 30) + 80
    assert totals["all of these, and every block swapped"] == measured.total - 5660 + least
    assert available_bytes(torch.device("cpu")) > 0


@pytest.mark.parametrize(("room", "fits"), [(2**30, True), (2**19, False)])
def test_where_a_step_can_be_counted_the_choice_takes_none(
    room: int,
    fits: bool,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of ``room`` beside what is kept for CUDA itself; a CPU says that it is a GPU where this is decided."""
    try:
        library_path()
    except UserError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(MemoryProbe, "can_count", True)
    monkeypatch.delattr(MemoryProbe, "measure")
    monkeypatch.setattr(dry_run, "available_bytes", lambda device: RESERVE + room)
    settings = {"max_train_steps": 1, "memory": "auto", "mixed_precision": "bf16"}
    if fits:
        run(base, two_sizes(tmp_path), tmp_path / "out", **settings)
        assert "memory: nothing recomputed; a step of 1 at 256x256 takes" in " ".join(capsys.readouterr().out.split())
    else:
        with pytest.raises(UserError, match="a step of 1 at 256x256 needs about .* of 1.0 GiB; set fp8_scaled"):
            run(base, two_sizes(tmp_path), tmp_path / "out", **settings)


@pytest.mark.parametrize(
    ("limit", "tried", "said"),
    [
        (2**33, False, "is estimated at"),
        (3 * 2**20, False, "is estimated at"),
        (None, True, "takes"),
    ],
)
def test_a_gpu_run_takes_real_steps_only_where_headers_leave_a_doubt(
    limit: int | None,
    tried: bool,
    said: str,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The device is a CPU that says it is a GPU where this is decided."""
    taken, measure, decide = list[object](), MemoryProbe.measure, dry_run._in_doubt

    def on_gpu(probe: MemoryProbe, console: Console) -> TrainingConfig:
        room = limit if limit is not None else probe.estimate().total  # type: ignore[union-attr]
        monkeypatch.setattr(dry_run, "available_bytes", lambda device: room)
        if decide(probe, console):
            taken.append(measure(probe, probe.task.config.training))
            dry_run._check_fits(probe, console)
        return probe.task.config.training

    monkeypatch.setattr("library.training.tasks.image_lora.fit_memory", on_gpu)
    data = two_sizes(tmp_path)
    if limit == 3 * 2**20:
        with pytest.raises(UserError, match="memory dry run: a step of 1 at 256x256 needs about .* of 3 MiB; "):
            run(base, data, tmp_path / "out", max_train_steps=1)
    else:
        run(base, data, tmp_path / "out", max_train_steps=1)
    assert bool(taken) == tried
    assert f"memory dry run: a step of 1 at 256x256 {said}" in " ".join(capsys.readouterr().out.split())
