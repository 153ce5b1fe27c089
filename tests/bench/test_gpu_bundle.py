"""Does requirements/gpu.txt name what bench/gpu.py imports besides torch, transformers, accelerate and peft?"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]

# Every way in which the jobs differ in what they import: formats, trainers, compilation, counting, runs, layouts.
RUN_SOME_CASES = """
import importlib.metadata, json, sys
import torch
import bench.gpu as gpu
names = ["flux, bf16", "flux, row", "qwen_image, bf16, compiled, graph", "flux, bf16, diffusers + peft"]
names.append("seam, trained on fp8")
jobs = [job for part in gpu.parts(tiny=True) for job in part.jobs if job.name in names]
assert len(jobs) == len(names)
rows = [row for job in jobs for row in job.rows(*job.arguments, torch.device("cpu"))]
errors = [row["error"] for row in rows if "error" in row and "cannot" not in row["error"]]
modules = {name.partition(".")[0] for name in sys.modules}
inside = {d.name for d in importlib.metadata.distributions() if "_vendor" in str(d.locate_file(""))}  # of setuptools
owners = {name: set(found) - inside for name, found in importlib.metadata.packages_distributions().items()}
print(json.dumps([errors, sorted({owner for name in modules for owner in owners.get(name, [])})]))
"""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def with_their_needs(names: list[str]) -> set[str]:
    """Every package that ``names`` pull in, but for typer's: of that command line older releases need less."""
    found: set[str] = set()
    waiting = [canonical(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        needs = map(Requirement, [] if name == "typer" else metadata.requires(name) or [])
        waiting += [canonical(n.name) for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]
    return found


def pins(name: str) -> dict[str, str]:
    """The lines of a file of requirements: package -> version, "" where none is given."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    rows = (line.partition("==") for line in lines if line and line[0] not in "#-")
    return {canonical(package): version for package, _, version in rows}


@pytest.mark.slow
def test_the_bundle_is_what_the_gpu_benchmark_imports(tmp_path: Path) -> None:
    there = with_their_needs(["torch", "transformers", "accelerate", "peft"])
    bundled = set(pins("requirements/gpu.txt"))
    for name in there | bundled:  # a folder of packages in which there is nothing else
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or [] if file.parts[0] != ".."}:
            if not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(str(distribution.locate_file(top)))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-S", "-c", RUN_SOME_CASES]  # -S: without this environment's packages
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    errors, imported = json.loads(done.stdout.splitlines()[-1])
    assert errors == []
    assert {canonical(name) for name in imported} - there == bundled


def test_the_bundle_has_the_versions_that_were_tested_together() -> None:
    constraints, required = pins("constraints.txt"), pins("requirements.txt")
    for name in pins("requirements/gpu.txt"):
        assert constraints[name] == required.get(name, constraints[name]), name
