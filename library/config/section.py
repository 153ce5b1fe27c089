"""What every section of a configuration is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values are frozen once validated."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def unused(section: Section, keys: tuple[str, ...], condition: bool, reason: str) -> Iterator[str]:
    """Yield a complaint for each of ``keys`` that the user set although ``condition`` leaves it without effect."""
    if condition:
        for key in keys:
            if key in section.model_fields_set:
                yield f"{key}: has no effect {reason}; remove it"


Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
