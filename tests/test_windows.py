"""Whether Tandem starts on Windows, and trains there: as far as its rules can be set up on another system."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from library.accelerator import build_accelerator
from library.config.run_schema import AccelerateConfig, LoggingConfig, SavingConfig
from library.config.schema import TrainingConfig
from library.errors import UserError
from tests.processes import run_command
from tests.runs import ROOT, arguments, lora, run, write_base, write_dataset

# a pipe's encoding in western Europe; what opens a text file without one says so
ENVIRONMENT = {"PYTHONIOENCODING": "cp1252", "PYTHONWARNDEFAULTENCODING": "1", "PYTHONPATH": str(ROOT)}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the rules are set up by what Linux tells of a process")


def under_windows_rules(cwd: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run ``tests/windows.py`` with ``words`` in ``cwd``."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.windows", *map(str, words)]
    return run_command(command, cwd, ENVIRONMENT)


FORBIDDEN = """
import errno, os, signal, sys
from pathlib import Path

def refused(what, kind, call):
    try:
        call()
    except kind:
        return
    print("allowed:", what)

Path("held").write_bytes(b"x")
held = open("held", "rb")
os.mkdir("folder")
Path("folder/inside").write_bytes(b"x")
inside = open("folder/inside", "rb")
refused("resource", ImportError, lambda: __import__("resource"))
refused("SIGHUP", AttributeError, lambda: signal.SIGHUP)
refused("fork", AttributeError, lambda: os.fork)
refused("proc", OSError, lambda: open("/proc/self/stat"))
refused("delete what is open", PermissionError, lambda: os.remove("held"))
refused("rename over what is open", PermissionError, lambda: (Path("new").write_bytes(b""), os.replace("new", "held")))
refused("rename a folder in use", PermissionError, lambda: os.rename("folder", "other"))
refused("open a folder", PermissionError, lambda: os.open("folder", os.O_RDONLY))
refused("flush what is read", OSError, lambda: os.fsync(held.fileno()))
refused("a colon", OSError, lambda: open("a:b", "wb"))
refused("a device", OSError, lambda: os.mkdir("aux.txt"))
refused("a link", OSError, lambda: os.symlink("held", "link"))
print(sys.platform, hasattr(signal, "SIGHUP"))
"""


def test_the_rules_forbid_what_windows_does(tmp_path: Path) -> None:
    (tmp_path / "forbidden.py").write_text(FORBIDDEN)
    done = under_windows_rules(tmp_path, tmp_path / "forbidden.py")
    assert done.stdout.split("\n") == ["win32 False", ""], done.stdout + done.stderr


def test_every_module_is_imported_and_a_run_trains_saves_samples_and_is_resumed(tmp_path: Path) -> None:
    base, dataset = write_base(tmp_path / "base"), write_dataset(tmp_path / "data")
    (tmp_path / "prompts.txt").write_text('一只猫: "red"? → 🌍 --w 64 --h 64 --s 2\n', encoding="utf-8")
    out = tmp_path / "出 café"  # of letters that the pipe's encoding has and has not
    settings = {
        "save_state": True,
        "save_every_n_steps": 2,
        "sample_prompts": tmp_path / "prompts.txt",
        "sample_every_n_steps": 2,
        "max_data_loader_n_workers": 1,
        "log_with": "tensorboard",
        "logging_dir": tmp_path / "logs",
        "resume": "auto",
    }
    run(base, dataset, out, max_train_steps=2, lr_scheduler="constant", **settings)
    flags = arguments(base, dataset, out, max_train_steps=4, lr_scheduler="constant", **settings)
    done = under_windows_rules(tmp_path, "--import_all", ROOT / "train_lora.py", *flags)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    modules = sum(len(list((ROOT / name).rglob("*.py"))) for name in ("library", "networks", "tools", "dev"))
    imported = int(done.stdout.splitlines()[0])
    assert imported > 0.8 * modules  # the rest: empty __init__.py, what has no __init__.py beside it
    assert "in use on Windows" not in done.stdout + done.stderr
    assert not [file for file in out.iterdir() if file.suffix in (".tmp", ".old", ".gone")]
    run(base, dataset, tmp_path / "here", lr_scheduler="constant")
    here = lora(tmp_path / "here")
    assert all(torch.equal(tensor, here[name]) for name, tensor in lora(out).items())


def test_what_pytorch_for_windows_lacks_is_said_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes without NCCL and without triton; its CUDA build is told apart from ours by just these."""
    sections = TrainingConfig(mixed_precision="no"), SavingConfig(), LoggingConfig()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("library.accelerator.has_triton_package", lambda: False)
    with pytest.raises(UserError, match="torch_compile: needs triton.* triton-windows"):
        build_accelerator(AccelerateConfig(torch_compile=True), *sections)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="2 processes: .*NCCL.* WSL 2"):
        build_accelerator(AccelerateConfig(), *sections)


def test_the_page_starts_and_ends(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the page's packages are not installed (make setup-web)")
    command = [sys.executable, "-W", "ignore", "-m", "tests.windows", str(ROOT / "ui.py"), "--port", "0"]
    with open(tmp_path / "log", "w") as log:
        page = subprocess.Popen(command, cwd=tmp_path, env=os.environ | ENVIRONMENT, stdout=log, stderr=log)
    try:
        for _ in range(600):
            if found := re.search(r"http://\S+", (tmp_path / "log").read_text()):
                break
            time.sleep(0.1)
        assert found, (tmp_path / "log").read_text()
        assert b"Tandem" in urllib.request.urlopen(f"{found[0]}new", timeout=60).read()
        page.send_signal(signal.SIGINT)
        assert page.wait(30) == 130  # of Ctrl-C
    finally:
        page.kill()
    assert "Traceback" not in (tmp_path / "log").read_text()
