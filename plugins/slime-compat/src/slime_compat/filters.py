"""``dynamic_sampling_filter_path`` and ``rollout_sample_filter_path``, as sample transforms."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from slime_compat.calling import call_here
from slime_compat.check import load_checked
from slime_compat.forms import rollout_forms
from slime_compat.options import PathOptions
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
        self._loaded = load_checked(options, "dynamic_sampling_filter_path", rollout_forms(group_rm=options.group_rm))
        self._args = options.arguments
        self._encoder = options.encoder

    def __call__(self, samples: PromptGroup) -> Transformed:
        """Return the group, kept or dropped with the reason.

        Raises:
            PluginError: the function failed, or returned something else.
        """
        with as_in_slime(samples, self._encoder):
            verdict = call_here(self._loaded, self._args, samples)
        if getattr(verdict, "keep_when_insufficient", False):
            raise PluginError(
                f"{self._loaded.source}: keep_when_insufficient is set, and groups that were dropped are not taken "
                "back here; accepted: False. Fresh prompts are sampled in their place."
            )
        keep = _truth(verdict)
        if keep is None:
            keep = _truth(getattr(verdict, "keep", None))
        if keep is not None:
            return Transformed(samples, dropped=None if keep else _reason(verdict))
        raise PluginError(
            f"{self._loaded.source}: it returned {_shown(verdict)}; accepted: True or False, or an object with keep "
            "(a bool) and reason (a text or None)."
        )


class PathRolloutFilter:
    """The function of --rollout-sample-filter-path: sets remove_sample on samples not to train.

    The function ``(args, groups)`` is called with all groups.
    """

    def __init__(self, options: PathOptions) -> None:
        self._loaded = load_checked(options, "rollout_sample_filter_path", rollout_forms(group_rm=options.group_rm))
        self._args = options.arguments
        self._encoder = options.encoder

    def __call__(self, groups: Sequence[PromptGroup]) -> list[Transformed]:
        """Return the groups; samples that the function removed are counted.

        Raises:
            PluginError: the function failed.
        """
        kept = [list(group) for group in groups]
        before = [_removed(group) for group in kept]
        with as_in_slime([sample for group in groups for sample in group], self._encoder):
            call_here(self._loaded, self._args, list(groups))
        after = [_removed(group) for group in kept]
        return [
            Transformed(group, changed={UNNAMED: now - then} if now > then else {})
            for group, then, now in zip(kept, before, after, strict=True)
        ]


def _truth(value: Any) -> bool | None:
    """Return a bool, or the bool in an array or tensor without axes; None: it is neither."""
    plain = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    return plain if isinstance(plain, bool) else None


def _reason(verdict: Any) -> str:
    """Return the name under which a drop is counted; it becomes part of a metric's name."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", str(getattr(verdict, "reason", None) or "")).strip("_.-") or UNNAMED


def _removed(group: PromptGroup) -> int:
    return sum(sample.remove_sample for sample in group)


def _shown(value: Any) -> str:
    return f"{value!r:.80}"
