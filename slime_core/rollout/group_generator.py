"""Generates and rewards prompt groups: all samples concurrently; a failure fails one sample, not its group.

The group scheduler (through ``sampler.GroupRunner``) and evaluations call :class:`GroupGenerator`.

    train_sampling, eval_sampling, apply_row_sampling   sampling parameters of a run, an evaluation set, a row
    prepare_group    resumes the aborted samples of a group if the generate function can, and resets the others
    GroupGenerator   generates and rewards whole groups, with retries
    GroupAttempt     calls the generate function, the hooks and the reward model for the samples of one group

A row may name a generate function and a reward model (:mod:`slime_core.rollout.row_checks`). A reward model that
takes one sample scores it immediately after generation; a reward model that takes groups scores the group after all
retries.

A failure of the engines fails the samples of that call only. Any other exception of a generate function ends the run,
because it is a bug of its plugin.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import compress
from typing import Any

from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import EvalSet, RunConfig
from slime_core.errors import EngineError, RequestRefused
from slime_core.generation import GenerateContext, Interrupted, SamplingParams
from slime_core.generation.context import Parents, run_all
from slime_core.generation.sampling import UNANSWERED, fail, is_finished
from slime_core.plugins.lifecycle import Hooks
from slime_core.rollout.engines.client import ABORT_INTERVAL_S, OVERLOADED
from slime_core.rollout.reward_scoring import RewardDispatcher
from slime_core.rollout.routing import ComponentRouter, RoutedComponent, component_boundary, require_samples
from slime_core.rollout.row_checks import own_sampling
from slime_core.types import PromptGroup, Sample, Status

SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams)) - {"extra", "max_kept"}


def train_sampling(config: RunConfig, *, end_ids: tuple[int, ...]) -> SamplingParams:
    """Return the sampling parameters of training, from ``[rollout]``; the model's ``end_ids`` end a response too."""
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        max_kept=rollout.rollout_max_kept_tokens,
        max_new_tokens=rollout.rollout_max_response_len,
        stop=rollout.rollout_stop,
        stop_token_ids=(*rollout.rollout_stop_token_ids, *end_ids),
    )


def eval_sampling(eval_set: EvalSet, *, end_ids: tuple[int, ...]) -> SamplingParams:
    """Return the sampling parameters of an evaluation set."""
    penalty = eval_set.repetition_penalty
    return SamplingParams(
        temperature=eval_set.temperature,
        top_p=eval_set.top_p,
        top_k=eval_set.top_k,
        max_new_tokens=eval_set.max_response_len,
        min_new_tokens=eval_set.min_new_tokens,
        stop=eval_set.stop,
        stop_token_ids=(*eval_set.stop_token_ids, *end_ids),
        max_kept=None,  # nothing is trained on them
        extra={} if penalty is None else {"repetition_penalty": penalty},
    )


def apply_row_sampling(
    sample: Sample, context: GenerateContext, sampling: SamplingParams
) -> tuple[GenerateContext, SamplingParams]:
    """Return ``context`` and ``sampling`` with the overrides of the sample's row applied; see
    :mod:`slime_core.rollout.row_checks`.

    ``stop_token_ids`` of the row are added to those of ``sampling``, which include the model's.

    Raises:
        DataError: the row names an unknown sampling parameter, or one that training does not allow.
    """
    of_run = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    where = f"sample {sample.index} of group {sample.group_index}"
    overrides = own_sampling(sample.metadata, of_run=None if context.evaluation else of_run, where=where)
    sampling = _with(sampling, overrides) if overrides else sampling
    return replace(context, max_response_len=sampling.max_new_tokens), sampling


def _with(sampling: SamplingParams, overrides: Mapping[str, Any]) -> SamplingParams:
    named = {key: value for key, value in overrides.items() if key in SAMPLING_FIELDS}
    extra = {key: value for key, value in overrides.items() if key not in SAMPLING_FIELDS}
    if "stop_token_ids" in named:
        named["stop_token_ids"] = (*named["stop_token_ids"], *sampling.stop_token_ids)
    return replace(sampling, **named, extra={**sampling.extra, **extra})


GENERATED = (
    *("tokens", "response", "response_length", "reward", "loss_mask", "status", "weight_versions", "weight_spans"),
    *("rollout_log_probs", "rollout_routed_experts", "multimodal_train_inputs", "remove_sample"),
    "engine_columns",
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
    *("non_generation_time", "spec_info", "error", "failure_cause"),
)
"""Fields of a sample that generating and rewarding set."""


def reset_sample(sample: Sample) -> None:
    """Remove the response and the reward of an earlier attempt.

    A pending sample keeps the fields that its data source set; only its reward is removed.
    """
    fresh = Sample()
    for name in GENERATED if sample.status is not Status.PENDING else ("reward",):
        setattr(sample, name, getattr(fresh, name))


def prepare_group(group: PromptGroup, generator: RoutedComponent, reward: RoutedComponent, *, resumes: bool) -> None:
    """Make ``group`` ready for its generate function.

    Arguments:
        resumes: aborted responses resume (``partial_rollout``), if ``generator`` supports it. Finished samples of the
            group keep their response, and their reward unless ``reward`` compares the samples of a group.

    One generation may have returned several samples of one ``rollout_id``. If one of them must restart, a single sample
    replaces them all, because the restarted generation returns all of them again. ``group`` is changed in place.
    """
    was_aborted = resumes and any(sample.status is Status.ABORTED for sample in group)
    stay = [was_aborted and _stays(sample, generator) for sample in group]
    pairs = list(zip(group, stay, strict=True))
    regenerated_ids = {
        sample.rollout_id for sample, stays in pairs if not stays and sample.status is not Status.PENDING
    } - {None}
    for sample, stays in pairs:
        if not stays or sample.rollout_id in regenerated_ids:
            reset_sample(sample)
        elif reward.takes_groups:
            sample.reward = None
    group[:] = _keep_first_of(group, regenerated_ids)


def _keep_first_of(group: PromptGroup, generations: set[int | None]) -> list[Sample]:
    """Return ``group`` with only the first sample of each of ``generations``."""
    samples, first_ids = [], set()
    for sample in group:
        if sample.rollout_id not in generations:
            samples.append(sample)
        elif sample.rollout_id not in first_ids:
            first_ids.add(sample.rollout_id)
            sample.rollout_id = None
            samples.append(sample)
    return samples


def _stays(sample: Sample, generator: RoutedComponent) -> bool:
    if is_finished(sample):
        return generator.resumes or not generator.takes_groups
    return generator.resumes and sample.status is Status.ABORTED and sample.response_length > 0


FINAL = {*OVERLOADED.values(), "reward_refused", "reward_too_long"}
"""Causes of failures after which a sample is not retried: an engine or a service refused the request (4xx)."""

NOT_RETURNED = "not_returned"
"""Cause of a failure: the generate function did not return the sample."""


class GroupGenerator:
    """Generates and scores groups with the components that their rows name.

    Arguments:
        generators, rewards: the components to choose from.
        rollout: settings; ``reward_key``, ``failed_samples`` and ``partial_rollout`` are read.
        hooks: called with samples before they are rewarded. None: no hooks.

    Attributes:
        dispatcher: calls the reward models, and counts samples without a reward.
        generating: the samples that a generate function works on, by its name.
    """

    def __init__(
        self,
        generators: ComponentRouter,
        rewards: ComponentRouter,
        *,
        rollout: RolloutConfig,
        hooks: Hooks | None = None,
    ) -> None:
        self._generators = generators
        self._rewards = rewards
        self._rollout = rollout
        self._hooks = hooks
        self.dispatcher = RewardDispatcher(rollout)
        self._num_retries = rollout.failed_sample_retries if rollout.failed_samples == "retry" else 0
        self._retries: Counter[str] = Counter()
        self.generating: Counter[str] = Counter()

    def prepare_group(self, group: PromptGroup, *, is_stale: bool = False) -> None:
        """Prepare ``group`` for generation: aborted responses resume if the run resumes them; other samples restart.

        Arguments:
            is_stale: the tokens of the group are too old to be trained, so it restarts.
        """
        generator, reward = self._generators.of(group[0]), self._rewards.of(group[0])
        prepare_group(group, generator, reward, resumes=self._rollout.partial_rollout and not is_stale)

    async def collect(self, context: GenerateContext, group: PromptGroup, sampling: SamplingParams) -> PromptGroup:
        """Generate and reward ``group``; return its samples. The client bounds the requests in flight.

        A sample that no engine answered in time is ``FAILED``, with the reason.

        Raises:
            RequestRefused: an engine refused the request, and would refuse it again.
            RunError: a reward model that runs in this process returned too few or too many rewards.
            PluginError: a generate function failed or returned no sample, or the processes of reward models cannot load
                the plugins.
            DataError: a row names a component that no active plugin offers.
        """
        # The samples of a prompt share its row, and so the components that it names.
        generator, reward = self._generators.of(group[0]), self._rewards.of(group[0])
        context, sampling = apply_row_sampling(group[0], context, sampling)
        attempt = GroupAttempt(
            generator=generator,
            # A reward that compares samples waits for all of them, retried ones included.
            reward=None if reward.takes_groups else reward,
            context=context,
            sampling=sampling,
            hooks=self._hooks,
            dispatcher=self.dispatcher,
            generating=self.generating,
        )
        samples = await attempt.generate(group)
        if context.evaluation:
            samples = await self._resume_aborted(attempt, reward, samples)
        else:
            samples = await self._retry_failed(attempt, samples)
        samples.sort(key=_place_in(group))
        if reward.takes_groups:
            return await self.dispatcher.score(reward, samples, evaluation=context.evaluation)
        return samples

    async def reward_missing(self, groups: Sequence[PromptGroup]) -> None:
        """Score the samples without a reward, in groups of a rollout source. Raises as :meth:`collect`."""
        missing = [[sample for sample in group if sample.reward is None] for group in groups]
        await run_all(self.dispatcher.score(self._rewards.of(samples[0]), samples) for samples in missing if samples)

    def take_metrics(self) -> dict[str, float]:
        """Return, since the last call and by cause, the number of samples without a reward and of retried samples."""
        failures, retries, self._retries = self.dispatcher.take_failures(), self._retries, Counter()
        return {
            **{f"rollout/reward_failures/{cause}": count for cause, count in failures.items()},
            **{f"rollout/retries/{cause}": float(count) for cause, count in retries.items()},
        }

    async def _resume_aborted(
        self, attempt: GroupAttempt, reward: RoutedComponent, samples: list[Sample]
    ) -> list[Sample]:
        """Resume the aborted samples of an evaluation until all finish, or until none has grown for
        ``rollout_request_timeout_s``.

        Over-sampling aborts every request in flight, including those of a concurrent evaluation
        (``eval_interleaved``).
        """
        limit_s, grown_s, tokens = self._rollout.rollout_request_timeout_s, time.monotonic(), 0
        while any(sample.status is Status.ABORTED for sample in samples) and time.monotonic() < grown_s + limit_s:
            if (total := sum(sample.response_length for sample in samples)) > tokens:
                grown_s, tokens = time.monotonic(), total
            await asyncio.sleep(ABORT_INTERVAL_S)
            prepare_group(samples, attempt.generator, reward, resumes=True)
            samples = await attempt.generate(samples)
        return samples

    async def _retry_failed(self, attempt: GroupAttempt, samples: list[Sample]) -> list[Sample]:
        """Generate failed samples again, at most ``failed_sample_retries`` times; return all samples."""
        for _ in range(self._num_retries):
            failed = [sample for sample in samples if _is_repeatable(sample)]
            if not failed:
                break
            others = [sample for sample in samples if not _is_repeatable(sample)]
            self._retries.update(sample.failure_cause or UNANSWERED for sample in failed)
            for sample in failed:
                reset_sample(sample)
            samples = [*others, *await attempt.generate(failed)]
        return samples


def _is_repeatable(sample: Sample) -> bool:
    """Return whether the failure may be temporary and the sample has no siblings, which one generation returns."""
    return sample.status is Status.FAILED and sample.rollout_id is None and sample.failure_cause not in FINAL


def mark_missing_failed(group: PromptGroup, returned: PromptGroup) -> list[Sample]:
    """Return the samples of ``group`` that the generate function did not return, marked as failed."""
    indices = {sample.index for sample in returned}
    error = "the generate function did not return it"
    return [
        replace(sample, status=Status.FAILED, reward=None, error=error, failure_cause=NOT_RETURNED)
        for sample in group
        if sample.index not in indices
    ]


def _place_in(group: PromptGroup) -> Callable[[Sample], int]:
    """Return a sort key: the position of a sample in ``group``, by its number; unknown numbers come last."""
    places = {sample.index: place for place, sample in enumerate(group)}
    return lambda sample: places.get(sample.index, len(places))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAttempt:
    """Generates the samples of one group; retries and resumed samples use the same attempt.

    Arguments:
        generator: the generate function.
        reward: scores each sample immediately after generation. None: the group is scored later.
        context, sampling: the other arguments of ``generator``.
        hooks: called with samples before they are rewarded. None: no hooks.
        dispatcher: calls ``reward``.
        generating: counts the samples that ``generator`` works on, under its name.
    """

    generator: RoutedComponent
    reward: RoutedComponent | None
    context: GenerateContext
    sampling: SamplingParams
    hooks: Hooks | None
    dispatcher: RewardDispatcher
    generating: Counter[str] = field(default_factory=Counter)

    async def generate(self, group: PromptGroup) -> list[Sample]:
        """Generate the unfinished samples of ``group``; return all samples.

        Raises:
            RequestRefused: an engine refused the request, and would refuse it again.
            PluginError: the generate function failed or returned no sample.
        """
        if self.generator.takes_groups:
            return await self._generate(group)
        answers = await run_all(self._generate([sample]) for sample in group)
        return [sample for answer in answers for sample in answer]

    async def _generate(self, samples: PromptGroup) -> list[Sample]:
        """Call the generate function once, unless ``samples`` is one finished sample; score the result."""
        finished = {id(sample) for sample in samples if is_finished(sample)}
        if self.generator.takes_groups or not finished:
            samples = await self._call_hooks(await self._call(samples), finished=finished)
        if self.reward is None:
            return samples
        return await self.dispatcher.score(self.reward, samples, evaluation=self.context.evaluation)

    async def _call(self, samples: PromptGroup) -> list[Sample]:
        """Call the generate function with ``samples``: a group, or a single sample, by its scope."""
        finished = [is_finished(sample) for sample in samples]
        parents = Parents.of(samples)
        argument = samples if self.generator.takes_groups else samples[0]
        self.generating[self.generator.name] += len(samples)
        try:
            with component_boundary(self.generator.plugin, f"generate function {self.generator.name!r}"):
                answer = await self.generator.component(self.context, argument, self.sampling)
        except RequestRefused:
            raise
        except Interrupted as interrupted:
            answer = _aborted(samples) if self.generator.takes_groups else interrupted.sample
        except EngineError as failure:
            # Samples that were finished before the call keep their response.
            pairs = zip(samples, finished, strict=True)
            answer = [sample if is_done else _failed(sample, failure) for sample, is_done in pairs]
        finally:
            self.generating[self.generator.name] -= len(samples)
        returned = require_samples(self.generator, answer)
        parents.adopt(returned)
        return returned

    async def _call_hooks(self, samples: list[Sample], *, finished: set[int]) -> list[Sample]:
        """Call ``slime_after_generate`` with finished samples, except those whose ids are in ``finished``."""
        hooks = self.hooks
        if hooks is None or not hooks.implementers("slime_after_generate"):
            return samples
        is_new = [is_finished(sample) and id(sample) not in finished for sample in samples]
        calls = (hooks.after_generate(sample, self.context) for sample in compress(samples, is_new))
        hooked = iter(await run_all(calls))
        return [next(hooked) if new else sample for sample, new in zip(samples, is_new, strict=True)]


def _aborted(samples: PromptGroup) -> list[Sample]:
    """Mark the pending samples of a group as aborted, because the generate function ended at an aborted turn."""
    for sample in samples:
        sample.status = Status.ABORTED if sample.status is Status.PENDING else sample.status
    return samples


def _failed(sample: Sample, failure: EngineError) -> Sample:
    failed = replace(sample)
    fail(failed, failure)
    return failed
