"""Held-out prompts: generated and rewarded as in training, measured and written down, never trained on.

Each set has its own settings (:mod:`slime_core.config.eval_sets`): how responses are drawn, by which generate function,
who rewards them, and who answers: the policy, or another model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime_core.config.eval_sets import EvalSet, eval_sets
from slime_core.config.mistakes import nearest
from slime_core.config.schema import RunConfig
from slime_core.errors import ConfigError, RunError
from slime_core.generation import GenerateContext
from slime_core.plugins.contracts import DataSource, EvalSamples, PromptFormat, PromptRequest, RunView
from slime_core.plugins.lifecycle import LifecycleHooks
from slime_core.prompts.chat import PromptEncoder
from slime_core.prompts.prompts import PromptFiles
from slime_core.prompts.row_checks import RowCheck
from slime_core.prompts.rows import Prompt, tools_of
from slime_core.rollout.collected_groups import describe_failures
from slime_core.rollout.engines.client import GenerateClient
from slime_core.rollout.eval_scores import EvalScores, score
from slime_core.rollout.group_collector import GroupCollector
from slime_core.rollout.rewards.reward_sum import part_metrics
from slime_core.rollout.run_all import run_all
from slime_core.rollout.sampling_params import eval_sampling
from slime_core.track.samples import SampleWriter
from slime_core.types import PromptGroup, Sample, Status

__all__ = ["EvalComponents", "Evaluation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalComponents:
    """What an evaluation works with.

    Arguments:
        encoder: prompt to ids, by whether prompts are rendered with the chat template.
        collector: generates and rewards a set.
        hooks: of plugins, which may evaluate in its place, or log.
        writer: receives the samples.
        checks: refuses rows that ask for what the run cannot do.
        models: name -> URL of every model that the run serves beside the policy.
        formats: name -> how prompt files are read, besides JSON Lines.
    """

    encoder: Callable[[bool], PromptEncoder]
    collector: Callable[[EvalSet], GroupCollector]
    hooks: LifecycleHooks
    writer: SampleWriter
    checks: RowCheck
    models: Mapping[str, str] = field(default_factory=dict)
    formats: Mapping[str, PromptFormat] = field(default_factory=dict)


@dataclass(slots=True)
class _Loaded:
    """A set with its prompts.

    Arguments:
        groups: never generated themselves; copies are.
        rooms: tokens that the responses of each group may have.
        left_out: prompts that were too long.
        client: None: the policy answers.
    """

    settings: EvalSet
    groups: list[PromptGroup]
    rooms: list[int]
    left_out: int
    encoder: PromptEncoder
    collector: GroupCollector
    client: GenerateClient | None


class Evaluation:
    """All evaluation sets of a run.

    Raises:
        DataError: the prompts of a set cannot be read.
        ConfigError: the run serves no model that a set names.
    """

    def __init__(self, config: RunConfig, measures: EvalComponents) -> None:
        self._config, self._measures = config, measures
        self._loaded = {one.name: self._load(one) for one in eval_sets(config)}

    async def run(self, context: GenerateContext, source: DataSource | None) -> dict[str, float]:
        """Scores of every set under the weights that the engines hold now, as ``eval/...`` metrics.

        Arguments:
            context: of an evaluation; its number is the step's.
            source: of the training prompts, for plugins that evaluate; None: there is none.

        Raises:
            RunError: no sample of a set was answered.
            PluginError: a plugin that evaluates, or logs, failed.
        """
        hooks = self._measures.hooks
        own = await hooks.first("slime_evaluate", step=context.rollout, prompts=source)
        if own is not None:
            return {str(name): float(value) for name, value in own.items()}
        metrics: dict[str, float] = {}
        sets: dict[str, EvalSamples] = {}
        for name, one in self._loaded.items():
            samples = await self._measured(one, context)
            metrics |= _score(one, samples).metrics(f"eval/{name}")
            metrics |= {f"eval/{name}-failed/{cause}": n for cause, n in one.collector.take_failures().items()}
            metrics |= part_metrics(samples, f"eval/{name}/reward_parts")
            metrics |= {f"eval/{name}-left_out": float(one.left_out)} if one.settings.longest_prompt else {}
            sets[name] = _eval_samples(samples, key=one.settings.reward_key)
        logged = hooks.answers("slime_log_evaluation", step=context.rollout, sets=sets, metrics=metrics)
        return {} if any(logged) else metrics

    async def close(self) -> None:
        """Close connections to other models."""
        for one in self._loaded.values():
            if one.client is not None:
                await one.client.close()

    async def _measured(self, one: _Loaded, context: GenerateContext) -> list[Sample]:
        name = one.settings.name
        finished = await self._finished(one, replace(context, encoder=one.encoder, client=one.client or context.client))
        samples = [sample for group in finished for sample in group]
        failed = [sample for sample in samples if sample.reward is None]
        if len(failed) < len(samples):
            one.collector.unanswered(failed)
        self._measures.writer.write(f"eval-{name}", context.rollout, samples)
        if len(failed) == len(samples):
            raise RunError(
                f"evaluation {name!r}: none of {len(samples)} samples was answered: {describe_failures(failed)}"
            )
        return samples

    async def _finished(self, one: _Loaded, context: GenerateContext) -> list[PromptGroup]:
        """All groups of a set, rewarded, each with the room that it has for a response."""
        sampling = eval_sampling(one.settings, end_ids=one.encoder.end_ids)

        async def collected(group: PromptGroup, room: int) -> PromptGroup:
            drawn = replace(sampling, max_new_tokens=room, min_new_tokens=min(room, sampling.min_new_tokens))
            (made,) = await one.collector.collect(context, [group], drawn)
            return made

        return await run_all(map(collected, copy.deepcopy(one.groups), one.rooms))

    def _load(self, one: EvalSet) -> _Loaded:
        encoder = self._measures.encoder(one.apply_chat_template)
        kept: list[bool] = []

        def keeps(prompt: Prompt, tools: list[Any] | None = None) -> bool:
            kept.append(len(encoder.encode(prompt, tools=tools)) <= (one.longest_prompt or 0))
            return kept[-1]

        def keeps_many(asked: Sequence[tuple[Prompt, list[Any] | None]]) -> list[bool]:
            return [keeps(*each) for each in asked]

        request = PromptRequest(
            path=one.path,
            input_key=one.input_key,
            label_key=one.label_key,
            metadata_key=one.metadata_key,
            tool_key=self._config.data.tool_key,
            n_samples_per_prompt=one.n_samples,
            shuffle=False,
            keeps=None if one.longest_prompt is None else keeps,
            keeps_many=None if one.longest_prompt is None else keeps_many,
            formats=self._measures.formats,
            checks=self._measures.checks,
        )
        source = PromptFiles(None, RunView(prompts=request))
        groups = source.next_groups(len(source))
        rooms = [_room(one, group, encoder) for group in groups]
        return _Loaded(one, groups, rooms, kept.count(False), encoder, self._measures.collector(one), self._client(one))

    def _client(self, one: EvalSet) -> GenerateClient | None:
        """Of a model that is not the policy, which answers to token ids of the policy's tokenizer."""
        if one.model is None:
            return None
        models, rollout = self._measures.models, self._config.rollout
        url = one.model if "://" in one.model else models.get(one.model)
        if url is None:
            raise ConfigError(
                f"evaluation set {one.name}: model = {one.model!r}, and beside the policy the run serves "
                f"{', '.join(sorted(models)) or 'none'}{nearest(one.model, models)}. Accepted: one of them, the "
                "address of an SGLang server, or nothing, which is the policy."
            )
        at_once, timeout_s = rollout.sglang_server_concurrency, rollout.rollout_request_timeout_s
        return GenerateClient(url, max_in_flight=at_once, timeout_s=timeout_s)


def _eval_samples(samples: Sequence[Sample], *, key: str | None) -> EvalSamples:
    return EvalSamples(
        list(samples),
        rewards=[sample.reward_value(key) for sample in samples],
        truncated=[sample.status is Status.TRUNCATED for sample in samples],
    )


def _score(one: _Loaded, samples: Sequence[Sample]) -> EvalScores:
    return score(samples, key=one.settings.reward_key, threshold=one.settings.pass_threshold)


def _room(one: EvalSet, group: PromptGroup, encoder: PromptEncoder) -> int:
    """Tokens that the responses of a group may have."""
    if one.max_context_len is None:
        return one.max_response_len
    return min(
        one.max_response_len,
        one.max_context_len - len(encoder.encode(group[0].prompt, tools=tools_of(group[0].metadata))),
    )
