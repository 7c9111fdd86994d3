"""Evaluation sets: held-out prompts are generated and rewarded as in training, scored and written to disk.

    Evaluation    runs the sets
    scores        mean reward, overall and by metadata field; pass@k; response lengths

Each set has its own settings (:class:`~slime_core.config.schema.EvalSet`): sampling parameters, generate function,
reward model, and the model that generates: the policy or another one.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from slime_core.config.schema import EvalSet, RunConfig, eval_sets
from slime_core.contracts import DataSource, EvalSamples
from slime_core.errors import ConfigError, RunError, nearest
from slime_core.generation import GenerateContext
from slime_core.generation.context import run_all
from slime_core.generation.sampling import is_finished
from slime_core.prompts.chat import PromptEncoder
from slime_core.prompts.numbered import TOO_LONG, Held, NumberedPrompts
from slime_core.prompts.requests import PromptLengths, RunFilter, evaluation_request
from slime_core.rollout.components import require_metrics
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.group_generator import GroupGenerator, eval_sampling
from slime_core.rollout.reward_scoring import part_metrics
from slime_core.rollout.rollout_batch import describe_failures, mean_and_max, solved_generations
from slime_core.rollout.sampler_components import SamplerComponents
from slime_core.runtime.progress import Progress
from slime_core.types import PromptGroup, Sample, Status, tools_of


@dataclass(slots=True)
class _LoadedSet:
    """An evaluation set with its prompts.

    Arguments:
        groups: one group a prompt; each evaluation generates copies.
        max_new_tokens: of the responses of each group.
        num_left_out: prompts that were too long.
        client: of another model; None: the policy generates.
    """

    settings: EvalSet
    groups: list[PromptGroup]
    max_new_tokens: list[int]
    num_left_out: int
    encoder: PromptEncoder
    collector: GroupGenerator
    client: GenerateClient | None


class Evaluation:
    """All evaluation sets of a run.

    Raises:
        DataError: the prompts of a set cannot be read.
        ConfigError: the run serves no model that a set names.
    """

    def __init__(self, config: RunConfig, components: SamplerComponents) -> None:
        self._config = config
        self._components = components
        self._sets = {one.name: self._load(one) for one in eval_sets(config)}
        self._num_done: int | None = None

    def progress(self) -> Progress | None:
        """How far the evaluation is; None: none runs."""
        if self._num_done is None:
            return None
        total = sum(len(one.groups) for one in self._sets.values())
        clients = {id(client): client for one in self._sets.values() if (client := one.client) is not None}
        waiting = waiting_for(
            [one.collector for one in self._sets.values()], self._components.client, *clients.values()
        )
        return Progress(self._num_done, total, "prompts", waiting)

    async def run(self, context: GenerateContext, source: DataSource | None) -> dict[str, float]:
        """Score every set with the weights that the engines serve; returns ``eval/...`` metrics.

        Arguments:
            context: of an evaluation; its number is the training step.
            source: the training prompts, for ``slime_evaluate``; None: this sampler takes no prompts.

        Raises:
            RunError: no sample of a set was answered.
            PluginError: ``slime_evaluate`` or ``slime_log_evaluation`` failed.
        """
        hooks = self._components.hooks
        found = await hooks.first("slime_evaluate", step=context.rollout, prompts=source)
        if found is not None:
            return require_metrics(found, who=f"slime_evaluate of {hooks.implementers('slime_evaluate')}")
        metrics: dict[str, float] = {}
        sets: dict[str, EvalSamples] = {}
        self._num_done = 0
        for name, one in self._sets.items():
            samples = await self._measure(one, context)
            own = one.settings
            metrics |= scores(samples, f"eval/{name}", key=own.reward_key, threshold=own.pass_threshold)
            failures = one.collector.dispatcher.take_failures()
            metrics |= {f"eval/{name}-failed/{cause}": count for cause, count in failures.items()}
            metrics |= part_metrics(samples, f"eval/{name}/reward_parts")
            metrics |= {f"eval/{name}-left_out": float(one.num_left_out)} if own.longest_prompt else {}
            rewards = [sample.reward_value(own.reward_key) for sample in samples]
            sets[name] = EvalSamples(samples, rewards, [sample.status is Status.TRUNCATED for sample in samples])
        self._num_done = None
        logged = hooks.call("slime_log_evaluation", step=context.rollout, sets=sets, metrics=metrics)
        return {} if any(logged) else metrics

    async def close(self) -> None:
        """Close connections to other models."""
        for one in self._sets.values():
            if one.client is not None:
                await one.client.close()

    async def _measure(self, one: _LoadedSet, context: GenerateContext) -> list[Sample]:
        name = one.settings.name
        finished = await self._collect(one, replace(context, encoder=one.encoder, client=one.client or context.client))
        samples = [sample for group in finished for sample in group]
        failed = [sample for sample in samples if sample.reward is None]
        if len(failed) < len(samples):
            one.collector.dispatcher.unanswered(failed)
        self._components.writer.write(f"eval-{name}", context.rollout, samples)
        if len(failed) == len(samples):
            raise RunError(
                f"evaluation {name!r}: none of {len(samples)} samples was answered: {describe_failures(failed)}"
            )
        return samples

    async def _collect(self, one: _LoadedSet, context: GenerateContext) -> list[PromptGroup]:
        """All groups of a set, generated and rewarded."""
        sampling = eval_sampling(one.settings, end_ids=one.encoder.end_ids)

        async def collect(group: PromptGroup, limit: int) -> PromptGroup:
            limited = replace(sampling, max_new_tokens=limit, min_new_tokens=min(limit, sampling.min_new_tokens))
            collected = await one.collector.collect(context, group, limited)
            self._num_done = (self._num_done or 0) + 1
            return collected

        return await run_all(map(collect, copy.deepcopy(one.groups), one.max_new_tokens))

    def _load(self, one: EvalSet) -> _LoadedSet:
        encoder = self._components.encoder_for(one.apply_chat_template)
        checks = self._components.row_checks(one)
        renders = self._components.renders(one.generate_function, encoder)
        chosen = RunFilter(checks, longest=one.longest_prompt, lengths=PromptLengths(encoder), encoder=renders)
        request = evaluation_request(self._config, one, chosen, self._components.formats)
        source = NumberedPrompts(Held(request), request)
        groups = source.next_groups(len(source))
        limits = [_response_limit(one, group, encoder) for group in groups]
        return _LoadedSet(
            one,
            groups,
            limits,
            chosen.count(TOO_LONG),
            encoder,
            self._components.make_collector(one),
            self._make_client(one),
        )

    def _make_client(self, one: EvalSet) -> GenerateClient | None:
        """The client of a model other than the policy; requests carry ids of the policy's tokenizer."""
        if one.model is None:
            return None
        models, rollout = self._components.models, self._config.rollout
        url = one.model if "://" in one.model else models.get(one.model)
        if url is None:
            raise ConfigError(
                f"evaluation set {one.name}: model = {one.model!r}, but the auxiliary models of the run are: "
                f"{', '.join(sorted(models)) or 'none'}{nearest(one.model, models)}. Accepted: one of them, the "
                "address of an SGLang server, or nothing, which is the policy."
            )
        return GenerateClient(
            url,
            max_in_flight=rollout.sglang_server_concurrency,
            timeout_s=rollout.rollout_request_timeout_s,
        )


def waiting_for(collectors: Sequence[GroupGenerator], *clients: GenerateClient) -> dict[str, int]:
    """What the groups of ``collectors`` wait for: requests to engines, samples whose generate function does something
    else meanwhile, and samples without a reward."""
    requests = sum(client.num_in_flight for client in clients)
    generating = sum((Counter(dict(collector.generating)) for collector in collectors), Counter[str]())
    rewards = sum(collector.dispatcher.num_in_flight for collector in collectors)
    elsewhere = max(0, generating.total() - requests)
    names = ", ".join(sorted(name for name, count in generating.items() if count))
    return {"engines": requests, f"generate function {names}": elsewhere, "rewards": rewards}


def _response_limit(one: EvalSet, group: PromptGroup, encoder: PromptEncoder) -> int:
    """Most tokens that a response of the group may have."""
    if one.max_context_len is None:
        return one.max_response_len
    return min(
        one.max_response_len,
        one.max_context_len - len(encoder.encode(group[0].prompt, tools=tools_of(group[0].metadata))),
    )


MOST_VALUES = 12
"""A metadata field with more values than this describes single prompts, not kinds of prompts."""

MOST_LETTERS = 60
"""Longest name and value of a metadata field; what is longer is text."""


def scores(samples: Sequence[Sample], name: str, *, key: str | None, threshold: float = 1.0) -> dict[str, float]:
    """The metrics of rewarded samples, in whatever order.

    Example: of the name ``eval/sums``, the mean reward is ``eval/sums``, that of the samples whose metadata say
    ``carries = 1`` is ``eval/sums/carries=1``; there are ``eval/sums-truncated_ratio``, ``eval/sums-pass@1`` (the
    estimated share of prompts that one response solves), and ``eval/sums/response_len/mean`` and ``.../max`` of the
    samples that were answered.

    Arguments:
        key: which of several rewards counts.
        threshold: reward from which on a response solves its prompt.

    Raises:
        ValueError: there are none, or one has no reward.
    """
    if not samples:
        raise ValueError("an evaluation without samples has no score")
    rewards = [sample.reward_value(key) for sample in samples]
    truncated = statistics.fmean(float(sample.status is Status.TRUNCATED) for sample in samples)
    passed = pass_rates(solved_generations(samples, rewards, threshold), of_all=True)
    kinds = {field: means.items() for field, means in _by_metadata(samples, rewards).items()}
    return {
        name: statistics.fmean(rewards),
        f"{name}-truncated_ratio": truncated,
        **{f"{name}-pass@{k}": share for k, share in passed.items()},
        **mean_and_max(f"{name}/response_len", [one.response_length for one in samples if is_finished(one)]),
        **{f"{name}/{field}={value}": mean for field, means in kinds.items() for value, mean in means},
    }


def pass_at(k: int, *, n: int, solved: int) -> float:
    """The chance that at least one of ``k`` responses, sampled without replacement from ``n`` of which ``solved`` solve
    the prompt, solves it: the unbiased estimator of pass@k (Chen et al. 2021, arXiv 2107.03374, equation 1).

    Raises:
        ValueError: not ``1 <= k <= n`` and ``0 <= solved <= n``.
    """
    if not (1 <= k <= n and 0 <= solved <= n):
        raise ValueError(f"pass@{k} of {n} responses, {solved} of them solved, is not defined; 1 <= k <= n is needed")
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)


def pass_rates(prompts: Iterable[Sequence[bool]], *, of_all: bool = False) -> dict[int, float]:
    """k -> pass@k, for k = 1, 2, 4, ... up to the most responses that a prompt has: the mean over the prompts that have
    as many.

    Arguments:
        prompts: of each prompt, which of its responses solve it.
        of_all: also for k = the most responses that a prompt has, where that is not a power of two.
    """
    counts = [(len(one), sum(one)) for one in prompts]
    most = max((n for n, _ in counts), default=0)
    ks = sorted({1 << place for place in range(most.bit_length())} | ({most} if of_all and most else set()))
    return {k: statistics.fmean(pass_at(k, n=n, solved=solved) for n, solved in counts if n >= k) for k in ks}


def _by_metadata(samples: Sequence[Sample], rewards: Sequence[float]) -> dict[str, dict[str, float]]:
    """Metadata field -> value -> mean reward, of fields that say what kind a prompt is."""
    kinds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample, reward in zip(samples, rewards, strict=True):
        for name, value in sample.metadata.items():
            if isinstance(value, str | int | bool):
                kinds[name][str(value)].append(reward)
    return {
        name: {value: statistics.fmean(found) for value, found in sorted(values.items())}
        for name, values in sorted(kinds.items())
        if 1 < len(values) <= MOST_VALUES and all(map(_is_word, (name, *values)))
    }


def _is_word(text: str) -> bool:
    """Whether the name of a metric can carry it."""
    return len(text) <= MOST_LETTERS and text.isprintable()
