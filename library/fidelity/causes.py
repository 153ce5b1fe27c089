"""What can be wrong with a deployment, what helps, and one that was found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from library.files import read_toml

_TABLES = read_toml(Path(__file__).with_name("causes.toml"))[0]
CAUSES: dict[str, str] = {cause: row["title"] for cause, row in _TABLES.items()}
REMEDIES: dict[str, str] = {cause: row["remedy"] for cause, row in _TABLES.items()}


@dataclass(frozen=True)
class Finding:
    """A cause that was found.

    Attributes:
        cause: key of ``CAUSES``. share: of the squared error, as far as causes add up.
        layers: that show it; empty where it is not about layers.
        evidence: the numbers that speak for it, in words.
    """

    cause: str
    share: float
    layers: tuple[str, ...]
    evidence: str

    def sentence(self) -> str:
        """Return cause, evidence and remedy in words."""
        remedy = REMEDIES[self.cause]
        return f"{CAUSES[self.cause]}: {self.evidence}. {remedy[0].upper()}{remedy[1:]}."

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"title": CAUSES[self.cause], "remedy": REMEDIES[self.cause]}
