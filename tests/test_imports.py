"""No import circle between our files: imports within functions count, and those for type checkers, and importlib's."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from library.config.model_types import MODEL_TYPES
from library.config.optimizer_types import OPTIMIZERS

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ("train_lora", "train_llm", "ui")
FAMILIES = {row.family.partition(":")[0] for row in MODEL_TYPES.values() if row.family}
# file that calls importlib -> our modules that it can import so; their names stand in tables
BY_NAME = {
    "library.models.family_by_name": FAMILIES,
    "library.precision.files.int8": set(),  # other programs' alone, here and in the next
    "library.training.memory.dry_run": set(),
    "library.training.optim.factory": {row.module for row in OPTIMIZERS.values()},
}


def modules() -> dict[str, Path]:
    files = [ROOT / f"{script}.py" for script in SCRIPTS]
    for package in ("library", "networks", "tools", "dev", "bench", "walkthrough"):
        files += (ROOT / package).rglob("*.py")
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(file: Path, at_start: bool = False) -> set[str]:
    """Return the names that ``file`` imports anywhere, or ``at_start``: when it is itself imported."""
    found = set()
    tree = tree_of(file)
    for node in tree.body if at_start else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_file_imports_itself_through_others() -> None:
    files = modules()
    found = {name: imports(file) for name, file in files.items()}
    graph = {name: (own | BY_NAME.get(name, set())) & files.keys() - {name} for name, own in found.items()}
    assert circle(graph) == []
    assert files.keys() >= BY_NAME.keys() | FAMILIES


def test_who_imports_by_a_computed_name_is_known() -> None:
    calling = set()
    for name, file in modules().items():
        tree = tree_of(file)
        names = (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in ast.walk(tree))
        calling |= {name} if {"import_module", "__import__"} & {*names} else set()
    assert calling == BY_NAME.keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("def f():\n    from a.b import c\n", {"a.b", "a.b.c"}), ("if TYPE_CHECKING:\n    import a.b as x\n", {"a.b"})],
)
def test_imports_are_found_wherever_they_stand(text: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(text)
    assert imports(tmp_path / "x.py") == expected
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []


def test_a_language_models_run_starts_without_what_images_need() -> None:
    """diffusers and peft take as long to import as everything else that such a run imports."""
    files = modules()
    found, waiting = (
        set(),
        ["library.training.trainer", *(f"library.training.tasks.{task}" for task in ("chat_lora", "pretraining"))],
    )
    while waiting:
        name = waiting.pop()
        own = imports(files[name], at_start=True) - found if name in files else set()
        found |= own
        waiting += own
    assert "torch" in found
    assert not {name for name in found if name.split(".")[0] in ("diffusers", "peft")}
