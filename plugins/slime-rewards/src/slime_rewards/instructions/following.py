"""Looks up an instruction of a row, checks its arguments, and applies it to a response."""

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

__all__ = ["KNOWN", "Instruction", "instructions_of", "read_instructions", "variants"]

KNOWN: Mapping[str, Callable[..., bool]] = {**IFEVAL, **COUNTING, **FORMING}
"""Instruction -> its check, for both benchmarks; their names are disjoint."""

IDS, ARGUMENTS = "instruction_id_list", "kwargs"
"""Metadata keys of a row, as in the benchmarks' files."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a prompt.

    Example: ``Instruction("length_constraints:number_words", {"num_words": 100, "relation": "less than"})``.

    Arguments:
        name: name of the instruction.
        arguments: arguments of its check, by name.
    """

    name: str
    arguments: Mapping[str, Any]

    def holds(self, response: str) -> bool:
        """Return whether the response follows the instruction; an empty response follows none.

        Raises:
            DataError: an argument is invalid.
        """
        return bool(response.strip()) and KNOWN[self.name](response, **self.arguments)


def instructions_of(sample: Sample) -> list[Instruction]:
    """Return the instructions of the sample's row, in order; raises as :func:`read_instructions`."""
    return read_instructions(sample.metadata, f"sample {sample.index} of group {sample.group_index}")


def read_instructions(metadata: Mapping[str, Any], where: str) -> list[Instruction]:
    """Return the instructions in the metadata of a row, in order.

    Raises:
        DataError: the row has no instructions, an unknown one, or wrong arguments; the message starts with ``where``.
    """
    names, arguments = metadata.get(IDS), metadata.get(ARGUMENTS)
    if not _is_list(names) or not names:
        raise DataError(
            f"{where}: metadata {IDS} = {names!r}; accepted: a list of instructions, such as "
            "['punctuation:no_comma'].\nName the metadata's field with --metadata-key, or choose another reward model."
        )
    arguments_of_each = [{}] * len(names) if arguments is None else arguments
    if not _is_list(arguments_of_each) or len(arguments_of_each) != len(names):
        raise DataError(
            f"{where}: metadata {ARGUMENTS} = {arguments_of_each!r}; accepted: one table for each of {names}."
        )
    return [_instruction(name, values or {}, where) for name, values in zip(names, arguments_of_each, strict=True)]


def variants(response: str) -> list[str]:
    """Return the response, and variants without text that models often put around an answer.

    Source: Zhou et al. 2023 (2311.07911), section 2.2: without asterisks, without the first line, the last, or both,
    and combinations of these.
    """
    lines = response.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return [text for variant in [response, *cut] for text in (variant, variant.replace("*", ""))]


def _instruction(name: Any, arguments: Any, where: str) -> Instruction:
    if name not in KNOWN:
        raise DataError(f"{where}: instruction {name!r} is not known. Known are {', '.join(sorted(KNOWN))}.")
    # Rows of both benchmarks contain the arguments of all instructions, and null for unused ones.
    values = {key: _whole(value) for key, value in arguments.items() if value is not None}
    parameters = _parameters(name)
    missing, unknown = (
        [parameter for parameter in parameters if parameter not in values],
        [parameter for parameter in values if parameter not in parameters],
    )
    if missing or unknown:
        shown = ", ".join(f"{key} = {value!r}" for key, value in values.items()) or "none"
        raise DataError(
            f"{where}: instruction {name!r} takes {', '.join(parameters) or 'no arguments'}; its row gives {shown}.\n"
            "Correct the row."
        )
    return Instruction(name, values)


@cache
def _parameters(name: str) -> Sequence[str]:
    return list(inspect.signature(KNOWN[name]).parameters)[1:]


def _whole(value: Any) -> Any:
    # A Parquet column with nulls stores integers as floats.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
