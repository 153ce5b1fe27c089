"""What is looked at in the output folder before a run begins: who has it, what is in it, what can be written."""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from library.config import load_config
from library.errors import UserError
from library.folder_lock import FolderLock, is_held
from library.training.checkpoint.output_folder import same_name_beside
from tests.processes import LIMIT
from tests.runs import ROOT, run


def lock(folder: Path) -> FolderLock:
    return FolderLock(folder, "cat")


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("library.folder_lock._SECONDS", 0.2)


def test_a_folder_is_one_runs_until_it_gives_it_back(tmp_path: Path) -> None:
    first = lock(tmp_path / "out")
    first.acquire()
    with pytest.raises(UserError) as refused:
        lock(tmp_path / "out").acquire()
    who = (
        rf"the run cat \(process {os.getpid()} on {platform.node()}, since \d{{4}}-.*\) writes into {tmp_path / 'out'}"
    )
    assert re.search(rf"^output_dir: {who}; wait for it, stop it \(a file STOP there does\)", str(refused.value))
    first.release()
    assert list((tmp_path / "out").iterdir()) == []
    second = lock(tmp_path / "out")
    second.acquire()
    first.release()  # is no longer its own
    assert (tmp_path / "out/.lock").exists()
    second.release()


def test_a_file_name_that_a_run_beside_has_is_found(tmp_path: Path) -> None:
    mine = tmp_path / "b" / "lora.safetensors"
    for path in (mine, tmp_path / "a" / "cat.safetensors", tmp_path / "lora.safetensors"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert same_name_beside(mine) is None
    theirs = tmp_path / "c" / "lora.safetensors"
    theirs.parent.mkdir()
    theirs.touch()
    assert same_name_beside(mine) == theirs
    assert same_name_beside(tmp_path / "missing" / "run" / "lora.safetensors") is None


def test_what_a_killed_run_left_behind_is_taken_over(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from library.folder_lock import FolderLock as L; "
    code += "L(Path(sys.argv[1]), 'dog').acquire(); os._exit(9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False)
    assert not is_held(tmp_path)
    assert (tmp_path / ".holder").read_text().startswith("the run dog (process ")  # it tells that the run was killed
    again = lock(tmp_path)
    again.acquire()
    assert is_held(tmp_path)
    again.release()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_was_deleted_and_made_anew_is_the_second_runs(tmp_path: Path) -> None:
    first, second = lock(tmp_path / "out"), FolderLock(tmp_path / "out", "dog")
    first.acquire()
    shutil.rmtree(tmp_path / "out")
    second.acquire()
    first.release()
    assert is_held(tmp_path / "out")
    with pytest.raises(UserError, match=r"output_dir: the run dog \(process "):
        lock(tmp_path / "out").acquire()
    second.release()


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_without_locks_in_the_file_system_one_run_has_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    first = lock(tmp_path)
    first.acquire()
    assert is_held(tmp_path)
    with pytest.raises(UserError, match="the run cat"):
        lock(tmp_path).acquire()
    first.release()
    assert not list(tmp_path.iterdir())


def test_looks_at_a_folder_do_not_see_each_other(tmp_path: Path) -> None:
    for name in (".lock", ".holder"):
        (tmp_path / name).touch()
    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(is_held, [tmp_path] * 2000))


def test_the_lock_of_a_version_that_wrote_json_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_bytes(b'{"pid": 1, "host": "elsewhere", "run": "dog"}')
    mine = lock(tmp_path)
    mine.acquire()
    mine.release()


def test_a_folder_or_pipe_in_the_place_of_the_lora_is_told_before_the_first_step(
    base: Path, dataset: Path, tmp_path: Path
) -> None:
    (tmp_path / "lora.safetensors").mkdir()
    with pytest.raises(UserError, match=r"lora\.safetensors is no file, so none can be written there; move it away"):
        run(base, dataset, tmp_path, overwrite=True)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_of_many_that_find_a_lock_left_behind_one_gets_the_folder(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from library.errors import UserError\n"
        "from library import folder_lock\n"
        "folder_lock._SECONDS = 0.5\n"
        "print('ready', flush=True)\nsys.stdin.readline()\n"
        "lock = folder_lock.FolderLock(Path(sys.argv[1]), 'cat')\n"
        "try:\n    lock.acquire()\nexcept UserError:\n    print('refused', flush=True)\n"
        "else:\n    print('mine', flush=True)\nsys.stdin.readline()\n"
    )
    (tmp_path / ".lock").write_text("the run dog")
    command = [sys.executable, "-c", code, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    racing = [subprocess.Popen(command, **pipes) for _ in range(4)]  # type: ignore[call-overload]
    for process in racing:
        assert process.stdout.readline() == "ready\n"
    for process in racing:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = sorted(process.stdout.readline().strip() for process in racing)
    for process in racing:
        process.communicate("end\n", timeout=LIMIT)
    assert answers == ["mine", "refused", "refused", "refused"]


def test_a_second_run_in_the_folder_is_refused_and_spoils_nothing(base: Path, dataset: Path, tmp_path: Path) -> None:
    out, refused = tmp_path / "out", list[str]()

    def begin_another() -> None:
        begun = time.monotonic()
        while not (out / "metrics.jsonl").exists() and time.monotonic() - begun < LIMIT:
            time.sleep(0.02)
        before = (out / "config.toml").read_bytes()
        try:
            lock(out).acquire()
        except UserError as error:
            refused.append(str(error))
        assert (out / "config.toml").read_bytes() == before
        (out / "STOP").touch()

    other = threading.Thread(target=begin_another)
    other.start()
    events = run(base, dataset, out, max_train_steps=4000)
    other.join()
    assert events.stop_request.stop == "STOP"
    assert refused[0].startswith("output_dir: the run lora (process ")
    assert not (out / ".lock").exists()


def test_a_finished_lora_is_replaced_by_the_same_run_or_on_demand_only(
    base: Path, dataset: Path, tmp_path: Path
) -> None:
    settings = {"overwrite": False, "max_train_steps": 2}
    run(base, dataset, tmp_path, **settings)
    before = (tmp_path / "lora.safetensors").read_bytes()
    with pytest.raises(UserError) as refused:
        run(base, dataset, tmp_path, **settings, learning_rate=1e-4)
    assert str(refused.value) == (
        f"output_dir: {tmp_path / 'lora.safetensors'} was trained with learning_rate = 0.001, now it is 0.0001; choose "
        "another output_name or output_dir, or set overwrite = true"
    )
    assert (tmp_path / "lora.safetensors").read_bytes() == before
    assert not (tmp_path / ".lock").exists()
    run(base, dataset, tmp_path, **settings)  # the same again
    same = {"log_every_n_steps": 2, "save_every_n_steps": 1, "gradient_checkpointing": True, "vae_batch_size": 2}
    run(base, dataset, tmp_path, **settings, **same)  # nor do these change the LoRA
    metrics = (tmp_path / "metrics.jsonl").read_text()
    run(base, dataset, tmp_path, **settings, learning_rate=1e-4, output_name="other")  # the first run's are kept
    assert (tmp_path / "metrics.lora.jsonl").read_text() == metrics != (tmp_path / "metrics.jsonl").read_text()
    assert "learning_rate = 0.001\n" in (tmp_path / "config.lora.toml").read_text()
    run(base, dataset, tmp_path, **settings | {"max_train_steps": 3}, save_state=True, output_name="longer")
    more = settings | {"max_train_steps": 4, "resume": "auto"}
    run(base, dataset, tmp_path, **more, output_name="longer")  # goes on from its own state
    run(base, dataset, tmp_path, **settings | {"overwrite": True}, learning_rate=1e-4)
    for steps in (2, 3):  # what is not to be told is compared all the same
        told = settings | {"no_metadata": True, "max_train_steps": steps, "output_name": "quiet"}
        with pytest.raises(UserError, match="was trained with other settings") if steps == 3 else nullcontext():
            run(base, dataset, tmp_path, **told)
            run(base, dataset, tmp_path, **told)
    (tmp_path / "lora.safetensors").write_bytes((base / "transformer/diffusion_pytorch_model.safetensors").read_bytes())
    with pytest.raises(UserError, match="is there, and does not say with which settings it was trained"):
        run(base, dataset, tmp_path, **settings)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("x" * 300, "it has 300 bytes"),
        ("ü" * 100, "it has 200 bytes"),
        ("a\0b", "it holds a NUL character"),
        ("a\x1b[2Jb", r"may hold '\\x1b'"),
        ("a/b", "put the folder into output_dir"),
        ("a\\b", "put the folder into output_dir"),
        ("a:b", "may hold ':'"),
        ("NUL", "NUL is a device on Windows"),
        ("com1.v2", "com1 is a device on Windows"),
        ("cat.", "may not end in a dot"),
        ("", "nor be empty"),
        ("\ud800", "half of a surrogate pair"),
    ],
)
def test_names_that_cannot_be_written_are_refused_at_the_door(name: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        load_config(["--pretrained_model_name_or_path", "m", "--dataset_config", "d", "--output_name", name])


def test_a_tracker_that_cannot_write_is_refused_before_anything_is_loaded(
    base: Path, dataset: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"logging_dir: .*file.*cannot be written .*; choose another"):
        run(base, dataset, tmp_path / "out", log_with="tensorboard", logging_dir=tmp_path / "file")
    with pytest.raises(UserError, match="log_tracker_name: .*a NUL character"):
        run(base, dataset, tmp_path / "out", log_with="tensorboard", log_tracker_name="a\0b")


def test_a_folder_without_room_for_a_name_or_a_byte_is_refused(base: Path, dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    options = "size=1m,nr_inodes=3"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        for name in ("a", "b"):
            (folder / name).touch()
        with pytest.raises(UserError, match=rf"output_dir: {folder} cannot be written to \(No space left on device\)"):
            run(base, dataset, folder)
        (folder / "a").unlink()
        with pytest.raises(UserError, match="cannot be written .No space left on device.; choose another"):
            run(base, dataset, folder)  # the lock has the last name
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        with pytest.raises(UserError, match=rf"output_dir: {folder} cannot be written to \(Read-only file system\)"):
            run(base, dataset, folder)
        with pytest.raises(UserError, match=rf"logging_dir: {folder}/x: .*cannot be written \(Read-only file system\)"):
            run(base, dataset, tmp_path / "out", log_with="tensorboard", logging_dir=folder / "x")
        assert list((tmp_path / "out").iterdir()) == []  # nor is a lock left
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
