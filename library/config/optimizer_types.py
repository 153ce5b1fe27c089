"""The optimizers, a row each: where a class lives, its defaults, and what the rules must know of it by name alone.

``optimizer_type`` is one of these names (ours and kohya's, in any case), any other class of ``torch.optim``, or a
dotted path to a class. The rules judge it by its row, so that a configuration is checked without importing a package;
``library.training.optim.factory`` imports the class. A new optimizer is a row of ``optimizer_types.toml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from library.files import read_toml


@dataclass(frozen=True)
class OptimizerType:
    """One optimizer.

    Attributes:
        module, name: where its class lives.
        defaults: arguments it gets where the user names none.
        splits: for which parts of a weight its step is that part of the whole step: "elements" for any, "rows" where
            all processes step their rows at once (Prodigy's sums go over all of them), "no" for none.
        estimates: the step size ``d`` that it finds by itself: none, one of the run, or one a parameter group.
        averages: whether it trains other weights than it would deploy (schedule-free).
    """

    module: str
    name: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    splits: Literal["no", "rows", "elements"] = "no"
    estimates: Literal["no", "run", "group"] = "no"
    averages: bool = False


_TABLES = read_toml(Path(__file__).with_name("optimizer_types.toml"))[0]
OPTIMIZERS = {name: OptimizerType(**{"name": name} | row) for name, row in _TABLES["optimizers"].items()}
PIP_NAMES: Mapping[str, str] = _TABLES["pip"]
ELEMENTWISE = tuple(name for name, row in OPTIMIZERS.items() if row.splits == "elements")
SHARDABLE = tuple(name for name, row in OPTIMIZERS.items() if row.splits != "no")


def optimizer_named(optimizer_type: str) -> OptimizerType | None:
    """Return the row of a name in any case, or of the class that ends a dotted path, in whichever package."""
    wanted = optimizer_type.rsplit(".", 1)[-1].lower()
    by_class = "." in optimizer_type
    return next((row for name, row in OPTIMIZERS.items() if wanted == (row.name if by_class else name).lower()), None)


def estimates_step_size(optimizer_type: str) -> bool:
    """Return whether the optimizer finds its own step size ``d``, for which ``learning_rate`` is a factor."""
    row = optimizer_named(optimizer_type)
    return row is not None and row.estimates != "no"


def adapts_each_group(optimizer_type: str) -> bool:
    """Return whether the optimizer estimates a step size for each parameter group, so that rates may differ."""
    row = optimizer_named(optimizer_type)
    return row is not None and row.estimates == "group"
