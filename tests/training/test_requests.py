"""Stopping, saving and sampling a run from outside: signals and files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from library.config import load_config
from library.training.resume import find_damage, newest_state
from tests.processes import LIMIT, launcher
from tests.runs import ROOT, arguments, lora, run
from train_lora import train

LONG = {"max_train_steps": 4000, "output_name": "x"}


def _steps(output: Path) -> int:
    file = output / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def _wait(until: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    begun = time.monotonic()
    while not until():
        assert time.monotonic() - begun < 120, "nothing happened"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.05)


def _start(flags: list[str], cwd: Path, *starter: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *starter, str(ROOT / "train_lora.py"), *flags],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return output and errors of a process that is to end by itself."""
    try:
        return process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_run_after_its_step_and_it_goes_on_with_the_same_bits(
    number: signal.Signals, base: Path, dataset: Path, tmp_path: Path
) -> None:
    flags = arguments(base, dataset, tmp_path / "out", **LONG, max_data_loader_n_workers=2)
    process = _start(flags, tmp_path)
    _wait(lambda: _steps(tmp_path / "out") >= 2, process)
    os.killpg(process.pid, number)  # as a terminal does, and systemd: the data loader's workers get it too
    output, errors = _end(process)
    assert process.returncode == 128 + number, output + errors
    assert errors == ""
    state = newest_state(tmp_path / "out", "x")
    assert state is not None
    step = int(state.name.removeprefix("x-step").removesuffix("-state"))
    assert f"stopped by {number.name} after step {step}: go on with --resume" in output
    assert not (tmp_path / "out" / "x.safetensors").exists()
    settings = {"output_name": "x", "max_train_steps": step + 1}
    run(base, dataset, tmp_path / "out", **settings, resume="auto")
    run(base, dataset, tmp_path / "whole", **settings)
    resumed = lora(tmp_path / "out", "x")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in lora(tmp_path / "whole", "x").items())


def test_a_second_signal_ends_it_at_once() -> None:
    code = (
        "import os, signal, types, pathlib\n"
        "from library.training.requests import Requests\n"
        "alone = types.SimpleNamespace(is_main_process=True, num_processes=1)\n"
        "requests = Requests(pathlib.Path('.'), alone, 0.0)\n"
        "with requests.listening():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print(requests.look(1).stop, requests.look(1).exit_code, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('still here', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
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
    AcceleratorState._reset_state(reset_partial_state=True)
    flags = arguments(base, dataset, out, **LONG, sample_prompts=tmp_path / "prompts.txt")
    events = train(load_config(flags))
    asking.join()
    assert (events.wish.stop, events.wish.exit_code) == ("STOP", 3)
    assert not (out / "STOP").exists()
    states = sorted(path for path in out.glob("x-step*-state"))
    assert len(states) in (2, 3)  # SAVE, STOP; two where the look fell between SAVE and SAMPLE
    assert [find_damage(state) for state in states] == [None] * len(states)
    assert all((out / f"{state.name.removesuffix('-state')}.safetensors").exists() for state in states)
    assert list((out / "samples").glob("step*_00.png"))
    assert "stopped by STOP after step" in capsys.readouterr().out


def test_processes_agree_when_to_stop(base: Path, dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = _start(arguments(base, dataset, out, **LONG), tmp_path, *launcher())
    _wait(lambda: _steps(out) >= 2, process)
    (out / "STOP").touch()
    output, errors = _end(process)
    assert output.count("stopped by STOP after step") == 1, output + errors
    assert "exitcode  : 3" in errors  # torchrun's report; its own code is 1
    state = newest_state(out, "x")
    assert state is not None
    assert int(state.name[6:14]) == _steps(out)  # no process went a step further than the others
