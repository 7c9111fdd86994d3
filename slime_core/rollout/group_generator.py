"""Generates and rewards prompt groups: all samples concurrently, every failure on its own sample.

    train_sampling, eval_sampling, apply_row_sampling   sampling parameters of a run, an evaluation set, a row
    prepare_group    resumes the aborted samples of a group where the generate function can, and resets the others
    GroupGenerator   generates and rewards whole groups, with retries
    GroupAttempt     calls the generate function, the hooks and the reward model for the samples of one group

A row may name its own generate function and reward model (:mod:`slime_core.prompts.row_checks`). A reward model that
takes one sample scores it as soon as it is generated; one that takes groups waits for the whole group, with retries.

A failure of the engines fails the samples of that call only. Any other exception of a generate function ends the run,
because it is a bug of its plugin.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import compress
from typing import Any

from slime_core.config.sampling import RolloutConfig
from slime_core.config.schema import EvalSet, RunConfig
from slime_core.errors import EngineError, RequestRefused
from slime_core.generation import GenerateContext, Interrupted, SamplingParams
from slime_core.generation.context import Parents, run_all
from slime_core.generation.sampling import UNANSWERED, fail, is_finished
from slime_core.plugins.lifecycle import LifecycleHooks
from slime_core.prompts.row_checks import own_sampling
from slime_core.rollout.components import ComponentRouter, RoutedComponent, component_boundary, require_samples
from slime_core.rollout.engines.client import ABORT_INTERVAL_S, OVERLOADED
from slime_core.rollout.reward_scoring import RewardDispatcher
from slime_core.types import PromptGroup, Sample, Status

NAMED = frozenset(one.name for one in fields(SamplingParams)) - {"extra", "max_kept"}


def truncates(rollout: RolloutConfig) -> bool:
    """Whether top-p or top-k leaves something out to sample from."""
    return rollout.rollout_top_p < 1 or rollout.rollout_top_k != -1


def train_sampling(config: RunConfig, *, end_ids: tuple[int, ...]) -> SamplingParams:
    """Sampling parameters of training, from ``[rollout]``; the model's ``end_ids`` end a response too."""
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


def eval_sampling(one: EvalSet, *, end_ids: tuple[int, ...]) -> SamplingParams:
    """Sampling parameters of an evaluation set."""
    penalty = one.repetition_penalty
    return SamplingParams(
        temperature=one.temperature,
        top_p=one.top_p,
        top_k=one.top_k,
        max_new_tokens=one.max_response_len,
        min_new_tokens=one.min_new_tokens,
        stop=one.stop,
        stop_token_ids=(*one.stop_token_ids, *end_ids),
        max_kept=None,  # nothing is trained on them
        extra={} if penalty is None else {"repetition_penalty": penalty},
    )


def apply_row_sampling(
    sample: Sample, context: GenerateContext, sampling: SamplingParams
) -> tuple[GenerateContext, SamplingParams]:
    """``context`` and ``sampling`` with what the sample's row wants instead, as a generate function gets them; see
    :mod:`slime_core.prompts.row_checks`.

    Ids of the row that end a response do so in addition to those of ``sampling``, among which are the model's.

    Raises:
        DataError: it wants what does not exist, or what cannot be trained on.
    """
    of_run = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    where = f"sample {sample.index} of group {sample.group_index}"
    own = own_sampling(sample.metadata, of_run=None if context.evaluation else of_run, where=where)
    sampling = _with(sampling, own) if own else sampling
    return replace(context, max_response_len=sampling.max_new_tokens), sampling


def _with(sampling: SamplingParams, own: Mapping[str, Any]) -> SamplingParams:
    named = {key: value for key, value in own.items() if key in NAMED}
    extra = {key: value for key, value in own.items() if key not in NAMED}
    if "stop_token_ids" in named:
        named["stop_token_ids"] = (*named["stop_token_ids"], *sampling.stop_token_ids)
    return replace(sampling, **named, extra={**sampling.extra, **extra})


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


FINAL = {*OVERLOADED.values(), "reward_refused", "reward_too_long"}
"""Causes of failures after which a sample is not generated again: an engine or a service refused (4xx)."""

NOT_RETURNED = "not_returned"
"""Cause of a failure: the generate function left the sample out."""


class GroupGenerator:
    """Generates and scores groups with the components that their rows name.

    Arguments:
        generators, rewards: the components to choose from.
        rollout: says which of several rewards trains, and what a failed sample does.
        hooks: of plugins that see samples before they are rewarded; None: there are none.

    Attributes:
        dispatcher: calls the reward models, and counts samples without a reward.
    """

    def __init__(
        self,
        generators: ComponentRouter,
        rewards: ComponentRouter,
        *,
        rollout: RolloutConfig,
        hooks: LifecycleHooks | None = None,
    ) -> None:
        self._generators = generators
        self._rewards = rewards
        self._rollout = rollout
        self._hooks = hooks
        self.dispatcher = RewardDispatcher(rollout)
        self._num_retries = rollout.failed_sample_retries if rollout.failed_samples == "retry" else 0
        self._retries: Counter[str] = Counter()

    def prepare_group(self, group: PromptGroup, *, is_stale: bool = False) -> None:
        """Make ``group`` ready to be generated: aborted responses resume if the run resumes them, others restart.

        Arguments:
            is_stale: its tokens are too old to be trained, so it restarts.
        """
        generator, reward = self._generators.of(group[0]), self._rewards.of(group[0])
        prepare_group(group, generator, reward, resumes=self._rollout.partial_rollout and not is_stale)

    async def collect(self, context: GenerateContext, group: PromptGroup, sampling: SamplingParams) -> PromptGroup:
        """``group``, generated and rewarded; the client bounds the requests in flight.

        A sample that no engine answered in time is ``FAILED``, with the reason.

        Raises:
            RequestRefused: an engine will never take such a request.
            RunError: a reward model that runs here returned too few or too many rewards.
            PluginError: a generate function failed or returned no sample, or the processes of reward models cannot load
                the plugins.
            DataError: a row names a component that no active plugin offers.
        """
        # The samples of a prompt share its row, and so what the row names.
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
        """Score the samples that have no reward yet, of groups that a rollout source made; raises as :meth:`collect`
        does."""
        missing = [[sample for sample in group if sample.reward is None] for group in groups]
        await run_all(self.dispatcher.score(self._rewards.of(samples[0]), samples) for samples in missing if samples)

    def take_metrics(self) -> dict[str, float]:
        """Since the last call, by cause: samples without a reward of their own, and samples that were generated
        again."""
        failures, retries, self._retries = self.dispatcher.take_failures(), self._retries, Counter()
        return {
            **{f"rollout/reward_failures/{cause}": count for cause, count in failures.items()},
            **{f"rollout/retries/{cause}": float(count) for cause, count in retries.items()},
        }

    async def _resume_aborted(
        self, attempt: GroupAttempt, reward: RoutedComponent, samples: list[Sample]
    ) -> list[Sample]:
        """``samples`` of an evaluation; aborted ones resume, unless they have got no token for as long as a request may
        stand still.

        Over-sampling aborts every request in flight, including those of a concurrent evaluation
        (``eval_interleaved``).
        """
        limit_s, grown_s, tokens = self._rollout.rollout_request_timeout_s, time.monotonic(), 0
        while any(sample.status is Status.ABORTED for sample in samples) and time.monotonic() < grown_s + limit_s:
            if (found := sum(sample.response_length for sample in samples)) > tokens:
                grown_s, tokens = time.monotonic(), found
            await asyncio.sleep(ABORT_INTERVAL_S)
            prepare_group(samples, attempt.generator, reward, resumes=True)
            samples = await attempt.generate(samples)
        return samples

    async def _retry_failed(self, attempt: GroupAttempt, samples: list[Sample]) -> list[Sample]:
        """``samples``; failed ones are generated again, at most ``failed_sample_retries`` times."""
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
    """Whether the failure may be temporary, and the sample has no siblings: one generation returns all of them."""
    return sample.status is Status.FAILED and sample.rollout_id is None and sample.failure_cause not in FINAL


def mark_missing_failed(given: PromptGroup, made: PromptGroup) -> list[Sample]:
    """The samples of ``given`` that the generate function did not return, as failed ones."""
    there = {sample.index for sample in made}
    lost = [sample for sample in given if sample.index not in there]
    error = "the generate function did not return it"
    return [replace(one, status=Status.FAILED, reward=None, error=error, failure_cause=NOT_RETURNED) for one in lost]


def _place_in(group: PromptGroup) -> Callable[[Sample], int]:
    """Sort key: the place of a sample in ``group``, by its number; unknown numbers come last."""
    places = {sample.index: place for place, sample in enumerate(group)}
    return lambda sample: places.get(sample.index, len(places))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAttempt:
    """Generates the samples of one group; retries and resumed samples use the same attempt.

    Arguments:
        generator: the generate function.
        reward: scores each sample as soon as it is generated; None: they are scored later, as a group.
        context, sampling: the other arguments of ``generator``.
        hooks: of plugins that see samples before they are rewarded; None: there are none.
        dispatcher: calls ``reward``.
    """

    generator: RoutedComponent
    reward: RoutedComponent | None
    context: GenerateContext
    sampling: SamplingParams
    hooks: LifecycleHooks | None
    dispatcher: RewardDispatcher

    async def generate(self, group: PromptGroup) -> list[Sample]:
        """The samples of ``group``, generated; those that are finished already stay as they are.

        Raises:
            RequestRefused: an engine will never take such a request.
            PluginError: the generate function failed or returned no sample.
        """
        if self.generator.takes_groups:
            return await self._generate(group)
        answers = await run_all(self._generate([sample]) for sample in group)
        return [sample for answer in answers for sample in answer]

    async def _generate(self, samples: PromptGroup) -> list[Sample]:
        """The samples of one call; it is left out for a single sample that is finished already."""
        finished = {id(sample) for sample in samples if is_finished(sample)}
        if self.generator.takes_groups or not finished:
            samples = await self._call_hooks(await self._call(samples), finished=finished)
        if self.reward is None:
            return samples
        return await self.dispatcher.score(self.reward, samples, evaluation=self.context.evaluation)

    async def _call(self, samples: PromptGroup) -> list[Sample]:
        """The samples that the generate function returns for ``samples``: a group, or a single one, by its scope."""
        finished = [is_finished(sample) for sample in samples]
        parents = Parents.of(samples)
        argument = samples if self.generator.takes_groups else samples[0]
        try:
            with component_boundary(self.generator.plugin, f"generate function {self.generator.name!r}"):
                answer = await self.generator.component(self.context, argument, self.sampling)
        except RequestRefused:
            raise
        except Interrupted as interrupted:
            answer = _aborted(samples) if self.generator.takes_groups else interrupted.sample
        except EngineError as failure:
            # Samples that were finished before the call keep their response.
            answer = [one if is_done else _failed(one, failure) for one, is_done in zip(samples, finished, strict=True)]
        made = require_samples(self.generator, answer)
        parents.adopt(made)
        return made

    async def _call_hooks(self, samples: list[Sample], *, finished: set[int]) -> list[Sample]:
        """Samples after the plugins that see those that have an answer; the ``finished`` ones, by id, were seen."""
        hooks = self.hooks
        if hooks is None or not hooks.implementers("slime_after_generate"):
            return samples
        answered = [is_finished(one) and id(one) not in finished for one in samples]
        hooked = iter(await run_all(hooks.after_generate(one, self.context) for one in compress(samples, answered)))
        return [next(hooked) if is_seen else one for one, is_seen in zip(samples, answered, strict=True)]


def _aborted(samples: PromptGroup) -> list[Sample]:
    """The samples of a group that a generate function left when a turn was aborted."""
    for sample in samples:
        sample.status = Status.ABORTED if sample.status is Status.PENDING else sample.status
    return samples


def _failed(sample: Sample, failure: EngineError) -> Sample:
    found = replace(sample)
    fail(found, failure)
    return found
