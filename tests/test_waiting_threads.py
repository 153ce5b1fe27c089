"""Threads that wait for each other spin for a short time only, unless the user has said otherwise."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "passive"}, "0")],
    ids=["ours", "a count", "a policy"],
)
def test_the_runtime_that_torch_brings_spins_for_a_short_time_unless_the_user_says(
    given: dict[str, str], expected: str
) -> None:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    runtimes = list(Path(spec.origin).parent.glob("lib/libgomp*.so*"))
    if not runtimes:
        pytest.skip("this torch brings another runtime than GNU's")
    code = f"import library, ctypes; ctypes.CDLL({str(runtimes[0])!r})"  # it tells its settings as it is loaded
    environment = {key: value for key, value in os.environ.items() if key not in POLICIES}
    environment |= given | {"OMP_DISPLAY_ENV": "VERBOSE"}
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert f"GOMP_SPINCOUNT = '{expected}'" in ended.stderr


@pytest.mark.parametrize(
    "script",
    ["train_lora.py", "train_llm.py", "ui.py", *sorted(f"tools/{tool.name}" for tool in (ROOT / "tools").glob("*.py"))],
)
def test_scripts_import_the_library_before_torch(script: str) -> None:
    before = set[str]()
    for node in ast.parse((ROOT / script).read_text(encoding="utf-8")).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        packages = {name.partition(".")[0] for name in names}
        if "library" in packages:
            break
        before |= packages
    assert before - sys.stdlib_module_names <= {"rich", "uvicorn", "numpy", "PIL"}  # none of them imports torch
