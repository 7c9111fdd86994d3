"""One instruction of a row, looked up, its arguments checked, and applied to a response."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from slime_core.errors import DataError
from slime_core.types import Sample
from slime_rewards.instructions.counting import COUNTING
from slime_rewards.instructions.forming import FORMING
from slime_rewards.instructions.ifeval import IFEVAL

__all__ = ["KNOWN", "Instruction", "instructions_of", "variants"]

KNOWN: Mapping[str, Callable[..., bool]] = {**IFEVAL, **COUNTING, **FORMING}
"""Instruction -> its check, of both benchmarks; their names differ."""

IDS, ARGUMENTS = "instruction_id_list", "kwargs"
"""Keys of a row's metadata, as the benchmarks' files have them."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a prompt.

    Example: ``Instruction("length_constraints:number_words", {"num_words": 100, "relation": "less than"})``.

    Arguments:
        name: of the kind.
        arguments: of its check, by name.
    """

    name: str
    arguments: Mapping[str, Any]

    def holds(self, response: str) -> bool:
        """Whether the response does it; an empty one does nothing.

        Raises:
            DataError: an argument has no meaning.
        """
        return bool(response.strip()) and KNOWN[self.name](response, **self.arguments)


def instructions_of(sample: Sample) -> list[Instruction]:
    """The instructions of the sample's row, in order.

    Raises:
        DataError: the row has no instructions, names one that is not known, or its arguments do not fit.
    """
    where = f"sample {sample.index} of group {sample.group_index}"
    metadata: Mapping[str, Any] = sample.metadata
    names, arguments = metadata.get(IDS), metadata.get(ARGUMENTS)
    if not _is_list(names) or not names:
        raise DataError(
            f"{where}: metadata {IDS} = {names!r}; accepted is a list of instructions, such as "
            "['punctuation:no_comma'].\nName the metadata's field with --metadata-key, or choose another reward model."
        )
    given = [{}] * len(names) if arguments is None else arguments
    if not _is_list(given) or len(given) != len(names):
        raise DataError(f"{where}: metadata {ARGUMENTS} = {given!r}; accepted is one table for each of {names}.")
    return [_instruction(name, one or {}, where) for name, one in zip(names, given, strict=True)]


def variants(response: str) -> list[str]:
    """The response as it is, and without what models put around an answer.

    Source: Zhou et al. 2023 (2311.07911), section 2.2: without asterisks, without its first line, its last, or both,
    and all of these together.
    """
    lines = response.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return [text for one in [response, *cut] for text in (one, one.replace("*", ""))]


def _instruction(name: Any, arguments: Any, where: str) -> Instruction:
    if name not in KNOWN:
        raise DataError(f"{where}: instruction {name!r} is not known. Known are {', '.join(sorted(KNOWN))}.")
    # Both benchmarks give every row the arguments of all kinds, null where a kind has none of that name.
    given = {key: _whole(value) for key, value in arguments.items() if value is not None}
    taken = _parameters(name)
    missing, unknown = [one for one in taken if one not in given], [one for one in given if one not in taken]
    if missing or unknown:
        found = ", ".join(f"{key} = {value!r}" for key, value in given.items()) or "none"
        raise DataError(
            f"{where}: instruction {name!r} takes {', '.join(taken) or 'no arguments'}; its row gives {found}.\n"
            "Correct the row."
        )
    return Instruction(name, given)


@cache
def _parameters(name: str) -> Sequence[str]:
    return list(inspect.signature(KNOWN[name]).parameters)[1:]


def _whole(value: Any) -> Any:
    # A Parquet column with nulls holds its whole numbers as floats.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
