"""Groups that were generated before: how old their tokens are, and how they are requeued, resumed and saved.

    Staleness        the bound on the age of samples, and what happens to groups above it
    prepare_group    resumes the aborted samples of a group where the generate function can, and resets the others
    dump_group, dump_prompts, load_group   a group as JSON text, for checkpoints
    RequeueBuffer    the data source of the run, preceded by aborted groups that are resumed

Version v of the weights is the result of v trained rollouts. A token sampled by version v and trained in rollout r is
r - v rollouts *stale*: rollout r trains version r, whether that was published or not. A sample is as stale as its
oldest token. A group with a sample above the bound is requeued (``requeue``), left out (``evict``), or trained, because
the run corrects for the difference (``correct``). Each is counted.

Tokens that were sampled before an abort keep their log-probabilities and the versions of the weights that sampled them;
``mask_offpolicy_in_partial_rollout`` decides whether they are trained.
"""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from itertools import compress
from operator import attrgetter
from typing import Any, Literal, cast

from slime_core.config.schema import RunConfig
from slime_core.errors import RunError
from slime_core.generation.sampling import is_finished
from slime_core.plugins.contracts import DataSource
from slime_core.rollout.components import RoutedComponent
from slime_core.track.ledger import Journal
from slime_core.types import LogProbs, Mask, PromptGroup, Sample, Status, TokenIds

StaleSamples = Literal["requeue", "correct", "evict"]

COUNTED = {"requeue": "requeued", "evict": "evicted", "correct": "corrected"}
"""Treatment of stale samples -> the metric that counts them."""

UNKNOWN = -1


def version_number(version: str) -> int:
    """The number of a published version, which counts training steps from 0; -1: weights that no run has published."""
    return int(version) if version.isdecimal() else UNKNOWN


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

    def split(self, groups: Sequence[PromptGroup], *, rollout: int) -> tuple[list[PromptGroup], list[PromptGroup]]:
        """The groups that ``rollout`` may train, and those that it may not."""
        over = [self.refuses(group, rollout=rollout) for group in groups]
        may = [group for group, is_over in zip(groups, over, strict=True) if not is_over]
        return may, [group for group, is_over in zip(groups, over, strict=True) if is_over]

    def metrics(self, trained: Sequence[Sample], *, rollout: int, left_out: int) -> dict[str, float]:
        """The staleness of the samples of a rollout.

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


ARRAYS = {
    "tokens": TokenIds,
    "rollout_log_probs": LogProbs,
    "loss_mask": Mask,
    "rollout_top_p_token_ids": TokenIds,
    "rollout_top_p_token_offsets": TokenIds,
}
"""Fields of a sample that are lists in JSON."""


FIELDS = attrgetter(*(one.name for one in fields(Sample)))
"""From a sample to the values of its fields, in the order of its arguments."""

FIXED = frozenset({type(None), bool, int, float, str, Status})
"""Types of values that nothing can change, so that no copy is needed."""


def copy_sample(sample: Sample) -> Sample:
    """A copy of ``sample`` and its containers, which a generate function may change in place without changing it."""
    return Sample(*[value if type(value) in FIXED else copy.copy(value) for value in FIELDS(sample)])


def dump_group(samples: PromptGroup, version: int) -> str | None:
    """A finished group as JSON, with the oldest version of its weights; None: JSON cannot represent a value of it."""
    try:
        return json.dumps({"version": version, "samples": [sample.to_dict() for sample in samples]})
    except (TypeError, ValueError):
        return None


def dump_prompts(given: PromptGroup, version: int) -> str:
    """A group as its source gave it, without values that JSON cannot represent; its number identifies the prompt."""
    rows = [{name: value for name, value in one.to_dict().items() if _is_json(value)} for one in given]
    return json.dumps({"version": version, "samples": rows})


def load_group(text: str) -> tuple[int, PromptGroup]:
    """The oldest version of the weights that sampled a token of the group, and its samples."""
    found = json.loads(text)
    samples = [Sample.from_dict(values) for values in found["samples"]]
    for sample in samples:
        for name, kind in ARRAYS.items():
            if getattr(sample, name) is not None:
                setattr(sample, name, kind(getattr(sample, name)))
    return oldest_group_version(samples, found["version"]), samples


def oldest_group_version(samples: PromptGroup, served: int) -> int:
    """The oldest version that sampled, or will sample, a token of a group that starts while ``served`` is served."""
    return min([served, *(oldest for oldest in map(oldest_version, samples) if oldest is not None)])


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


GENERATED = (
    *("tokens", "response", "response_length", "reward", "loss_mask", "status", "weight_versions", "weight_spans"),
    *("rollout_log_probs", "rollout_routed_experts", "multimodal_train_inputs", "remove_sample"),
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
    *("non_generation_time", "spec_info", "error", "failure_cause"),
)
"""Fields of a sample that generating and rewarding set."""


def reset_sample(sample: Sample) -> None:
    """Remove the response and the reward of an earlier attempt.

    A pending sample keeps what its data source gave it; only its reward is removed.
    """
    fresh = Sample()
    for name in GENERATED if sample.status is not Status.PENDING else ("reward",):
        setattr(sample, name, getattr(fresh, name))


def prepare_group(group: PromptGroup, generator: RoutedComponent, reward: RoutedComponent, *, resumes: bool) -> None:
    """Make ``group`` ready for its generate function.

    Arguments:
        resumes: aborted responses continue (``partial_rollout``), where ``generator`` can. Finished samples of the
            group keep their response, and their reward unless ``reward`` compares the samples of a group.

    One generation may have returned several samples of one ``rollout_id``. If one of them cannot stay, a single sample
    replaces them all, because the restarted generation returns all of them again. ``group`` is changed in place.
    """
    was_aborted = resumes and any(sample.status is Status.ABORTED for sample in group)
    stay = [was_aborted and _stays(sample, generator) for sample in group]
    gone = [one for one, stays in zip(group, stay, strict=True) if not stays and one.status is not Status.PENDING]
    again = {one.rollout_id for one in gone} - {None}
    stay = [stays and one.rollout_id not in again for one, stays in zip(group, stay, strict=True)]
    for sample, stays in zip(group, stay, strict=True):
        if not stays:
            reset_sample(sample)
        elif reward.takes_groups:
            sample.reward = None
    group[:] = _keep_first_of(group, again)


def _keep_first_of(group: PromptGroup, generations: set[int | None]) -> list[Sample]:
    """``group`` with only the first sample of each of ``generations``."""
    kept, seen = [], set()
    for sample in group:
        if sample.rollout_id not in generations:
            kept.append(sample)
        elif sample.rollout_id not in seen:
            seen.add(sample.rollout_id)
            sample.rollout_id = None
            kept.append(sample)
    return kept


def _stays(sample: Sample, generator: RoutedComponent) -> bool:
    if is_finished(sample):
        return generator.resumes or not generator.takes_groups
    return generator.resumes and sample.status is Status.ABORTED and sample.response_length > 0


HELD, LEFT, SOURCE = "held", "left", "source"


class RequeueBuffer(DataSource):
    """A data source with a buffer before it: aborted groups with tokens are held and come first.

    Arguments:
        source: of the prompts.
        journal: records which groups are taken and put back.
        holds: aborted groups with tokens are held (``partial_rollout``); False: they go back to the source.
    """

    def __init__(self, source: DataSource, journal: Journal, *, holds: bool = False) -> None:
        self._source = source
        self._journal = journal
        self._holds = holds
        self._held: list[PromptGroup] = []

    @property
    def held(self) -> dict[int, list[int]]:
        """The groups that are held: number -> numbers of its samples."""
        return sample_ids_by_group(self._held)

    def next_groups(self, n: int) -> list[PromptGroup]:
        """The next ``n`` groups: those that are held first, with the tokens that they have."""
        held, self._held = self._held[:n], self._held[n:]
        fresh = self._source.next_groups(n - len(held)) if n > len(held) else []
        if fresh:
            self._journal.took(sample_ids_by_group(fresh))
        return [*held, *fresh]

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        """Hold aborted groups with tokens, and put the others back into the source."""
        holds = [self._holds and _is_resumable(group) for group in groups]
        self._held += compress(groups, holds)
        others = [group for group, is_held in zip(groups, holds, strict=True) if not is_held]
        if others:
            self._journal.gave_back(sample_ids_by_group(others))
            self._source.put_back(others)

    def state(self) -> dict[str, Any]:
        """The state of the source, and the groups that are held, each as one text.

        A group that JSON cannot represent is saved as its prompt, which is generated again.
        """
        state = self._source.state()
        if not self._held:
            return state
        texts = [dump_group(group, 0) for group in self._held]
        left = [dump_prompts(group, 0) for group, text in zip(self._held, texts, strict=True) if text is None]
        return {HELD: [text for text in texts if text is not None], LEFT: left, SOURCE: state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from where ``state()`` was taken."""
        if state.keys() != {HELD, LEFT, SOURCE}:
            self._held = []
            self._source.restore(state)
            return
        self._source.restore(state[SOURCE])
        self._held = [load_group(text)[1] for text in state[HELD]]
        again = [load_group(text)[1] for text in state[LEFT]]
        if again:
            self._journal.gave_back(sample_ids_by_group(again))
            self._source.put_back(again)

    def __len__(self) -> int:
        return len(cast(Sized, self._source))


def sample_ids_by_group(groups: Sequence[PromptGroup]) -> dict[int, list[int]]:
    """Number of a group -> the numbers of its samples; groups and samples without a number are left out."""
    found: dict[int, list[int]] = {}
    for sample in (sample for group in groups for sample in group):
        if sample.group_index is not None:
            found.setdefault(sample.group_index, []).extend([] if sample.index is None else [sample.index])
    return found


def held_groups(source: DataSource) -> dict[int, list[int]]:
    """The groups that ``source`` holds before another one."""
    return source.held if isinstance(source, RequeueBuffer) else {}


def _is_resumable(group: PromptGroup) -> bool:
    was_ended = any(sample.status is Status.ABORTED for sample in group)
    return was_ended and any(sample.response_length for sample in group)
