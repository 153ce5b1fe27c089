"""Stopping, saving and sampling a run from outside: signals and files."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from library.config import load_config
from library.training.checkpoint.state import find_damage, newest_state
from library.training.report.progress import PREPARING
from tests.forked import Script, run_code
from tests.runs import ROOT, arguments, lora, run
from tests.worker_group import run_in_group
from train_lora import train

LONG = {"max_train_steps": 4000, "output_name": "x"}


def _steps(output: Path) -> int:
    """Lines of steps in ``metrics.jsonl``; a save's line has the norms of the updates and no loss."""
    file = output / "metrics.jsonl"
    return sum('"loss"' in line for line in file.read_text().splitlines()) if file.exists() else 0


def _wait(until: Callable[[], bool], process: Script | None = None) -> None:
    begun = time.monotonic()
    while not until():
        assert time.monotonic() - begun < 120, "nothing happened"
        assert process is None or not process.has_ended(), process.wait()
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_run_after_its_step_and_it_goes_on_with_the_same_bits(
    number: signal.Signals, base: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = arguments(base, dataset, tmp_path / "out", **LONG, max_data_loader_n_workers=1)
    process = Script(ROOT / "train_lora.py", flags, tmp_path)
    _wait(lambda: _steps(tmp_path / "out") >= 2, process)
    os.killpg(process.pid, number)  # as a terminal does, and systemd: the data loader's workers get it too
    done = process.wait()
    output = done.stdout
    assert done.returncode == 128 + number, output + done.stderr
    assert done.stderr == ""
    state = newest_state(tmp_path / "out", "x")
    assert state is not None
    step = int(state.name.removeprefix("x-step").removesuffix("-state"))
    assert f"stopped by {number.name} after step {step}: go on with --resume" in output
    assert not (tmp_path / "out" / "x.safetensors").exists()
    settings = {"output_name": "x", "max_train_steps": step + 1}
    capsys.readouterr()
    run(base, dataset, tmp_path / "out", **settings, resume="auto")
    summary = " ".join(capsys.readouterr().out.split())
    assert re.search(rf" steps 1 in \d+ s, from step {step} to {step + 1} ", summary), summary  # its own alone
    run(base, dataset, tmp_path / "whole", **settings)
    resumed = lora(tmp_path / "out", "x")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in lora(tmp_path / "whole", "x").items())


@pytest.mark.parametrize("by", ["SIGINT", "STOP"])
def test_a_first_ctrl_c_is_answered_while_sampling_and_the_rest_of_the_samples_is_left_for_later(
    by: str, base: Path, dataset: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (tmp_path / "prompts.txt").write_text("a disc --w 64 --h 64 --s 60\n" * 40)  # of a minute or more
    sampling = {"sample_prompts": tmp_path / "prompts.txt", "sample_every_n_steps": 2}
    flags = arguments(base, dataset, out, **LONG, **sampling)
    process = Script(ROOT / "train_lora.py", flags, tmp_path)
    _wait(lambda: (out / "samples" / "step000002_00.png").exists(), process)
    assert json.loads((out / PREPARING).read_text())["name"] == "sampling"  # which the page shows
    if by == "STOP":
        (out / by).touch()
    else:
        os.kill(process.pid, signal.SIGINT)
    done = process.wait()
    assert done.returncode == (3 if by == "STOP" else 130), done.stdout + done.stderr
    assert not (out / PREPARING).exists()
    answer = "SIGINT: stopping after this sample, then saving the LoRA and a state; once more ends it at once, without"
    assert (answer in done.stdout) == (by == "SIGINT")
    assert done.stdout.find(answer) < done.stdout.index("saved at step 3: ")
    assert len(list((out / "samples").glob("step000002_*.png"))) < 40
    assert "sampled at step 2" not in done.stdout  # a resumed run draws what is missing


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_before_the_first_step_ends_it_with_one_line(number: int) -> None:
    code = (
        "import os, signal, sys, time\n"
        "from library.errors import exit_on_user_error\n"
        "from library.training.run import Run\n"
        "from unittest.mock import MagicMock\n"
        "class Task(MagicMock):\n"
        "    def open(self, state):\n"
        f"        try: os.kill(os.getpid(), {number}); time.sleep(9)\n"
        "        finally: print('threads end', file=sys.stderr)\n"  # what runs is waited for after the answer
        "exit_on_user_error(lambda: Run(Task()).prepare(None))()\n"
    )
    done = run_code(code, [], ROOT)
    assert done.stderr == "interrupted: before the first step; what is cached is kept\nthreads end\n"
    assert done.returncode == 128 + number


def test_a_second_signal_ends_it_at_once() -> None:
    code = (
        "import os, signal, types, pathlib\n"
        "from library.training.signals import SignalHandler\n"
        "alone = types.SimpleNamespace(is_main_process=True, num_processes=1)\n"
        "requests = SignalHandler(pathlib.Path('.'), alone, 0.0)\n"
        "with requests.listening():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    request = requests.poll()\n"
        "    print(request.stop, request.exit_code, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('still here', flush=True)\n"
    )
    done = run_code(code, [], ROOT)
    assert (done.stdout, done.returncode) == ("SIGTERM 143\n", -signal.SIGTERM), done.stderr


def test_files_ask_for_a_save_a_sample_and_the_end(
    base: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "STOP").touch()
    os.utime(out / "STOP", (0, 0))  # of a run long ago
    (tmp_path / "prompts.txt").write_text("a disc --w 64 --h 64 --s 2\n")

    def ask() -> None:
        _wait(lambda: _steps(out) >= 2)
        for name in ("SAVE", "SAMPLE"):
            (out / name).touch()
        _wait(lambda: not (out / "SAVE").exists() and not (out / "SAMPLE").exists())
        (out / "STOP").touch()

    asking = threading.Thread(target=ask)
    asking.start()
    events = run(base, dataset, out, **LONG, sample_prompts=tmp_path / "prompts.txt")
    asking.join()
    assert (events.stop_request.stop, events.stop_request.exit_code) == ("STOP", 3)
    assert not (out / "STOP").exists()
    states = sorted(path for path in out.glob("x-step*-state"))
    assert len(states) in (2, 3)  # SAVE, STOP; two where the look fell between SAVE and SAMPLE
    assert [find_damage(state) for state in states] == [None] * len(states)
    assert all((out / f"{state.name.removesuffix('-state')}.safetensors").exists() for state in states)
    assert list((out / "samples").glob("step*_00.png"))
    assert "stopped by STOP after step" in capsys.readouterr().out


def test_processes_agree_when_to_stop(base: Path, dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = ("stop", _train_and_stop, (arguments(base, dataset, out, **LONG), out, tmp_path))
    assert run_in_group([job], tmp_path) == {"stop": ""}
    assert [(tmp_path / f"left{rank}").read_text() for rank in range(2)] == ["STOP 3"] * 2
    state = newest_state(out, "x")
    assert state is not None
    assert int(state.name[6:14]) == _steps(out)  # no process went a step further than the others


def _train_and_stop(flags: list[str], out: Path, folder: Path) -> None:
    """Train until process 0 has asked for the end; leave how each process's run ended."""

    def ask() -> None:
        _wait(lambda: _steps(out) >= 2)
        (out / "STOP").touch()

    if os.environ["RANK"] == "0":
        threading.Thread(target=ask, daemon=True).start()
    stop_request = train(load_config(flags)).stop_request
    (folder / f"left{os.environ['RANK']}").write_text(f"{stop_request.stop} {stop_request.exit_code}")
