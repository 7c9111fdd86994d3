"""Numbers and texts within bounds, as settings use them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

__all__ = ["All", "Count", "CountOrZero", "Fraction", "Name", "Positive", "PositiveOrZero", "Refusal", "Share"]

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
PositiveOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
All = Annotated[int, Field(ge=-1, le=-1)]
Refusal = Annotated[int, Field(ge=400, le=499)]
Share = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(min_length=1)]
