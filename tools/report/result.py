"""result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.report.causes import Attribution, Verdict
from tools.report.differences import Differences
from tools.report.layers import LayerRow
from tools.report.runs import Outcome, Probe


@dataclass(frozen=True)
class Report:
    """All that was measured.

    Attributes:
        title: what was compared. settings: name -> value, for the reader and the JSON.
        full: the deployment. attributions: its causes. layers: in the model's order.
        reference, deployed: their outcomes, for the pictures.
    """

    title: str
    settings: Mapping[str, str]
    verdict: Verdict
    full: Differences
    attributions: Sequence[Attribution]
    layers: Sequence[LayerRow]
    reference: Outcome
    deployed: Outcome
    probe: Probe


@dataclass(frozen=True)
class Fix:
    """A fix that was tried.

    Attributes:
        name: one of the module's list. cost: in words. seconds: that finding it took. files: that it left.
        figures, outcome: of the deployment with it.
    """

    name: str
    cost: str
    seconds: float
    files: tuple[Path, ...]
    figures: Differences
    outcome: Outcome

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        files = [str(path) for path in self.files]
        return {"name": self.name, "cost": self.cost, "seconds": self.seconds, "files": files,
                "figures": self.figures.as_json()}  # fmt: skip
