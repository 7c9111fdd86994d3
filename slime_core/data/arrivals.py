"""Trajectories that somebody else wrote, to be trained: JSON Lines of samples, looked at and never unpickled.

    {"group_index": 3, "prompt": "2+2=", "tokens": [7, 15, 7, 4, 9, 1], "response_length": 2, "response": "4",
     "reward": 1.0, "status": "completed", "rollout_log_probs": [-0.1, -0.02]}

A line is :meth:`~slime_core.types.Sample.to_dict` of one sample, or as much of it as there is; ``tokens``,
``response_length``, ``status`` and ``rollout_log_probs`` have to be there. Lines that stand together with one
``group_index`` are a group. A file is read once: one that is named, or each ``.jsonl`` file of a folder, by name, as it
appears. Move files in whole; names that begin with a dot are passed over.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import NoneType
from typing import Any

from slime_core.config.mistakes import nearest
from slime_core.data.left_out import BAD, tell
from slime_core.data.raw import Raw
from slime_core.data.rows import content_of
from slime_core.data.tables import Joined, LineTable
from slime_core.errors import DataError
from slime_core.plugins.contracts import PromptRequest
from slime_core.types import LogProbs, Mask, PromptGroup, Sample, Status, TokenIds

__all__ = ["GIVEN", "Arrivals", "screen_arrivals"]

MOST_BYTES = 32 * 2**20
"""Looked through before anything starts; what lies behind is read when it is taken."""

GIVEN = "given"
"""Key of a sample's ``train_metadata``: status and reward of the response that it has already."""

FINISHED = (Status.COMPLETED, Status.TRUNCATED)


class Arrivals:
    """The groups of a file, or of the files that appear in a folder.

    Arguments:
        request: ``request.buffer.data`` names it; None: nothing arrives.
    """

    def __init__(self, request: PromptRequest) -> None:
        self._request, self._read = request, list[str]()
        self._groups = 0

    def take(self) -> list[PromptGroup]:
        """The groups of all files that were not read before.

        Raises:
            DataError: a line is no finished sample; with ``skips_bad`` its group is left out and counted.
        """
        path = self._request.buffer.data
        new = [file for file in ([] if path is None else _files(path)) if file.name not in self._read]
        found = [group for file in new for group in self._of_file(file)]
        self._read += [file.name for file in new]
        return found

    def state(self) -> dict[str, Any]:
        """Which files were read, and how many groups they held."""
        return {"files": list(self._read), "groups": self._groups}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken."""
        self._read, self._groups = list(state["files"]), state["groups"]

    def _of_file(self, file: Path) -> list[PromptGroup]:
        table = LineTable(file)
        rows = [raw for raw in table.read(0, table.total()) if not raw.is_blank]
        groups = []
        for _, lines in groupby(enumerate(rows), key=lambda row: _group_of(*row)):
            try:
                groups.append(self._numbered([(raw, _sample(raw)) for _, raw in lines]))
            except DataError:
                if not self._request.skips_bad:
                    raise
                tell(self._request, BAD, 1)
        return groups

    def _numbered(self, lines: Sequence[tuple[Raw, Sample]]) -> PromptGroup:
        """The group under numbers of its own: below 0, since those from 0 on are of the prompts."""
        size, group = self._request.n_samples_per_prompt, [sample for _, sample in lines]
        if len(group) != size:
            raise DataError(
                f"{lines[0][0].place}: group {group[0].group_index} has {len(group)} samples, and "
                f"n_samples_per_prompt = {size}; accepted: groups of that size, their lines together"
            )
        self._groups += 1
        first = -self._groups * size
        return [replace(one, group_index=-self._groups, index=first + place) for place, one in enumerate(group)]


def screen_arrivals(path: Path, *, most_bytes: int = MOST_BYTES) -> None:
    """Returns if nothing wrong was found in the lines that are there already, whole groups apart.

    Raises:
        DataError: a line is no finished sample; names file and line.
    """
    for file in _files(path):
        for raw in Joined([LineTable(file)]).read(0):
            if most_bytes <= 0:
                return
            most_bytes -= len(raw.content)
            if not raw.is_blank:
                _sample(raw)


def _files(path: Path) -> list[Path]:
    found = [path] if path.is_file() else sorted(path.glob("*.jsonl"))
    return [file for file in found if not file.name.startswith(".")]


def _group_of(number: int, raw: Raw) -> Any:
    """What lines of one group have in common; a line that cannot be read stands alone."""
    try:
        return content_of(raw).get("group_index")
    except DataError:
        return ("line", number)


def _sample(raw: Raw) -> Sample:
    values = content_of(raw)
    for wrong in _mistyped(values):
        raise DataError(f"{raw.place}: {wrong}")
    try:
        sample = Sample.from_dict(values)
    except (TypeError, ValueError) as problem:
        raise DataError(f"{raw.place}: not a sample: {problem}") from None
    for wrong in _mistakes(sample):
        raise DataError(f"{raw.place}: {wrong}")
    sample.tokens, sample.rollout_log_probs = TokenIds(sample.tokens), LogProbs(sample.rollout_log_probs or ())
    sample.loss_mask = None if sample.loss_mask is None else Mask(sample.loss_mask)
    sample.train_metadata = {**(sample.train_metadata or {}), GIVEN: [sample.status.value, sample.reward]}
    # Until its turn comes: what is pending keeps what the data source gave it.
    sample.status = Status.PENDING
    return sample


KINDS: dict[str, tuple[type, ...]] = {
    "tokens": (list,),
    "prompt": (str, list),
    "response": (str,),
    "label": (str, NoneType),
    "metadata": (dict,),
    "train_metadata": (dict, NoneType),
    "weight_versions": (list,),
    "remove_sample": (bool,),
}
"""Fields that have no rule of their own below, and what JSON may hold for them."""

WORDS = {list: "a list", str: "text", dict: "an object", bool: "true or false", NoneType: "null"}


def _mistyped(values: Mapping[str, Any]) -> list[str]:
    unknown = [name for name in values if name not in Sample.__dataclass_fields__]
    wrong = [name for name in values if name in KINDS and not isinstance(values[name], KINDS[name])]
    return [
        *(f"no such field {name}{nearest(name, Sample.__dataclass_fields__)}" for name in unknown),
        *(f"{name} is {values[name]!r}; accepted: {' or '.join(WORDS[one] for one in KINDS[name])}" for name in wrong),
    ]


def _mistakes(sample: Sample) -> list[str]:
    length, tokens = sample.response_length, sample.tokens
    checks = {
        f"status is {sample.status}; accepted: completed or truncated": sample.status in FINISHED,
        "tokens are not a list of whole numbers from 0 on": _are(tokens, int, lambda one: 0 <= one < 2**31),
        f"response_length is {length!r} of {len(tokens)} tokens; accepted: at least 1, with a prompt before it": (
            type(length) is int and 0 < length < len(tokens)
        ),
        f"rollout_log_probs are not {length} numbers, one a response token": (
            _are(sample.rollout_log_probs, float | int, _is_finite) and len(sample.rollout_log_probs or ()) == length
        ),
        f"loss_mask is not {length} times 0 or 1": sample.loss_mask is None
        or (_are(sample.loss_mask, int, lambda one: one in (0, 1)) and len(sample.loss_mask) == length),
        f"reward is {sample.reward!r}; accepted: a finite number, or named ones": _is_reward(sample.reward),
    }
    return [message for message, holds in checks.items() if not holds]


def _are(values: Any, kind: Any, accepted: Any) -> bool:
    whole = isinstance(values, Sequence) and not isinstance(values, str)
    return whole and all(isinstance(one, kind) and not isinstance(one, bool) and accepted(one) for one in values)


def _is_reward(reward: Any) -> bool:
    values = list(reward.values()) if isinstance(reward, dict) else [reward]
    return reward is None or _are(values, float | int, _is_finite)


def _is_finite(number: float) -> bool:
    """Of a float64; a whole number of JSON may be too large for one."""
    return abs(number) <= sys.float_info.max
