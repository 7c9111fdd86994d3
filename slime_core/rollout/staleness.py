"""How old a sample is when it is trained, and what becomes of one that is too old.

Version v of the weights is what v trained rollouts have made. A token that version v drew and rollout r trains is
r - v rollouts *stale*: the weights that are trained are those of version r, whether they were published or not. A
sample is as stale as its oldest token.

What becomes of a group with a sample over the bound is one of three: its prompt goes back to the data source
(``requeue``), it is left out for good (``evict``), or it is trained, because the run corrects for who drew it
(``correct``). Each is counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from slime_core.config.schema import RunConfig
from slime_core.errors import RunError
from slime_core.types import PromptGroup, Sample

__all__ = ["StaleSamples", "Staleness", "oldest_version", "stale_weights_error", "token_versions", "version_number"]

StaleSamples = Literal["requeue", "correct", "evict"]

COUNTED = {"requeue": "requeued", "evict": "evicted", "correct": "corrected"}
"""What becomes of stale samples -> the metric that counts them."""

UNKNOWN = -1


def version_number(version: str) -> int:
    """Of a published version, which counts training steps from 0; -1: weights that no run has published."""
    return int(version) if version.isdecimal() else UNKNOWN


def oldest_version(sample: Sample) -> int | None:
    """The oldest version that drew a token of ``sample``; None: none is recorded, or it is no number."""
    versions = [int(version) for version in sample.weight_versions if version.isdecimal()]
    return min(versions, default=None)


def token_versions(sample: Sample) -> NDArray[np.int64]:
    """int64 [response length]: the version that drew each token; -1: no engine drew it, or which is not known.

    A sample that names one version for its whole response needs no spans.
    """
    versions_T = np.full(sample.response_length, UNKNOWN, np.int64)
    spans = sample.weight_spans
    if not spans and len(sample.weight_versions) == 1:
        spans = [(sample.weight_versions[0], 0, sample.response_length)]
    for version, start, end in spans:
        versions_T[start:end] = version_number(version)
    return versions_T


def stale_weights_error(samples: Sequence[Sample], *, rollout: int) -> RunError:
    """What ends a run whose engines go on drawing ``samples`` with weights that are too old."""
    versions = ", ".join(sorted({version for sample in samples for version in sample.weight_versions}))
    return RunError(
        f"rollout {rollout}: {len(samples)} samples were older than max_staleness, and so were those in their place; "
        f"versions {versions} of the weights drew them. Do all engines serve the version that was published last? "
        "Raise --max-staleness, or see to it that publications reach every engine."
    )


@dataclass(frozen=True, slots=True)
class Staleness:
    """The bound of a run.

    Arguments:
        bound: largest staleness in trained rollouts; None: there is no bound.
        stale: what becomes of groups above it.
        measured: ``rollout/staleness/...`` is always reported; without, only where a sample is in fact older than the
            weights that it trains, as a trajectory that somebody else wrote.
    """

    bound: int | None = None
    stale: StaleSamples = "requeue"
    measured: bool = True

    @staticmethod
    def of(config: RunConfig) -> Staleness:
        """What the settings of a run say."""
        rollout = config.rollout
        ahead = rollout.async_buffer_size > 0 or config.weights.update_weights_interval != 1
        keeps = rollout.over_sampling_batch_size is not None or rollout.partial_rollout
        measured = ahead or keeps or rollout.max_staleness is not None
        return Staleness(rollout.max_staleness, rollout.stale_samples, measured)

    def split(self, groups: Sequence[PromptGroup], *, rollout: int) -> tuple[list[PromptGroup], list[PromptGroup]]:
        """The groups that ``rollout`` may train, and those that it may not."""
        over = [self.refuses(group, rollout=rollout) for group in groups]
        may = [group for group, is_over in zip(groups, over, strict=True) if not is_over]
        return may, [group for group, is_over in zip(groups, over, strict=True) if is_over]

    def metrics(self, trained: Sequence[Sample], *, rollout: int, left_out: int) -> dict[str, float]:
        """How stale the samples of a rollout are.

        Arguments:
            trained: those that are trained on.
            left_out: samples that were too old and are not.
        """
        ages = [rollout - oldest for oldest in map(oldest_version, trained) if oldest is not None]
        if not self.measured and max(ages, default=0) <= 0:
            return {}
        found: dict[str, float] = {}
        if ages:
            found = {"rollout/staleness/mean": statistics.fmean(ages), "rollout/staleness/max": float(max(ages))}
        if self.bound is not None:
            corrected = sum(age > self.bound for age in ages)
            counts = {"requeue": left_out, "evict": left_out, "correct": corrected}
            found[f"rollout/staleness/{COUNTED[self.stale]}"] = float(counts[self.stale])
        return found

    def refuses(self, group: PromptGroup, *, rollout: int) -> bool:
        """Whether ``rollout`` may not train ``group``, because of tokens that it has."""
        if self.bound is None or self.stale == "correct":
            return False
        ages = [rollout - oldest for oldest in map(oldest_version, group) if oldest is not None]
        return max(ages, default=0) > self.bound
