"""The layouts in configs/parallel and the commands of docs/distributed.md fit each other."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import toml

from library.config.load import load_for
from library.config.scripts import LLM, LORA
from tests.docs.test_commands import ROOT, blocks
from tests.runs import arguments, largest_difference, lora, run, write_base, write_dataset

CONFIGS = sorted((ROOT / "configs" / "parallel").glob("*.toml"))
SLURM = ROOT / "configs" / "parallel" / "slurm.sh"


def commands(text: str) -> list[list[str]]:
    """Return the launchers' commands of a text, each as a list of words."""
    joined = re.sub(r"\\\n#?\s*", "", text)
    found = re.findall(r"^[# ]*(?:\.venv/bin/)?((?:torchrun|accelerate launch|sbatch) .*)$", joined, re.MULTILINE)
    return [shlex.split(line) for line in found]


def processes_of(words: list[str]) -> int:
    """Return how many processes a launcher's command starts."""
    numbers = {flag: int(words[words.index(flag) + 1]) for flag in words if flag.startswith(("--n", "--num_p"))}
    return numbers.get("--nnodes", 1) * numbers.get("--nproc-per-node", 1) * numbers.get("--num_processes", 1)


def check(words: list[str]) -> None:
    """Load the configuration of a command as it would be, and count its processes."""
    if words[0] == "sbatch":
        assert (ROOT / words[1]).samefile(SLURM)
        options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", SLURM.read_text(), re.MULTILINE))
        processes, words = int(options["nodes"]) * int(options["gpus-per-node"]), words[1:]
    else:
        processes = processes_of(words)
    script = next(i for i, word in enumerate(words) if word in ("train_lora.py", "train_llm.py"))
    flags = [str(ROOT / word) if word.startswith("configs/") else word for word in words[script + 1 :]]
    config = load_for(LORA if words[script] == "train_lora.py" else LLM, flags)
    config.parallel.replicas(processes)  # refuses another number


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_layout_is_valid_and_started_as_its_first_lines_say(path: Path) -> None:
    text = path.read_text()
    assert (path.parent / text.splitlines()[0].removeprefix("#:schema ")).is_file()
    (command,) = (words for words in commands(text) if str(path.relative_to(ROOT)) in words)
    check(command)


def test_every_command_of_the_page_starts_as_many_processes_as_its_file_asks_for() -> None:
    found = [words for block in blocks("docs/distributed.md", "bash") for words in commands(block)]
    assert len(found) >= 5
    for words in found:
        check(words)


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """What SLURM gives a job on one machine with two GPUs, with stand-ins for its commands."""
    scripts = {"scontrol": '[ "$*" = "show hostnames node[1-2]" ] && printf "localhost\\nnode2\\n"',
               "srun": 'echo "$@" > srun.txt; [ "$1" = --kill-on-bad-exit=1 ] && shift && exec "$@"'}  # fmt: skip
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "1"}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **job, **path, "SLURM_GPUS_ON_NODE": "2", "OMP_NUM_THREADS": "1"}


def slurm(cluster: dict[str, str], cwd: Path, python: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the job script as SLURM does."""
    assert subprocess.run(["bash", "-n", str(SLURM)], capture_output=True).stderr == b""
    environment = cluster | {"PYTHON": python}
    command = ["bash", str(SLURM), *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)


def test_the_slurm_script_starts_a_launcher_that_meets_at_the_first_machine(
    cluster: dict[str, str], tmp_path: Path
) -> None:
    done = slurm(cluster, tmp_path, "echo", "train_lora.py", "--config_file", "my.toml")
    port = 20000 + os.getpid() % 10000
    assert (done.returncode, done.stderr) == (0, "")
    launcher = "-m torch.distributed.run --nnodes 1 --nproc-per-node 2"
    meeting = f"--rdzv-backend c10d --rdzv-id {os.getpid()} --rdzv-endpoint localhost:{port}"
    assert done.stdout == f"{launcher} {meeting} train_lora.py --config_file my.toml --resume auto\n"


@pytest.mark.slow
def test_the_slurm_script_and_accelerate_launch_train(cluster: dict[str, str], tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    images = write_dataset(tmp_path / "images", text="batch_size = 1")
    settings: dict[str, object] = {"max_train_steps": 2, "dp": 2}
    script = str(ROOT / "train_lora.py")
    launched = slurm(cluster, tmp_path, sys.executable, script, *arguments(base, images, tmp_path / "job", **settings))
    assert launched.returncode == 0, launched.stderr
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", script]
    flags = arguments(base, images, tmp_path / "accelerate", **settings)
    launched = subprocess.run([*command, *flags], env=cluster, cwd=tmp_path, capture_output=True, text=True)
    assert launched.returncode == 0, launched.stderr
    run(base, images, tmp_path / "one", max_train_steps=2, gradient_accumulation_steps=2)
    expected = lora(tmp_path / "one")
    for folder in ("job", "accelerate"):  # gradients of halves are averaged by all-reduce, as in test_launchers
        assert largest_difference(lora(tmp_path / folder), expected) < 2e-4


def test_files_that_the_page_names_are_there() -> None:
    page = (ROOT / "docs" / "distributed.md").read_text()
    named = set(re.findall(r"configs/parallel/\w+\.\w+", page))
    assert named
    assert [path for path in named if not (ROOT / path).is_file()] == []
    assert all(toml.loads(path.read_text()).get("parallel") for path in CONFIGS)
