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
    """Create a model, for which pydantic reads the entry points of all distributions, as torch does."""
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
"""Type of a pydantic error whose message has the value and the accepted ones."""


def rejected(text: str) -> PydanticCustomError:
    """Return the error of a validator; ``text`` has the value and the accepted ones."""
    return PydanticCustomError(REJECTED, "{text}", {"text": text})


Value = bool | int | float | str | tuple[int | float | str, ...]
"""Types of the value of an engine's flag."""


class Section(BaseModel):
    """A frozen group of settings that refuses unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class PluginOptions(Section):
    """The settings of a plugin. Docstrings under attributes are their help.

    Example::

        class LengthOptions(PluginOptions):
            limit: Annotated[int, Field(gt=0), Flag("--length-limit"), UsedBy("length")] = 100
            \"\"\"Tokens that cost nothing.\"\"\"

    Without ``Flag`` the flag is ``--PLUGIN.limit``; in files the setting is in ``[PLUGIN]``.
    """


class EngineSection(Section):
    """Flags of an engine that the run sets; the engine has defaults for the others.

    Example: ``given = (("recompute_granularity", "full"),)``.
    """

    given: tuple[tuple[str, Value], ...] = ()
    """Pairs of a name and its value, sorted by name."""


LARGEST = 2**53
"""Largest whole number. Readers of JSON disagree beyond it, and no count, size or seed is as large."""


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
"""Annotation of a tuple of names that refuses repeated names."""
