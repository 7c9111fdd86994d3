"""``dynamic_sampling_filter_path`` and ``rollout_sample_filter_path``, as sample transforms."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from slime_compat.calling import scalar
from slime_compat.paths import PathOptions
from slime_compat.views import as_in_slime
from slime_core import Transformed
from slime_core.errors import PluginError
from slime_core.types import PromptGroup

__all__ = ["PathGroupFilter", "PathRolloutFilter"]

UNNAMED = "filtered"
"""The reason that is counted if a filter gives none."""


class PathGroupFilter:
    """The function of --dynamic-sampling-filter-path: keeps or drops a finished group.

    The function ``(args, samples)`` returns a bool, or an object with ``keep`` and ``reason``.
    """

    def __init__(self, options: PathOptions) -> None:
        self._function = options.function("dynamic_sampling_filter_path")
        self._args = options.arguments
        self._encoder = options.encoder

    def __call__(self, samples: PromptGroup) -> Transformed:
        """Return the group, kept or dropped with the reason.

        Raises:
            PluginError: the function failed, or returned something else.
        """
        with as_in_slime(samples, self._encoder):
            verdict = self._function(self._args, samples)
        if getattr(verdict, "keep_when_insufficient", False):
            raise PluginError(
                f"{self._function}: keep_when_insufficient is set, and groups that were dropped are not taken "
                "back here; accepted: False. Fresh prompts are sampled instead."
            )
        keep = _truth(verdict)
        if keep is None:
            keep = _truth(getattr(verdict, "keep", None))
        if keep is not None:
            return Transformed(samples, dropped=None if keep else _reason(verdict))
        raise self._function.refused(
            verdict, "True or False, or an object with keep (a bool) and reason (a text or None)"
        )


class PathRolloutFilter:
    """The function of --rollout-sample-filter-path: sets remove_sample on samples not to train.

    The function ``(args, groups)`` is called with all groups.
    """

    def __init__(self, options: PathOptions) -> None:
        self._function = options.function("rollout_sample_filter_path")
        self._args = options.arguments
        self._encoder = options.encoder

    def __call__(self, groups: Sequence[PromptGroup]) -> list[Transformed]:
        """Return the groups; samples that the function removed are counted.

        Raises:
            PluginError: the function failed.
        """
        unfiltered = [list(group) for group in groups]
        before = [_removed(group) for group in unfiltered]
        with as_in_slime([sample for group in groups for sample in group], self._encoder):
            self._function(self._args, list(groups))
        after = [_removed(group) for group in unfiltered]
        return [
            Transformed(group, changed={UNNAMED: now - then} if now > then else {})
            for group, then, now in zip(unfiltered, before, after, strict=True)
        ]


def _truth(value: Any) -> bool | None:
    """Return a bool, or the bool in an array or tensor without axes; None if it is neither."""
    plain = scalar(value)
    return plain if isinstance(plain, bool) else None


def _reason(verdict: Any) -> str:
    """Return the name under which a drop is counted; it becomes part of a metric's name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", str(getattr(verdict, "reason", None) or "")).strip("_.-") or UNNAMED


def _removed(group: PromptGroup) -> int:
    return sum(sample.remove_sample for sample in group)
