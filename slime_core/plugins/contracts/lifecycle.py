"""What the lifecycle hooks are given: records of where a run stands. Importing it loads no torch and no Megatron."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slime_core.types import JsonValue, Sample

if TYPE_CHECKING:
    import torch

__all__ = ["EvalSamples", "LearnerInfo", "Optimizer", "Place", "RunInfo", "SamplerInfo", "Schedule", "TrainStep"]


class Place(StrEnum):
    """Where a hook is called: the driver, the sampler's process, or every rank of the learner."""

    DRIVER = "driver"
    SAMPLER = "sampler"
    RANK = "rank"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run, as the driver knows it.

    Arguments:
        folder: of the run.
        settings: setting name -> value of every setting of the core.
        step: steps done when it started: 0, or what it resumed from.
        num_rollout: steps it will have done at its end.
    """

    folder: Path
    settings: Mapping[str, JsonValue]
    step: int = 0
    num_rollout: int = 0


class Optimizer(Protocol):
    """What a hook may read of Megatron's optimizer (``megatron.core.optimizer.MegatronOptimizer``)."""

    @property
    def param_groups(self) -> list[dict[str, object]]:
        """Parameters with their settings, such as ``lr``, as torch's optimizers hold them."""
        ...

    def state_dict(self) -> Mapping[str, object]:
        """The optimizer's state."""
        ...


class Schedule(Protocol):
    """What a hook may read of Megatron's ``OptimizerParamScheduler``."""

    @property
    def num_steps(self) -> int:
        """Steps that it has counted."""
        ...

    def state_dict(self) -> Mapping[str, object]:
        """The schedule's state."""
        ...


@dataclass(frozen=True, slots=True)
class SamplerInfo:
    """The process that makes rollouts, or evaluations.

    Arguments:
        router_url: where generation requests go; empty: no engine is started.
        model_urls: name -> URL of every model that is served beside the policy.
        trains: its rollouts are trained; False: it only evaluates.
    """

    router_url: str
    model_urls: Mapping[str, str] = field(default_factory=dict)
    trains: bool = True


@dataclass(frozen=True, slots=True)
class EvalSamples:
    """What was measured on one evaluation set; entry i of each list belongs to sample i.

    Arguments:
        rewards: those that count, one number a sample.
        truncated: whether the response was cut at its longest.
    """

    samples: list[Sample]
    rewards: list[float]
    truncated: list[bool]


@dataclass(frozen=True, slots=True)
class LearnerInfo:
    """One learner rank.

    Arguments:
        rank, world_size: of the process among the learner's.
        settings: setting name -> value of every setting of the core.
        model: the chunks of the model that the rank holds; empty before they are built.
        optimizer, schedule: Megatron's; None before they are built.
    """

    rank: int
    world_size: int
    settings: Mapping[str, JsonValue]
    model: Sequence[torch.nn.Module] = ()
    optimizer: Optimizer | None = None
    schedule: Schedule | None = None


@dataclass(frozen=True, slots=True)
class TrainStep:
    """One optimizer step.

    Arguments:
        rollout: number of the rollout.
        step: number of the step within the rollout, from 0.
        learner: the rank that takes it.
        metrics: the step's metrics, once it is done; empty before. ``loss``, ``grad_norm``, ``lr`` and the
            other names of a run's metrics, without their ``train/``.
    """

    rollout: int
    step: int
    learner: LearnerInfo
    metrics: Mapping[str, float] = field(default_factory=dict)
