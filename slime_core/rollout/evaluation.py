"""Evaluation sets: responses to held-out prompts are generated and rewarded as in training, scored and written to disk.

    Evaluation    runs the sets
    scores        mean reward, overall and by metadata field; pass@k; response lengths

Each set has separate settings (:class:`~slime_core.config.schema.EvalSet`): sampling parameters, generate function,
reward model, and the model that generates, which is the policy or another one.
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
from slime_core.errors import RunError
from slime_core.generation import GenerateContext
from slime_core.generation.context import run_all
from slime_core.generation.sampling import is_finished
from slime_core.prompts.chat import PromptEncoder
from slime_core.rollout.collected_rollout import describe_failures, mean_and_max, solved_generations
from slime_core.rollout.components import SamplerComponents
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.group_generator import GroupGenerator, eval_sampling
from slime_core.rollout.prompt_filter import PromptLengths, RunFilter, evaluation_request
from slime_core.rollout.reward_scoring import part_metrics
from slime_core.rollout.routing import require_metrics
from slime_core.runtime.progress import Progress
from slime_core.types import TOO_LONG, PromptGroup, Sample, Status, tools_of


@dataclass(slots=True)
class _LoadedSet:
    """An evaluation set with its prompts.

    Arguments:
        groups: one group a prompt; each evaluation generates copies.
        max_new_tokens: of the responses of each group.
        num_too_long: prompts that were left out.
        client: of another model. None: the policy generates.
    """

    settings: EvalSet
    groups: list[PromptGroup]
    max_new_tokens: list[int]
    num_too_long: int
    encoder: PromptEncoder
    generator: GroupGenerator
    client: GenerateClient | None


class Evaluation:
    """All evaluation sets of a run.

    Raises:
        DataError: the prompts of a set cannot be read.
    """

    def __init__(self, config: RunConfig, components: SamplerComponents) -> None:
        self._config = config
        self._components = components
        self._sets = {eval_set.name: self._load(eval_set) for eval_set in eval_sets(config)}
        self._num_done: int | None = None

    def progress(self) -> Progress | None:
        """Return the progress of the evaluation, or None if none runs."""
        if self._num_done is None:
            return None
        sets = self._sets.values()
        total = sum(len(loaded.groups) for loaded in sets)
        clients = [loaded.client for loaded in sets if loaded.client is not None]
        waiting = waiting_for([loaded.generator for loaded in sets], self._components.client, *clients)
        return Progress(self._num_done, total, "prompts", waiting)

    async def run(self, context: GenerateContext, source: DataSource | None) -> dict[str, float]:
        """Score every set with the weights that the engines serve; return ``eval/...`` metrics.

        Arguments:
            context: of an evaluation; its number is the training step.
            source: the training prompts, for ``slime_evaluate``. None: this sampler takes no prompts.

        Raises:
            RunError: no sample of a set was answered.
            PluginError: ``slime_evaluate`` or ``slime_log_evaluation`` failed.
        """
        hooks = self._components.hooks
        scored = await hooks.first("slime_evaluate", step=context.rollout, prompts=source)
        if scored is not None:
            return require_metrics(scored, source=f"slime_evaluate of {hooks.implementers('slime_evaluate')}")
        metrics: dict[str, float] = {}
        sets: dict[str, EvalSamples] = {}
        self._num_done = 0
        for name, loaded in self._sets.items():
            samples = await self._measure(loaded, context)
            settings = loaded.settings
            metrics |= scores(samples, f"eval/{name}", key=settings.reward_key, threshold=settings.pass_threshold)
            failures = loaded.generator.dispatcher.take_failures()
            metrics |= {f"eval/{name}-failed/{cause}": count for cause, count in failures.items()}
            metrics |= part_metrics(samples, f"eval/{name}/reward_parts")
            metrics |= {f"eval/{name}-left_out": float(loaded.num_too_long)} if settings.longest_prompt else {}
            rewards = [sample.reward_value(settings.reward_key) for sample in samples]
            sets[name] = EvalSamples(samples, rewards, [sample.status is Status.TRUNCATED for sample in samples])
        self._num_done = None
        logged = hooks.call("slime_log_evaluation", step=context.rollout, sets=sets, metrics=metrics)
        return {} if any(logged) else metrics

    async def close(self) -> None:
        """Close connections to other models."""
        for loaded in self._sets.values():
            if loaded.client is not None:
                await loaded.client.close()

    async def _measure(self, loaded: _LoadedSet, context: GenerateContext) -> list[Sample]:
        name = loaded.settings.name
        context = replace(context, encoder=loaded.encoder, client=loaded.client or context.client)
        finished = await self._collect(loaded, context)
        samples = [sample for group in finished for sample in group]
        failed = [sample for sample in samples if sample.reward is None]
        if len(failed) < len(samples):
            loaded.generator.dispatcher.unanswered(failed)
        self._components.writer.write(f"eval-{name}", context.rollout, samples)
        if len(failed) == len(samples):
            raise RunError(
                f"evaluation {name!r}: none of {len(samples)} samples was answered: {describe_failures(failed)}"
            )
        return samples

    async def _collect(self, loaded: _LoadedSet, context: GenerateContext) -> list[PromptGroup]:
        """Return all groups of a set, generated and rewarded."""
        sampling = eval_sampling(loaded.settings, end_ids=loaded.encoder.end_ids)

        async def collect(group: PromptGroup, limit: int) -> PromptGroup:
            limited = replace(sampling, max_new_tokens=limit, min_new_tokens=min(limit, sampling.min_new_tokens))
            samples = await loaded.generator.collect(context, group, limited)
            self._num_done = (self._num_done or 0) + 1
            return samples

        return await run_all(map(collect, copy.deepcopy(loaded.groups), loaded.max_new_tokens))

    def _load(self, eval_set: EvalSet) -> _LoadedSet:
        encoder = self._components.encoder_for(eval_set.apply_chat_template)
        checks = self._components.row_checks(eval_set)
        renders = self._components.renders(eval_set.generate_function, encoder)
        prompt_filter = RunFilter(
            checks, longest=eval_set.longest_prompt, lengths=PromptLengths(encoder), encoder=renders
        )
        groups = self._components.evaluation_prompts(evaluation_request(self._config, eval_set, prompt_filter))
        limits = [_response_limit(eval_set, group, encoder) for group in groups]
        return _LoadedSet(
            eval_set,
            groups,
            limits,
            prompt_filter.count(TOO_LONG),
            encoder,
            self._components.make_generator(eval_set),
            self._make_client(eval_set),
        )

    def _make_client(self, eval_set: EvalSet) -> GenerateClient | None:
        """Return the client of a model other than the policy; requests carry ids of the policy's tokenizer."""
        if eval_set.model is None:
            return None
        rollout = self._config.rollout
        url = self._components.models.get(eval_set.model, eval_set.model)
        return GenerateClient(
            url,
            max_in_flight=rollout.sglang_server_concurrency,
            timeout_s=rollout.rollout_request_timeout_s,
            first_answer_s=self._components.first_answer_s,
        )


def waiting_for(generators: Sequence[GroupGenerator], *clients: GenerateClient) -> dict[str, int]:
    """Return the counts of requests to engines, of samples whose generate function waits for something else, and of
    samples without a reward."""
    requests = sum(client.num_in_flight for client in clients)
    generating = sum((Counter(dict(generator.generating)) for generator in generators), Counter[str]())
    rewards = sum(generator.dispatcher.num_in_flight for generator in generators)
    elsewhere = max(0, generating.total() - requests)
    names = ", ".join(sorted(name for name, count in generating.items() if count))
    return {"engines": requests, f"generate function {names}": elsewhere, "rewards": rewards}


def _response_limit(eval_set: EvalSet, group: PromptGroup, encoder: PromptEncoder) -> int:
    """Return the largest number of tokens of a response of the group."""
    if eval_set.max_context_len is None:
        return eval_set.max_response_len
    prompt_ids = encoder.encode(group[0].prompt, tools=tools_of(group[0].metadata))
    return min(eval_set.max_response_len, eval_set.max_context_len - len(prompt_ids))


MAX_VALUES = 12
"""A metadata field with more values than this describes single prompts, not kinds of prompts."""

MAX_CHARS = 60
"""Longest name and value of a metadata field; a longer value is text."""


def scores(samples: Sequence[Sample], name: str, *, key: str | None, threshold: float = 1.0) -> dict[str, float]:
    """Return the metrics of rewarded samples, in any order.

    Example: for the name ``eval/sums``, the mean reward is ``eval/sums``, and that of the samples with the metadata
    ``carries = 1`` is ``eval/sums/carries=1``; there are ``eval/sums-truncated_ratio``, ``eval/sums-pass@1`` (the
    estimated share of prompts that one response solves), and ``eval/sums/response_len/mean`` and ``.../max`` of the
    samples that were answered.

    Arguments:
        key: which of several rewards counts.
        threshold: smallest reward of a response that solves its prompt.

    Raises:
        ValueError: a sample has no reward.
    """
    rewards = [sample.reward_value(key) for sample in samples]
    truncated = statistics.fmean(float(sample.status is Status.TRUNCATED) for sample in samples)
    passed = pass_rates(solved_generations(samples, rewards, threshold), of_all=True)
    kinds = {field: means.items() for field, means in _by_metadata(samples, rewards).items()}
    return {
        name: statistics.fmean(rewards),
        f"{name}-truncated_ratio": truncated,
        **{f"{name}-pass@{k}": share for k, share in passed.items()},
        **mean_and_max(f"{name}/response_len", [sample.response_length for sample in samples if is_finished(sample)]),
        **{f"{name}/{field}={value}": mean for field, means in kinds.items() for value, mean in means},
    }


def pass_at(k: int, *, n: int, solved: int) -> float:
    """Return the chance that at least one of ``k`` responses solves the prompt, drawn without replacement from ``n``
    responses of which ``solved`` solve it: the unbiased estimator of pass@k (Chen et al. 2021, arXiv 2107.03374,
    equation 1).
    """
    return 1.0 - math.comb(n - solved, k) / math.comb(n, k)


def pass_rates(prompts: Iterable[Sequence[bool]], *, of_all: bool = False) -> dict[int, float]:
    """Return k -> pass@k for k = 1, 2, 4, ... up to the largest number of responses to a prompt: the mean over the
    prompts with at least k responses.

    Arguments:
        prompts: of each prompt, whether each of its responses solves it.
        of_all: also for k = the largest number of responses to a prompt, if it is not a power of two.
    """
    counts = [(len(solved), sum(solved)) for solved in prompts]
    most = max((n for n, _ in counts), default=0)
    ks = sorted({1 << place for place in range(most.bit_length())} | ({most} if of_all and most else set()))
    return {k: statistics.fmean(pass_at(k, n=n, solved=solved) for n, solved in counts if n >= k) for k in ks}


def _by_metadata(samples: Sequence[Sample], rewards: Sequence[float]) -> dict[str, dict[str, float]]:
    """Return metadata field -> value -> mean reward, of fields that describe kinds of prompts."""
    kinds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample, reward in zip(samples, rewards, strict=True):
        for name, value in sample.metadata.items():
            if isinstance(value, str | int | bool):
                kinds[name][str(value)].append(reward)
    return {
        name: {value: statistics.fmean(rewards) for value, rewards in sorted(values.items())}
        for name, values in sorted(kinds.items())
        if 1 < len(values) <= MAX_VALUES and all(map(_is_word, (name, *values)))
    }


def _is_word(text: str) -> bool:
    """Return whether ``text`` can be part of a metric's name."""
    return len(text) <= MAX_CHARS and text.isprintable()
