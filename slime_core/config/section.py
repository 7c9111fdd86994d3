"""Base classes of every group of settings (frozen, compared by value, unknown names refused) and bounded number types.

Importing this module raises a PluginError if an installed distribution has unreadable metadata, because pydantic reads
the metadata of all distributions.
"""

from __future__ import annotations

from collections import Counter
from importlib import metadata
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError

from slime_core.errors import PluginError


def _require_readable_distributions() -> None:
    """Make a model: for the first one pydantic reads the entry points of all distributions, and so does torch."""
    try:
        create_model("First")
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        for distribution in metadata.distributions():
            try:
                _ = distribution.entry_points
            except (OSError, ValueError, TypeError, AttributeError, LookupError) as problem:
                raise PluginError(
                    f"a distribution in {distribution.locate_file('')} cannot be read "
                    f"({type(problem).__name__}: {problem}), and pydantic and torch read all. "
                    "Reinstall it, or remove it; slime plugins list still works"
                ) from problem
        raise


_require_readable_distributions()

REJECTED = "rejected"
"""Type of a pydantic error whose message is complete: what was found, and what is accepted."""


def rejected(text: str) -> PydanticCustomError:
    """Make the error of a validator; ``text`` says what was found and what is accepted."""
    return PydanticCustomError(REJECTED, "{text}", {"text": text})


Value = bool | int | float | str | tuple[int | float | str, ...]
"""Types of the value of an engine's flag."""


class Section(BaseModel):
    """A frozen group of settings; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class PluginOptions(Section):
    """The settings of a plugin; docstrings under attributes are their help.

    Example::

        class LengthOptions(PluginOptions):
            limit: Annotated[int, Field(gt=0), Flag("--length-limit"), UsedBy("length")] = 100
            \"\"\"Tokens up to which a response costs nothing.\"\"\"

    Without ``Flag`` the flag is ``--PLUGIN.limit``; in files the setting is in ``[PLUGIN]``.
    """


class EngineSection(Section):
    """Settings under the names of an engine; holds those that were given, since the engine has defaults for the others.

    Example: ``given = (("recompute_granularity", "full"),)``.
    """

    given: tuple[tuple[str, Value], ...] = ()
    """Pairs of a name and its value, sorted by name."""


LARGEST = 2**53
"""Largest whole number: readers of JSON disagree beyond it, and no count, size or seed is as large."""


def _of_a_size(number: int) -> int:
    if number > LARGEST:
        raise rejected(f"found a number of more than 15 digits; accepted: at most {LARGEST}")
    return number


PositiveInt = Annotated[int, Field(ge=1), AfterValidator(_of_a_size)]
NonNegativeInt = Annotated[int, Field(ge=0), AfterValidator(_of_a_size)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]
MinusOne = Annotated[int, Field(ge=-1, le=-1)]
FractionAboveZero = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(min_length=1)]


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise rejected(f"found {', '.join(twice)} more than once; accepted: each name once")
    return names


Distinct = AfterValidator(_distinct)
"""In the annotation of a tuple of names: refuses a name that is given twice."""
