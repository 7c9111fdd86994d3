"""The suite of rollout sources: groups that can be trained, no lost prompts, and a state that can be restored.

A source that generates uses the fake engine, over HTTP and through a run's client.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from slime_core import DataSource, boundary
from slime_core.errors import PluginError
from slime_core.generation import GenerateContext, SamplingParams
from slime_core.types import PromptGroup, Sample, Status
from slime_testing.fake_engine import FakeEngine
from slime_testing.generation import SAMPLING, make_context, make_engine, require_log_probs, require_sampled
from slime_testing.harness import Kind
from slime_testing.harness.engines import connect
from slime_testing.pairs import pairing_encoder
from slime_testing.suite import ComponentSuite, PropertyViolation, require

__all__ = ["RolloutSourceSuite"]

WANTED = 3


class RolloutSourceSuite(ComponentSuite):
    """For rollout sources; each test makes two rollouts of three groups.

    Attributes:
        samples_per_prompt: size of the prompt groups that the source may take.
    """

    kind: ClassVar[Kind] = Kind.ROLLOUT_SOURCE
    samples_per_prompt: ClassVar[int] = 2

    def test_a_rollout_has_groups_of_samples_that_can_be_trained(self) -> None:
        for batch, _ in self._rollouts(self.make()):
            require(bool(batch.groups), f"rollout {batch.rollout}: no group was added")
            require(batch.wanted >= 1, f"rollout {batch.rollout}: wanted is {batch.wanted}; accepted: 1 or more")
            for group in batch.groups:
                for sample in group:
                    _require_trainable(sample)

    def test_what_the_engine_sampled_is_added_as_it_was_sampled(self) -> None:
        for batch, _ in self._rollouts(self.make()):
            generated = [sample for group in batch.groups for sample in group if sample.weight_versions]
            require(
                bool(generated) or not batch.sampled,
                f"rollout {batch.rollout}: the engine sampled {len(batch.sampled)} responses, and no sample has "
                "weight_versions; copy them from the engine's answers, as Trajectory.finish does",
            )
            for sample in generated:
                require_sampled(sample, batch.sampled)
                require_log_probs(sample, sampled=True)

    def test_a_prompt_that_was_taken_is_added_or_put_back(self) -> None:
        prompts = _Prompts(self.samples_per_prompt)
        batches = [batch for batch, _ in self._rollouts(self.make(), prompts)]
        added = {sample.group_index for batch in batches for group in batch.groups for sample in group}
        lost = sorted(prompts.open - added)
        require(not lost, f"the groups {lost} were taken, and neither added nor put back")

    def test_no_sample_is_there_twice(self) -> None:
        for batch, _ in self._rollouts(self.make()):
            alone = [sample for group in batch.groups for sample in group if sample.rollout_id is None]
            numbers = Counter((sample.group_index, sample.index) for sample in alone)
            twice = [number for number, count in numbers.items() if count > 1]
            require(not twice, f"rollout {batch.rollout}: the samples {twice} (group, index) were added twice")

    def test_the_metrics_are_finite_numbers(self) -> None:
        for batch, metrics in self._rollouts(self.make()):
            require(
                isinstance(metrics, Mapping), f"fill() returned a {type(metrics).__name__}; accepted: a dict of metrics"
            )
            malformed = [name for name, value in metrics.items() if not _is_finite(value) or not isinstance(name, str)]
            require(
                not malformed, f"rollout {batch.rollout}: the metrics {malformed} are no finite numbers with a name"
            )

    def test_another_source_continues_from_its_state(self) -> None:
        source, prompts = self.make(), _Prompts(self.samples_per_prompt)
        (first,) = self._rollouts(source, prompts, count=1)
        state = _through_json(source.state())
        again = self.make()
        if state:
            again.restore(state)
        require(
            _through_json(again.state()) == state,
            f"state() of the source that was restored is {again.state()}, and that of the first one was {state}",
        )
        ((batch, _),) = self._rollouts(again, prompts, first=first[0].rollout + 1, count=1)
        require(bool(batch.groups), "the source that was restored adds no group")

    def _rollouts(
        self, source: Any, prompts: _Prompts | None = None, *, first: int = 0, count: int = 2
    ) -> list[tuple[_Batch, Any]]:
        """Return the batches of ``count`` rollouts and the metrics that ``fill`` returned for each."""
        rollouts, prompts = [], prompts or _Prompts(self.samples_per_prompt)
        for number in range(first, first + count):
            with make_engine() as engine:
                batch = _Batch(number, prompts, engine)
                try:
                    with boundary("the rollout source", f"fill() of rollout {number}"):
                        rollouts.append((batch, asyncio.run(batch.filled_by(source))))
                except PluginError as failure:
                    raise PropertyViolation(str(failure)) from failure.__cause__
        return rollouts


class _Prompts(DataSource):
    """An endless data source of pending samples; ``open`` has the groups that were taken and not put back."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._next = 0
        self.open = set[int]()
        self._returned: list[PromptGroup] = []

    def next_groups(self, n: int) -> list[PromptGroup]:
        again, self._returned = self._returned[:n], self._returned[n:]
        numbers = range(self._next, self._next + n - len(again))
        self._next = numbers.stop
        groups = [*again, *map(self._group, numbers)]
        self.open |= {group[0].group_index or 0 for group in groups}
        return groups

    def _group(self, number: int) -> PromptGroup:
        indices = range(number * self._size, (number + 1) * self._size)
        prompt, label = f"{number} + 1 =", str(number + 1)
        return [Sample(group_index=number, index=index, prompt=prompt, label=label) for index in indices]

    def put_back(self, groups: Sequence[PromptGroup]) -> None:
        self._returned += groups
        self.open -= {group[0].group_index or 0 for group in groups}

    def state(self) -> dict[str, Any]:
        return {"next": self._next}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]

    def __len__(self) -> int:
        return 1000


class _Batch:
    """A rollout batch that accepts every group.

    Attributes:
        groups: the added groups.
        sampled: prompt and response ids of all that the engine has generated.
    """

    def __init__(self, rollout: int, prompts: _Prompts, engine: FakeEngine) -> None:
        self.rollout = rollout
        self.prompts = prompts
        self.wanted = WANTED
        self.groups: list[PromptGroup] = []
        self._engine = engine
        self._context: GenerateContext | None = None

    async def filled_by(self, source: Any) -> Any:
        """Call ``source.fill`` with a client of the engine; return its result."""
        encoder = pairing_encoder(apply_chat_template=False)
        async with connect(self._engine.url, vocab_size=encoder.vocab_size) as client:
            self._context = make_context(client, encoder, rollout=self.rollout)
            return await source.fill(self)

    @property
    def sampled(self) -> list[tuple[list[int], list[int]]]:
        return self._engine.sampled

    def generation(self, sample: Sample) -> tuple[GenerateContext, SamplingParams]:
        del sample
        if self._context is None:
            raise RuntimeError("generation() is for fill()")
        return self._context, SAMPLING

    @property
    def missing(self) -> int:
        return max(0, self.wanted - len(self.groups))

    async def add(self, groups: Sequence[PromptGroup]) -> None:
        for group in groups:
            is_group = bool(group) and all(isinstance(sample, Sample) for sample in group)
            require(is_group, f"add() was handed {group!r:.80}; accepted: lists of at least one Sample")
        self.groups += groups


def _require_trainable(sample: Sample) -> None:
    who = f"sample {(sample.group_index, sample.index)}"
    require(sample.group_index is not None and sample.index is not None, f"{who} has no group_index or no index")
    if sample.status not in (Status.COMPLETED, Status.TRUNCATED):
        require(sample.status is not Status.PENDING, f"{who} is pending; groups are added when they are finished")
        return
    length = sample.response_length
    require(0 < length < len(sample.tokens), f"{who} has {length} response tokens of {len(sample.tokens)} in all")
    columns = {"loss_mask": sample.loss_mask, "rollout_log_probs": sample.rollout_log_probs}
    misshapen = [name for name, column in columns.items() if column is not None and len(column) != length]
    require(not misshapen, f"{who} has {length} response tokens and another number of {', '.join(misshapen)}")
    if sample.reward is not None:
        rewards = sample.reward.values() if isinstance(sample.reward, Mapping) else [sample.reward]
        require(all(map(_is_finite, rewards)), f"{who} has the reward {sample.reward}")


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _through_json(state: Any) -> Any:
    try:
        return json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as failure:
        raise PropertyViolation(f"state() returned {state!r:.200}, which JSON cannot hold: {failure}") from None
