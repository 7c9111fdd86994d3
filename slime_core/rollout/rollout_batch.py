"""The groups of one rollout: which are kept, which are left out and why, and how many are missing.

    Staleness      the bound on the age of samples, and what happens to groups above it
    RolloutBatch   the groups of a rollout as a group source adds them

A group is *aborted* (its requests were cancelled; it is requeued), *lost* (none of its samples can be trained on),
*stale* (too old to be trained; another group replaces it), *dropped* (a sample transform left it out; another prompt
replaces it) or *kept*.

Version v of the weights is the result of v trained rollouts. A token sampled by version v and trained in rollout r is
r - v rollouts *stale*: rollout r trains version r, whether that was published or not. A sample is as stale as its
oldest token. A group with a sample above the bound is requeued (``requeue``), left out (``evict``), or trained, because
the run corrects for the difference (``correct``). Each is counted.

Transforms that see one group run when the group arrives, once a group. From the first transform that sees the whole
rollout on, transforms run over all groups that are left, and again from the same input when groups were replaced.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import RunConfig
from slime_core.contracts import DataSource, Transformed
from slime_core.errors import RunError
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.generation.sampling import is_finished
from slime_core.rollout.components import REASON, Transforms
from slime_core.rollout.group_generator import GroupGenerator
from slime_core.rollout.reward_scoring import part_metrics
from slime_core.rollout.sampler_components import SamplerComponents
from slime_core.track.ledger import FAILED_GROUP, REQUEUED, STALE
from slime_core.types import PromptGroup, Sample, Status, equal_rewards, reaches

SURPLUS = "surplus"
"""Reason for dropping a group: accepted, but the batch is already full. Transforms that see the whole rollout decide
again when groups were replaced, and may then keep more than the batch needs."""

UNNAMED = "other"
"""Cause of a failure without a name."""

LEFT_OUT = "left_out"
"""Reason in the samples file for a sample that a transform removed from a group that it kept."""


StaleSamples = Literal["requeue", "correct", "evict"]

COUNTED = {"requeue": "requeued", "evict": "evicted", "correct": "corrected"}
"""Treatment of stale samples -> the metric that counts them."""


def oldest_version(sample: Sample) -> int | None:
    """The oldest version that sampled a token of ``sample``; None: no version is recorded, or it is not a number."""
    versions = [int(version) for version in sample.weight_versions if version.isdecimal()]
    return min(versions, default=None)


def stale_weights_error(samples: Sequence[Sample], *, rollout: int) -> RunError:
    """The error for a run whose engines keep sampling with weights that are too old."""
    versions = ", ".join(sorted({version for sample in samples for version in sample.weight_versions}))
    return RunError(
        f"rollout {rollout}: {len(samples)} samples were older than max_staleness, and so were those in their place; "
        f"versions {versions} of the weights sampled them. Do all engines serve the version that was published last? "
        "Raise --max-staleness, or see to it that publications reach every engine."
    )


@dataclass(frozen=True, slots=True)
class Staleness:
    """The bound of a run.

    Arguments:
        bound: largest staleness in trained rollouts; None: there is no bound.
        stale: what becomes of groups above it.
        measured: ``rollout/staleness/...`` is always reported; without, only where a sample is in fact older than the
            weights that it trains, as a trajectory from a file can be.
    """

    bound: int | None = None
    stale: StaleSamples = "requeue"
    measured: bool = True

    @staticmethod
    def of(config: RunConfig) -> Staleness:
        """The bound that the settings of a run describe."""
        rollout = config.rollout
        ahead = rollout.async_buffer_size > 0 or config.weights.update_weights_interval != 1
        keeps = rollout.over_sampling_batch_size is not None or rollout.partial_rollout
        measured = ahead or keeps or rollout.max_staleness is not None
        return Staleness(rollout.max_staleness, rollout.stale_samples, measured)

    def metrics(self, trained: Sequence[Sample], *, rollout: int, left_out: int) -> dict[str, float]:
        """The staleness of the samples of a rollout.

        Arguments:
            trained: those that are trained on.
            left_out: samples that were too old and are not.
        """
        ages = [rollout - oldest for oldest in map(oldest_version, trained) if oldest is not None]
        if not self.measured and max(ages, default=0) <= 0:
            return {}
        found = mean_and_max("rollout/staleness", ages)
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


@dataclass(slots=True)
class _Passed:
    """A group that the transforms which see one group have kept.

    Arguments:
        given: its trainable samples, before any transform.
        early: the result of these transforms.
        late: the result of the transforms that see the rollout; ``early`` until they have run.
    """

    given: PromptGroup
    early: Transformed
    late: Transformed

    @property
    def left(self) -> PromptGroup:
        """Samples of a group that is kept, or that a whole-rollout transform dropped."""
        return (self.late if self.late.dropped is None else self.early).samples

    @property
    def changes(self) -> Counter[str]:
        """Reason -> samples that a transform changed for it."""
        return Counter(self.early.changed) + Counter(self.late.changed)


class RolloutBatch:
    """The groups of one rollout, round by round; implements :class:`slime_core.contracts.RolloutBatch`.

    Example: ``wanted`` is 8 groups, and transforms drop 3 of the first 8: ``missing`` is 3 until 3 more were kept.

    Arguments:
        rollout: its number.
        settings: how many groups are wanted, which of several rewards trains, what a failed sample does to its group.
        transforms: decide which groups are kept.
        staleness: the run's bound.
        prompts: receives groups that are too old, where ``--stale-samples`` is ``requeue``.
        components: what a rollout source generates with.
        collector: scores samples without a reward; None: all samples have one.

    Attributes:
        received: every group that was taken, in the order of their coming.
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
        collector: GroupGenerator | None,
    ) -> None:
        self.rollout = rollout
        self.wanted = settings.rollout_batch_size
        self.prompts = prompts
        self._key = settings.reward_key
        self._drops_failed_groups = settings.failed_samples == "drop_group"
        self._transforms = transforms
        self._staleness = staleness
        self._components = components
        self._collector = collector
        self._rewarded: list[Sample] = []
        self._rewards: list[list[float]] = []
        self._raw: list[float] = []
        self.lost: list[Sample] = []
        self._passed: list[_Passed] = []
        self._dropped: list[tuple[str, PromptGroup]] = []
        self._num_lost = 0
        self._stale: list[tuple[str, Sample]] = []
        self.received: list[PromptGroup] = []
        self.aborted: list[PromptGroup] = []
        self.refills = 0

    def generation(self, sample: Sample) -> tuple[GenerateContext, SamplingParams]:
        """The arguments of the generate function for ``sample`` and its group.

        Raises:
            DataError: the sample's row requests sampling that does not exist or cannot be trained on.
        """
        return self._components.generation(self.rollout, sample)

    async def add(self, groups: Sequence[PromptGroup]) -> None:
        """Score samples without a reward, then :meth:`receive` the groups."""
        if self._collector is not None:
            await self._collector.reward_missing(groups)
        self.receive(groups)

    def receive(self, groups: Sequence[PromptGroup]) -> int:
        """Sort finished, rewarded groups into trainable and stale ones; returns how many are stale."""
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
        late = self._transforms.late([one.early.samples for one in self._passed])
        for one, decided in zip(self._passed, late, strict=True):
            one.late = decided

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
        result = self._transforms.early(list(trainable))
        if result.dropped is not None:
            self._dropped.append((result.dropped, trainable))
        else:
            # Where a transform that sees the rollout fails, what is here is still written down.
            self._passed.append(_Passed(trainable, result, Transformed(result.samples)))

    @property
    def missing(self) -> int:
        """Groups that still have to be kept; aborted and lost ones are not replaced."""
        return max(0, self._room - len(self._standing()))

    @property
    def kept(self) -> list[PromptGroup]:
        """The trained groups: those that all transforms kept, as the transforms left them, in the order of arrival."""
        return [one.late.samples for one in self._standing()[: self._room]]

    @property
    def trained(self) -> list[Sample]:
        """The samples of the groups that are kept, a new list."""
        return [sample for group in self.kept for sample in group]

    @property
    def written(self) -> list[Sample]:
        """Samples that no transform dropped: those that are trained on, then those that were aborted or failed."""
        return [*self.trained, *self.lost]

    @property
    def stale(self) -> list[Sample]:
        """Samples that are not trained on because their group was too old."""
        return [sample for _, sample in self._stale]

    @property
    def samples(self) -> list[Sample]:
        """Everything that was generated, as the transforms left it."""
        return [*self.written, *(sample for _, sample in self.dropped)]

    @property
    def dropped(self) -> list[tuple[str, Sample]]:
        """Every sample that was left out by a transform, or for its age, with the reason."""
        whole = [(reason, sample) for reason, group in self._dropped_groups() for sample in group]
        parts = [(LEFT_OUT, sample) for one in self._passed for sample in _gone(one.given, one.left)]
        return whole + parts + self._stale

    @property
    def num_dropped(self) -> Counter[str]:
        """Reason -> groups that were dropped for it."""
        return Counter(reason for reason, _ in self._dropped_groups())

    def solved(self, threshold: float) -> list[list[bool]]:
        """For each group, which of its generations reach ``threshold``, before any transform; siblings of one fan-out
        count once, as in evaluations."""
        return solved_generations(self._rewarded, [one for rewards in self._rewards for one in rewards], threshold)

    def shortage(self, rounds: int) -> str:
        """Why the rollout is not full after so many rounds of replacements, and what to do."""
        dropped = self.num_dropped
        counts = ", ".join(f"{reason} {count}" for reason, count in dropped.most_common())
        num_stale = len({sample.group_index for sample in self.stale})
        old = f"; {num_stale} were older than max_staleness" if num_stale else ""
        return (
            f"{len(self.kept)} of {self.wanted} groups are kept after {rounds} rounds of other prompts "
            f"(rollout_max_refills); sample transforms dropped {dropped.total()}: {counts}{old}. Take other "
            "prompts or other --sample-transforms, raise --rollout-max-refills, or give 0 to train on what is kept."
        )

    def warnings(self) -> list[str]:
        """Warnings about samples that were aborted or failed."""
        lost = [sample for sample in self.lost if not is_finished(sample)]
        if not lost:
            return []
        return [f"{len(lost)} of {len(self.samples)} samples are not trained on: {describe_failures(lost)}"]

    def metrics(self, trained: Sequence[Sample]) -> dict[str, float]:
        """The rewards of everything that was generated, before any transform; the lengths of ``trained``, which has at
        least one sample; and what the transforms did."""
        changed: Counter[str] = sum((one.changes for one in self._standing()[: self._room]), Counter())
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
        """Cause -> samples that failed for it; what a plugin calls it is used where it can be part of a name."""
        failed = [sample.failure_cause or "" for sample in self.lost if sample.status is Status.FAILED]
        return Counter(cause if REASON.fullmatch(cause) else UNNAMED for cause in failed)

    @property
    def _room(self) -> int:
        return self.wanted - len(self.aborted) - self._num_lost

    def _standing(self) -> list[_Passed]:
        """The groups that every transform kept."""
        return [one for one in self._passed if one.late.dropped is None]

    def _dropped_groups(self) -> list[tuple[str, PromptGroup]]:
        late = [(one.late.dropped, one.early.samples) for one in self._passed if one.late.dropped is not None]
        surplus = [(SURPLUS, one.late.samples) for one in self._standing()[self._room :]]
        return [*self._dropped, *late, *surplus]


def solved_generations(samples: Sequence[Sample], rewards: Sequence[float], threshold: float) -> list[list[bool]]:
    """For each prompt, which of its generations solve it. Siblings of one fan-out are one generation, which solves the
    prompt if one of them does; a sample without a group is a prompt of its own."""
    prompts: dict[object, dict[object, bool]] = defaultdict(dict)
    for place, (sample, reward) in enumerate(zip(samples, rewards, strict=True)):
        group = ("alone", place) if sample.group_index is None else sample.group_index
        alone = ("sample", place) if sample.index is None else sample.index
        generation = alone if sample.rollout_id is None else ("rollout", sample.rollout_id)
        found = prompts[group]
        found[generation] = found.get(generation, False) or reaches(reward, threshold)
    return [list(found.values()) for found in prompts.values()]


def describe_failures(samples: Sequence[Sample]) -> str:
    """Up to three reasons why ``samples`` have no reward."""
    found = {sample.error or f"status {sample.status}, reward {sample.reward}" for sample in samples}
    return "; ".join(sorted(found)[:3])


def _lengths(trained: Sequence[Sample], samples: Sequence[Sample]) -> dict[str, float]:
    lengths = [sample.response_length for sample in trained]
    seconds = [sample.non_generation_time for sample in samples]
    return {
        **mean_and_max("rollout/response_len", lengths),
        "rollout/truncated_ratio": statistics.fmean(float(one.status is Status.TRUNCATED) for one in samples),
        "rollout/failed_ratio": statistics.fmean(float(not is_finished(one)) for one in samples),
        **(mean_and_max("perf/non_generation_time", seconds) if any(seconds) else {}),
        "rollout/tokens": float(sum(len(sample.tokens) for sample in trained)),
        "rollout/response_tokens": float(sum(lengths)),
    }


def mean_and_max(name: str, values: Sequence[float]) -> dict[str, float]:
    """The metrics ``name/mean`` and ``name/max``; none without values."""
    return {f"{name}/mean": statistics.fmean(values), f"{name}/max": float(max(values))} if values else {}


def _gone(before: Sequence[Sample], after: Sequence[Sample]) -> list[Sample]:
    left = Counter(sample.index for sample in after)
    gone = []
    for sample in before:
        left[sample.index] -= 1
        if left[sample.index] < 0:
            gone.append(sample)
    return gone
