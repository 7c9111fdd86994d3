"""Scores labels against themselves before a run. If a perfect response to a label gets less than full marks, no answer
of the model can be rewarded.

``perfect_response`` of a reward model returns that response (:class:`~slime_core.CheckedRewardModel`). Responses are
scored in a process with limits, because a label may hang its reward model. Of a long file, evenly spaced labels are
scored.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from slime_core.components.construction import load, run_view
from slime_core.config.schema import RunConfig
from slime_core.contracts import PromptRow
from slime_core.errors import DataError
from slime_core.plugins.registration import Kind
from slime_core.rollout.reward_pool import RewardPool
from slime_core.rollout.reward_worker import RewardPoolSettings
from slime_core.rollout.row_checks import RowRewards
from slime_core.types import REWARD_KEY, Reward, RewardFailure, Sample, Status

if TYPE_CHECKING:
    from slime_core.plugins.manifest import Manifest
    from slime_core.plugins.registry import Registry

__all__ = ["LabelSamples", "check_labels"]

MOST_LABELS = 300
"""Maximum labels of a file to score, which takes ``math`` about a second."""

LABEL_LIMIT_S = 3.0
"""Time limit for scoring a label, in seconds. It takes milliseconds unless it hangs."""

LIMIT_S = 10.0
"""Seconds after which no further labels are scored."""

TOO_SLOW = "takes more than"
"""Start of the mistake of a label that reached the limit."""

MOST_SHOWN = 3
"""Labels that a message shows."""

MOST_LETTERS = 40
"""Characters of a label that a message shows."""

FULL_MARKS = 1.0 - 1e-6
"""Reward of a correct answer, with a margin because sums are rounded."""


@dataclass(frozen=True, slots=True)
class _Label:
    """A label and the part of a sum of rewards that scores it.

    Example: ``_Label("4.5e33", "math", None)``.
    """

    text: str
    reward_model: str
    key: str | None


@dataclass(slots=True)
class LabelSamples:
    """Labels of prompt files: path -> file and line -> the row's label, once for each reward model that scores it."""

    of_files: dict[Path, dict[str, list[_Label]]] = field(default_factory=dict)

    def add(self, path: Path, rows: Sequence[PromptRow], rewards: RowRewards, reward_key: str | None) -> None:
        """Add labels of ``rows``, evenly spaced.

        Arguments:
            reward_key: name of the number that counts, unless a row names another.
        """
        labels = self.of_files.setdefault(path, {})
        for row in rows[:: -(-len(rows) // MOST_LABELS) or 1]:
            key = row.metadata.get(REWARD_KEY) or reward_key
            terms = rewards.terms(row.metadata) if row.label is not None else ()
            labels[row.place] = [
                _Label(str(row.label), term.name, term.key or (None if key is None else str(key))) for term in terms
            ]


def check_labels(
    labels: LabelSamples,
    config: RunConfig,
    registry: Registry,
    manifest: Manifest,
    *,
    options: Mapping[str, Any],
    warn: Callable[[str], None],
) -> None:
    """Warn of labels that do not get full marks when they are scored against themselves.

    Arguments:
        options: plugin -> the options of its components.

    Raises:
        DataError: no label of a file gets full marks.
        PluginError: the scoring process cannot load the plugins.
    """
    rows = [row for of_file in labels.of_files.values() for row in of_file.values()]
    targets = {
        label.reward_model: load(registry, Kind.REWARD_MODEL, label.reward_model) for row in rows for label in row
    }
    respond = {name: target.perfect_response for name, target in targets.items() if hasattr(target, "perfect_response")}
    if not respond:
        return
    mistakes = asyncio.run(_score(_in_turns(labels, respond), respond, _settings(config, manifest, options)))
    for path, of_file in labels.of_files.items():
        scorable = {place: [label for label in row if label.reward_model in respond] for place, row in of_file.items()}
        _report(path, {place: row for place, row in scorable.items() if row}, mistakes, warn)


def _in_turns(labels: LabelSamples, respond: Mapping[str, object]) -> list[_Label]:
    """Return the distinct labels, of all files in turns, because the time may not suffice for all."""
    turns = zip_longest(*(of_file.values() for of_file in labels.of_files.values()), fillvalue=())
    distinct = dict.fromkeys(label for turn in turns for row in turn for label in row)
    return [label for label in distinct if label.reward_model in respond]


def _settings(config: RunConfig, manifest: Manifest, options: Mapping[str, Any]) -> RewardPoolSettings:
    rollout = config.rollout
    return RewardPoolSettings(
        manifest.to_json(),
        options,
        run_view(config, options),
        num_workers=1,
        timeout_s=rollout.reward_timeout_s,
        memory_gib=rollout.reward_memory_gib,
    )


async def _score(
    labels: Sequence[_Label], respond: Mapping[str, Callable[[str], str]], settings: RewardPoolSettings
) -> dict[_Label, str]:
    """Return label -> why it gets less than full marks, or an empty text. Labels beyond the time limit are missing."""
    mistakes: dict[_Label, str] = {}
    async with AsyncExitStack() as stack:
        pool, spent_s = None, 0.0
        for label in labels:
            if spent_s > LIMIT_S:
                break
            if pool is None:
                pool = RewardPool(settings)
                stack.push_async_callback(pool.close)
                for name in respond:  # import the libraries before the time limit of a label starts
                    await pool.score(name, [_sample("1", "1")], together=True)
            start_s = time.monotonic()
            try:
                async with asyncio.timeout(LABEL_LIMIT_S):
                    mistakes[label] = await _mistake(label, respond[label.reward_model], pool)
            except TimeoutError:
                mistakes[label] = f"{TOO_SLOW} {LABEL_LIMIT_S:g} s of {label.reward_model}"
                await pool.close()
                pool = None
            spent_s += time.monotonic() - start_s
    return mistakes


async def _mistake(label: _Label, respond: Callable[[str], str], pool: RewardPool) -> str:
    sample = _sample(label.text, respond(label.text))
    (answer,) = await pool.score(label.reward_model, [sample], together=True)
    if isinstance(answer, RewardFailure):
        return f"gets nothing from {label.reward_model} ({answer.error:.200})"
    reward = _number(answer, label.key)
    return "" if reward >= FULL_MARKS else f"gets {reward:g} from {label.reward_model}"


def _number(reward: Reward, key: str | None) -> float:
    if not isinstance(reward, dict):
        return reward
    return reward[key] if key in reward else min(reward.values())


def _sample(label: str, response: str) -> Sample:
    return Sample(group_index=0, index=0, label=label, response=response, status=Status.COMPLETED)


def _report(
    path: Path, rows: Mapping[str, Sequence[_Label]], mistakes: Mapping[_Label, str], warn: Callable[[str], None]
) -> None:
    """Warn of the labels of one file without full marks; raise DataError if none has them."""
    scored = {place: row for place, row in rows.items() if all(label in mistakes for label in row)}
    shortfalls = [
        f"{place.removeprefix(f'{path}, ')}: {shorten(label.text, MOST_LETTERS, placeholder='...')!r} {mistakes[label]}"
        for place, row in scored.items()
        for label in row
        if mistakes[label]
    ]
    count = sum(any(mistakes[label] for label in row) for row in scored.values())
    if not count:
        return
    more = f"; and {len(shortfalls) - MOST_SHOWN} more" if len(shortfalls) > MOST_SHOWN else ""
    shown = f"{'; '.join(shortfalls[:MOST_SHOWN])}{more}"
    is_slow = any(mistakes[label].startswith(TOO_SLOW) for row in scored.values() for label in row)
    if count == len(rows) and not is_slow:  # a busy machine is not a reason to refuse the run
        raise DataError(
            f"{path}: none of the {count} labels scored gets full marks against itself ({shown}). Name another field "
            "with --label-key, or another reward model with --rm-type"
        )
    warn(
        f"{path}: {count} of {len(scored)} labels scored get less than full marks against themselves, so no answer to "
        f"these rows is rewarded in full: {shown}"
    )
