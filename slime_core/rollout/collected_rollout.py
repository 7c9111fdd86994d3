"""The groups of one rollout: kept groups, groups that are left out and why, and the number of missing groups.

    Staleness          the bound on the age of samples, and the treatment of groups above it
    CollectedRollout   receives the groups of a rollout from a group source

A group is *aborted* (its requests were cancelled; it is requeued), *lost* (none of its samples can be trained on),
*stale* (too old to be trained; another group replaces it), *dropped* (a sample transform left it out; another prompt
replaces it) or *kept*.

Version v of the weights is the result of v trained rollouts. A token sampled by version v and trained in rollout r is
r - v rollouts *stale*: rollout r trains version r, whether that was published or not. A sample is as stale as its
oldest token. A group with a sample above the bound is requeued (``requeue``), left out (``evict``), or trained, because
the run corrects for the difference (``correct``). Each is counted.

Transforms that see one group run when the group arrives. The first transform that sees the whole rollout, and all
after it, run over all groups that were not dropped, and again from the same input when groups were replaced.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.contracts import DataSource, Transformed
from slime_core.errors import RunError
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.generation.sampling import is_finished
from slime_core.rollout.components import SamplerComponents
from slime_core.rollout.group_generator import GroupGenerator
from slime_core.rollout.reward_scoring import part_metrics
from slime_core.rollout.transforms import REASON, Transforms
from slime_core.track.ledger import FAILED_GROUP, REQUEUED, STALE
from slime_core.types import PromptGroup, Sample, Status, equal_rewards, reaches

SURPLUS = "surplus"
"""Reason for dropping a group: accepted, but the batch is already full. Transforms that see the whole rollout decide
again when groups were replaced, and may then keep more than the batch needs."""

UNNAMED = "other"
"""Cause of a failure without a name."""

REMOVED = "left_out"
"""Reason in the samples file for a sample that a transform removed from a group that it kept."""


StaleSamples = Literal["requeue", "correct", "evict"]

COUNTED = {"requeue": "requeued", "evict": "evicted", "correct": "corrected"}
"""Treatment of stale samples -> the metric that counts them."""


def oldest_version(sample: Sample) -> int | None:
    """Return the oldest version that sampled a token of ``sample``, or None if no version is recorded as a number."""
    versions = [int(version) for version in sample.weight_versions if version.isdecimal()]
    return min(versions, default=None)


def stale_weights_error(samples: Sequence[Sample], *, rollout: int) -> RunError:
    """Return the error for a run whose engines keep sampling with weights that are too old."""
    versions = ", ".join(sorted({version for sample in samples for version in sample.weight_versions}))
    return RunError(
        f"rollout {rollout}: {len(samples)} samples and their replacements were older than max_staleness; versions "
        f"{versions} of the weights sampled them. Raise --max-staleness, or check that publications reach every engine."
    )


@dataclass(frozen=True, slots=True)
class Staleness:
    """The bound of a run.

    Arguments:
        bound: largest staleness in trained rollouts. None: there is no bound.
        stale: treatment of groups above it.
        measured: always report ``rollout/staleness/...``; False: only if a sample is older than the weights that it
            trains, as a trajectory from a file can be.
    """

    bound: int | None = None
    stale: StaleSamples = "requeue"
    measured: bool = True

    @staticmethod
    def of(config: RunConfig) -> Staleness:
        """Return the bound of a run."""
        rollout = config.rollout
        ahead = rollout.async_buffer_size > 0 or config.weights.update_weights_interval != 1
        requeues = rollout.over_sampling_batch_size is not None or rollout.partial_rollout
        measured = ahead or requeues or rollout.max_staleness is not None
        return Staleness(rollout.max_staleness, rollout.stale_samples, measured)

    def metrics(self, trained: Sequence[Sample], *, rollout: int, num_untrained: int) -> dict[str, float]:
        """Return the staleness of the ``trained`` samples of a rollout.

        Arguments:
            num_untrained: number of samples that were too old to be trained.
        """
        ages = [rollout - oldest for oldest in map(oldest_version, trained) if oldest is not None]
        if not self.measured and max(ages, default=0) <= 0:
            return {}
        metrics = mean_and_max("rollout/staleness", ages)
        if self.bound is not None:
            corrected = sum(age > self.bound for age in ages)
            counts = {"requeue": num_untrained, "evict": num_untrained, "correct": corrected}
            metrics[f"rollout/staleness/{COUNTED[self.stale]}"] = float(counts[self.stale])
        return metrics

    def refuses(self, group: PromptGroup, *, rollout: int) -> bool:
        """Return whether the tokens of ``group`` are too old for ``rollout``."""
        if self.bound is None or self.stale == "correct":
            return False
        ages = [rollout - oldest for oldest in map(oldest_version, group) if oldest is not None]
        return max(ages, default=0) > self.bound


@dataclass(slots=True)
class _Candidate:
    """A group that the transforms of single groups have kept.

    Arguments:
        trainable: its samples before any transform.
        early: the result of these transforms.
        late: the result of the transforms that see the rollout; ``early`` until they have run.
    """

    trainable: PromptGroup
    early: Transformed
    late: Transformed

    @property
    def samples(self) -> PromptGroup:
        """The samples after the last transform that did not drop the group."""
        return (self.late if self.late.dropped is None else self.early).samples

    @property
    def changes(self) -> Counter[str]:
        """Reason -> number of samples that a transform changed for it."""
        return Counter(self.early.changed) + Counter(self.late.changed)


class CollectedRollout:
    """Implements :class:`slime_core.contracts.RolloutBatch`.

    Example: ``wanted`` is 8 groups, and transforms drop 3 of the first 8: ``missing`` is 3 until 3 more were kept.

    Arguments:
        rollout: its number.
        settings: ``rollout_batch_size``, ``reward_key`` and ``failed_samples`` are read.
        transforms: decide which groups are kept.
        staleness: the run's bound.
        prompts: receives groups that are too old if ``--stale-samples`` is ``requeue``.
        components: supply the arguments of generate functions to a rollout source.
        generator: scores samples without a reward. None: all samples have one.

    Attributes:
        received: every group, in order of arrival.
        lost: samples that were aborted or failed, and the siblings of aborted ones.
    """

    def __init__(
        self,
        rollout: int,
        settings: RolloutConfig,
        *,
        transforms: Transforms,
        staleness: Staleness,
        prompts: DataSource,
        components: SamplerComponents,
        generator: GroupGenerator | None,
    ) -> None:
        self.rollout = rollout
        self.wanted = settings.rollout_batch_size
        self.prompts = prompts
        self._key = settings.reward_key
        self._drops_failed_groups = settings.failed_samples == "drop_group"
        self._transforms = transforms
        self._staleness = staleness
        self._components = components
        self._generator = generator
        self._rewarded: list[Sample] = []
        self._rewards: list[list[float]] = []
        self._raw: list[float] = []
        self.lost: list[Sample] = []
        self._candidates: list[_Candidate] = []
        self._dropped: list[tuple[str, PromptGroup]] = []
        self._num_lost = 0
        self._stale: list[tuple[str, Sample]] = []
        self.received: list[PromptGroup] = []
        self.aborted: list[PromptGroup] = []
        self.refills = 0

    def generation(self, sample: Sample) -> tuple[GenerateContext, SamplingParams]:
        """Return the arguments of the generate function for ``sample`` and its group.

        Raises:
            DataError: the sample's row requests sampling that does not exist or cannot be trained on.
        """
        return self._components.generation(self.rollout, sample)

    async def add(self, groups: Sequence[PromptGroup]) -> None:
        """Score samples without a reward, then :meth:`receive` the groups."""
        if self._generator is not None:
            await self._generator.reward_missing(groups)
        self.receive(groups)

    def receive(self, groups: Sequence[PromptGroup]) -> int:
        """Sort finished, rewarded groups into trainable and stale ones; return the number of stale groups."""
        fresh: list[PromptGroup] = []
        stale: list[PromptGroup] = []
        for group in groups:
            (stale if self._staleness.refuses(group, rollout=self.rollout) else fresh).append(group)
        if self._staleness.stale == "requeue":
            self.prompts.put_back(stale)
        mark = STALE if self._staleness.stale == "evict" else REQUEUED
        self._stale += [(mark, sample) for group in stale for sample in group]
        self.received += stale
        self.take(fresh)
        return len(stale)

    def take(self, groups: Sequence[PromptGroup]) -> None:
        """Receive finished, rewarded groups.

        Raises:
            PluginError: a transform failed or broke its contract.
        """
        self.received += groups
        for group in groups:
            rewarded = [sample for sample in group if sample.reward is not None]
            self._rewarded += rewarded
            self._rewards.append([sample.reward_value(self._key) for sample in rewarded])
            self._take(group)
        if self._transforms:
            late = self._transforms.late([candidate.early.samples for candidate in self._candidates])
            for candidate, result in zip(self._candidates, late, strict=True):
                candidate.late = result

    def _take(self, group: PromptGroup) -> None:
        if any(sample.status is Status.ABORTED for sample in group):
            self.aborted.append(group)
            self.lost += group
            return
        trainable = [sample for sample in group if is_finished(sample)]
        self.lost += [sample for sample in group if not is_finished(sample)]
        self._raw += [sample.reward_value(self._key) for sample in trainable]
        if not trainable:
            self._num_lost += 1
            return
        if self._drops_failed_groups and len(trainable) < len(group):
            self._dropped.append((FAILED_GROUP, trainable))
            return
        samples = list(trainable)
        result = self._transforms.early(samples) if self._transforms else Transformed(samples)
        if result.dropped is not None:
            self._dropped.append((result.dropped, trainable))
        else:
            # If a transform that sees the rollout fails, these samples are still written to disk.
            self._candidates.append(_Candidate(trainable, result, Transformed(result.samples)))

    @property
    def missing(self) -> int:
        """Number of groups that still have to be kept; aborted and lost groups are not replaced."""
        return max(0, self._room - len(self._accepted()))

    @property
    def kept(self) -> list[PromptGroup]:
        """The trained groups, after all transforms, in order of arrival."""
        return [candidate.late.samples for candidate in self._accepted()[: self._room]]

    @property
    def trained(self) -> list[Sample]:
        """The samples of the kept groups, a new list."""
        return [sample for group in self.kept for sample in group]

    @property
    def written(self) -> list[Sample]:
        """Samples that no transform dropped: first the trained samples, then those that were aborted or failed."""
        return [*self.trained, *self.lost]

    @property
    def stale(self) -> list[Sample]:
        """Samples that are not trained on because their group was too old."""
        return [sample for _, sample in self._stale]

    @property
    def samples(self) -> list[Sample]:
        """All generated samples, after the transforms."""
        return [*self.written, *(sample for _, sample in self.dropped)]

    @property
    def dropped(self) -> list[tuple[str, Sample]]:
        """Every sample that a transform dropped, or that was too old, with the reason."""
        dropped = [(reason, sample) for reason, group in self._dropped_groups() for sample in group]
        removed = [
            (REMOVED, sample)
            for candidate in self._candidates
            for sample in _removed(candidate.trainable, candidate.samples)
        ]
        return dropped + removed + self._stale

    @property
    def num_dropped(self) -> Counter[str]:
        """Reason -> number of groups that were dropped for it."""
        return Counter(reason for reason, _ in self._dropped_groups())

    def solved(self, threshold: float) -> list[list[bool]]:
        """Return for each group whether each of its generations reaches ``threshold``, before any transform; siblings
        of one fan-out count once, as in evaluations."""
        return solved_generations(self._rewarded, list(chain.from_iterable(self._rewards)), threshold)

    def shortage(self, rounds: int) -> str:
        """Return why the rollout is not full after ``rounds`` rounds of replacements, and the next step."""
        dropped = self.num_dropped
        counts = ", ".join(f"{reason} {count}" for reason, count in dropped.most_common())
        num_stale = len({sample.group_index for sample in self.stale})
        old = f"; {num_stale} were older than max_staleness" if num_stale else ""
        return (
            f"{len(self.kept)} of {self.wanted} groups are kept after {rounds} rounds of other prompts "
            f"(rollout_max_refills); sample transforms dropped {dropped.total()}: {counts}{old}. Use other prompts or "
            "--sample-transforms, raise --rollout-max-refills, or set it to 0 to train on the groups that are kept."
        )

    def warnings(self) -> list[str]:
        """Return warnings about samples that were aborted or failed."""
        lost = [sample for sample in self.lost if not is_finished(sample)]
        if not lost:
            return []
        return [f"{len(lost)} of {len(self.samples)} samples are not trained on: {describe_failures(lost)}"]

    def metrics(self, trained: Sequence[Sample]) -> dict[str, float]:
        """Return the rewards of all generated samples before any transform, the lengths of ``trained``, which has at
        least one sample, and the counts of the transforms."""
        changed: Counter[str] = sum((candidate.changes for candidate in self._accepted()[: self._room]), Counter())
        rewards = [values for values in self._rewards if values]
        return {
            **_lengths(trained, self.samples),
            **{f"rollout/failures/{cause}": float(count) for cause, count in self._failures().items()},
            "rollout/raw_reward": statistics.fmean(self._raw),
            "rollout/zero_std_groups": statistics.fmean(float(equal_rewards(values)) for values in rewards),
            **{f"rollout/dropped/{reason}": float(count) for reason, count in self.num_dropped.items()},
            **{f"rollout/changed/{reason}": float(count) for reason, count in changed.items()},
            **({"rollout/refills": float(self.refills)} if self._transforms else {}),
            **part_metrics(self.samples, "rollout/reward_parts"),
        }

    def _failures(self) -> Counter[str]:
        """Return cause -> number of samples that failed for it; a cause that cannot be part of a name is ``other``."""
        failed = [sample.failure_cause or "" for sample in self.lost if sample.status is Status.FAILED]
        return Counter(cause if REASON.fullmatch(cause) else UNNAMED for cause in failed)

    @property
    def _room(self) -> int:
        return self.wanted - len(self.aborted) - self._num_lost

    def _accepted(self) -> list[_Candidate]:
        """Return the groups that every transform kept."""
        return [candidate for candidate in self._candidates if candidate.late.dropped is None]

    def _dropped_groups(self) -> list[tuple[str, PromptGroup]]:
        results = [(candidate.late.dropped, candidate.early.samples) for candidate in self._candidates]
        late = [(reason, samples) for reason, samples in results if reason is not None]
        surplus = [(SURPLUS, candidate.late.samples) for candidate in self._accepted()[self._room :]]
        return [*self._dropped, *late, *surplus]


def solved_generations(samples: Sequence[Sample], rewards: Sequence[float], threshold: float) -> list[list[bool]]:
    """Return for each prompt whether each of its generations solves it. Siblings of one fan-out are one generation,
    which solves the prompt if a sibling does; a sample without a group counts as a separate prompt."""
    prompts: dict[object, dict[object, bool]] = defaultdict(dict)
    for place, (sample, reward) in enumerate(zip(samples, rewards, strict=True)):
        group = ("alone", place) if sample.group_index is None else sample.group_index
        alone = ("sample", place) if sample.index is None else sample.index
        generation = alone if sample.rollout_id is None else ("rollout", sample.rollout_id)
        generations = prompts[group]
        generations[generation] = generations.get(generation, False) or reaches(reward, threshold)
    return [list(generations.values()) for generations in prompts.values()]


def describe_failures(samples: Sequence[Sample]) -> str:
    """Return up to three reasons why ``samples`` have no reward."""
    reasons = {sample.error or f"status {sample.status}, reward {sample.reward}" for sample in samples}
    return "; ".join(sorted(reasons)[:3])


def _lengths(trained: Sequence[Sample], samples: Sequence[Sample]) -> dict[str, float]:
    lengths = [sample.response_length for sample in trained]
    seconds = [sample.non_generation_time for sample in samples]
    return {
        **mean_and_max("rollout/response_len", lengths),
        "rollout/truncated_ratio": statistics.fmean(float(sample.status is Status.TRUNCATED) for sample in samples),
        "rollout/failed_ratio": statistics.fmean(float(not is_finished(sample)) for sample in samples),
        **(mean_and_max("perf/non_generation_time", seconds) if any(seconds) else {}),
        "rollout/tokens": float(sum(len(sample.tokens) for sample in trained)),
        "rollout/response_tokens": float(sum(lengths)),
    }


def mean_and_max(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the metrics ``name/mean`` and ``name/max``; empty without values."""
    return {f"{name}/mean": statistics.fmean(values), f"{name}/max": float(max(values))} if values else {}


def _removed(before: Sequence[Sample], after: Sequence[Sample]) -> list[Sample]:
    counts = Counter(sample.index for sample in after)
    removed = []
    for sample in before:
        counts[sample.index] -= 1
        if counts[sample.index] < 0:
            removed.append(sample)
    return removed
