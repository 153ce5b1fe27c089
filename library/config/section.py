"""What every section of a configuration is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, values are frozen once validated."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
