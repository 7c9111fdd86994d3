"""What mypy accepts and refuses of calls to actors. Nothing here runs: each line that is ignored has to be a mistake,
because mypy, in strict mode, reports an ignored line that is none."""

from __future__ import annotations

from typing import assert_type

from slime_core.learner.actor import CriticActor, LearnerActor, RankResult
from slime_core.plugins.manifest import Manifest
from slime_core.rollout.actor import SampledShards, SamplerActor
from slime_core.rollout.engines.actors import EngineActor
from slime_core.runtime.actors import Actor, ActorGroup, Call, Launch, Watched, start_actor
from slime_core.runtime.waiting import Wait


def calls_return_what_the_method_returns(learner: Actor[LearnerActor], sampler: Actor[SamplerActor]) -> None:
    assert_type(learner.start(LearnerActor.publish, 3), Call[float])
    assert_type(learner.start(LearnerActor.publish_for_evaluation, version=3), Call[None])
    assert_type(learner.start(LearnerActor.free_address, reachable=True), Call[str])
    assert_type(sampler.start(SamplerActor.sample, 7), Call[SampledShards])  # what the coroutine returns, not itself
    assert_type(sampler.start(Watched.stacks), Call[str])


def arguments_are_those_of_the_method(learner: Actor[LearnerActor], sampler: Actor[SamplerActor]) -> None:
    learner.start(LearnerActor.publish, "3")  # type: ignore[call-overload]
    learner.start(LearnerActor.publish)  # type: ignore[call-overload]
    learner.start(LearnerActor.setup, address=True)  # type: ignore[call-overload]
    sampler.start(SamplerActor.sample, "7")  # type: ignore[call-overload]
    sampler.start(SamplerActor.sample, 7, 8)  # type: ignore[call-overload]


def methods_are_those_of_the_actor(learner: Actor[LearnerActor], sampler: Actor[SamplerActor]) -> None:
    learner.start("publish", 3)  # type: ignore[call-overload]
    learner.start(LearnerActor.publsh, 3)  # type: ignore[attr-defined,call-overload]
    learner.start(CriticActor.values, [])  # type: ignore[call-overload]
    sampler.start(LearnerActor.onload)  # type: ignore[call-overload]


def groups_are_called_likewise(group: ActorGroup[LearnerActor], engines: ActorGroup[EngineActor]) -> None:
    assert_type(group.start(LearnerActor.publish, 3), list[Call[float]])
    assert_type(engines.start(EngineActor.release_memory, "weights", "kv_cache"), list[Call[None]])
    group.start(LearnerActor.publish, "3")  # type: ignore[arg-type]
    group.start_each(LearnerActor.setup, [3])  # type: ignore[arg-type]
    engines.start(EngineActor.pause, "whenever")  # type: ignore[arg-type]


def a_wait_returns_what_the_calls_return(wait: Wait, group: ActorGroup[LearnerActor]) -> None:
    assert_type(wait(group.start(LearnerActor.publish, 3), what="weights"), list[float])
    assert_type(wait(group.start(LearnerActor.train, []), what="training"), list[RankResult])


def an_actor_starts_with_the_arguments_of_its_class(manifest: Manifest) -> None:
    assert_type(start_actor(Launch("sampler"), SamplerActor, manifest), Actor[SamplerActor])
    start_actor(Launch("sampler"), SamplerActor)  # type: ignore[call-arg]
    start_actor(Launch("sampler"), SamplerActor, "manifest")  # type: ignore[arg-type]
    start_actor(Launch("sampler"), dict)  # type: ignore[type-var]
