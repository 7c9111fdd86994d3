"""Arguments that describe the run to components and hooks, and the contract of trackers.

RunPlan      the facts before the run starts, for checks of settings
RunView      the plan and the facts of the started run, for components
RunInfo, SamplerInfo, LearnerInfo, TrainStep, EvalSamples    arguments of lifecycle hooks
Tracker      sends metrics somewhere
SampleTracker    a tracker that also receives samples

Importing this module loads neither torch nor Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol, Self, cast, runtime_checkable

from slime_core.contracts.rollouts import PromptRequest
from slime_core.errors import ConfigError
from slime_core.types import JsonValue, Sample, SampleRecord

if TYPE_CHECKING:
    import torch

    from slime_core.generation import Encoder

__all__ = [
    "EvalSamples",
    "LearnerInfo",
    "Optimizer",
    "Place",
    "RunInfo",
    "RunPlan",
    "RunView",
    "SampleTracker",
    "SamplerInfo",
    "Schedule",
    "Tokenizer",
    "Tracker",
    "TrainStep",
]


Device = Literal["auto", "cpu", "cuda"]

_NOT_IN_JSON = frozenset({"prompts"})


class Tokenizer(Protocol):
    """Methods of the checkpoint's tokenizer that a component may call. All tokenizers of transformers have them."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a response. None if the tokenizer has none."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ...

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, JsonValue]],
        *,
        tools: Sequence[Mapping[str, JsonValue]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: Literal[False],
    ) -> str:
        """Return the chat messages as text, rendered by the tokenizer's template."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The plan of a run, known before it starts. Without arguments, a run with default settings.

    Example: ``RunPlan(seed=7, settings={"seed": 7, "grpo.std_normalization": False})``

    Arguments:
        seed: for initialisation, data order and sampling.
        device: device of learner and engines. ``auto`` until the cluster is known.
        rollout_batch_size: prompts of one rollout.
        n_samples_per_prompt: samples of one prompt group.
        max_prompt_len: limit in tokens. None means no limit.
        max_response_len: limit in tokens.
        temperature: sampling temperature in training.
        reward_key: the name of the reward that trains, if there are several. None if rewards are numbers.
        samples_per_step: samples of one optimizer step, over all ranks.
        steps_per_rollout: optimizer steps of one rollout.
        num_data_ranks: number of data-parallel copies of the model.
        num_engines: inference servers of the policy, started by the run or by the user. 0 if rollouts are read.
        settings: read-only; all settings of the core by name, and all options of the active plugins by their name in
            ``config.toml`` (``grpo.std_normalization``). Paths are text, and secrets are omitted.
    """

    seed: int = 1234
    device: Device = "auto"
    rollout_batch_size: int = 32
    n_samples_per_prompt: int = 8
    max_prompt_len: int | None = None
    max_response_len: int = 1024
    temperature: float = 1.0
    reward_key: str | None = None
    samples_per_step: int = 256
    steps_per_rollout: int = 1
    num_data_ranks: int = 1
    num_engines: int = 1
    settings: Mapping[str, JsonValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", MappingProxyType(dict(self.settings)))

    def to_json(self) -> str:
        """Return the record as text for :meth:`from_json`."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name not in _NOT_IN_JSON}
        return json.dumps(values, default=_plain)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the record that :meth:`to_json` wrote."""
        return cls(**json.loads(text))

    def __reduce__(self) -> tuple[Callable[[str], Self], tuple[str]]:
        # Ray and reward processes pickle it. A read-only mapping cannot be pickled, but its JSON can.
        return type(self).from_json, (self.to_json(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView(RunPlan):
    """The plan and the facts of the started run, passed to components. Sent to other processes as JSON.

    Arguments:
        folder: of the run. None in a test of the component alone.
        resumed_step: number of training steps that were done before this start of the run.
        models: name -> URL of every auxiliary model. Empty until their servers answer.
        model_folder: Hugging Face folder with the start weights and the tokenizer. None in a test of the component.
        prompts: the request to a data source. None for all other kinds, and in other processes.
    """

    folder: Path | None = None
    resumed_step: int = 0
    models: Mapping[str, str] = field(default_factory=dict)
    model_folder: Path | None = None
    prompts: PromptRequest | None = None

    def __post_init__(self) -> None:
        # Not super(): without arguments it refers to the class before dataclass added the slots.
        RunPlan.__post_init__(self)
        object.__setattr__(self, "models", MappingProxyType(dict(self.models)))
        for name in ("folder", "model_folder"):
            path: str | Path | None = getattr(self, name)
            object.__setattr__(self, name, None if path is None else Path(path))

    def tokenizer(self) -> Tokenizer:
        """Return the checkpoint's tokenizer. The first call in a process loads it, which takes a second or two.

        Raises:
            ConfigError: the run has no ``model_folder``.
        """
        if self.model_folder is None:
            raise ConfigError(
                "the tokenizer needs a checkpoint, and this run has none. Make RunView with model_folder."
            )
        return _tokenizer(self.model_folder, self.settings.get("trust_remote_code") is True)


@cache
def _tokenizer(folder: Path, trusts: bool) -> Tokenizer:
    from transformers import AutoTokenizer

    return cast(Tokenizer, AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts))


def _plain(value: object) -> JsonValue:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


class Place(StrEnum):
    """The process that calls a hook: the driver, the sampler, or every rank of the learner."""

    DRIVER = "driver"
    SAMPLER = "sampler"
    RANK = "rank"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Facts about the run for hooks of the driver.

    Arguments:
        folder: of the run.
        settings: name -> value of every setting of the core.
        step: number of steps that were done before this start of the run.
        num_rollout: number of steps of the complete run.
    """

    folder: Path
    settings: Mapping[str, JsonValue]
    step: int = 0
    num_rollout: int = 0


class Optimizer(Protocol):
    """The attributes of Megatron's optimizer (``megatron.core.optimizer.MegatronOptimizer``) that a hook may read."""

    @property
    def param_groups(self) -> list[dict[str, object]]:
        """Parameters with their settings, such as ``lr``, in the format of torch's optimizers."""
        ...

    def state_dict(self) -> Mapping[str, object]:
        """The optimizer's state."""
        ...


class Schedule(Protocol):
    """The attributes of Megatron's ``OptimizerParamScheduler`` that a hook may read."""

    @property
    def num_steps(self) -> int:
        """Number of counted steps."""
        ...

    def state_dict(self) -> Mapping[str, object]:
        """The schedule's state."""
        ...


@dataclass(frozen=True, slots=True)
class SamplerInfo:
    """Facts about a process that makes rollouts or evaluations.

    Arguments:
        router_url: URL for generation requests. Empty without engines.
        model_urls: name -> URL of every auxiliary model.
        trains: whether its rollouts are trained. False if it only evaluates.
        encoder: encodes training prompts with the run's chat template. None in a test.
        folder: of the run, for files that a plugin writes. None in a test.
    """

    router_url: str
    model_urls: Mapping[str, str] = field(default_factory=dict)
    trains: bool = True
    encoder: Encoder | None = None
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class EvalSamples:
    """The results on one evaluation set; entry i of each list belongs to sample i.

    Arguments:
        rewards: the reward that counts, one number for each sample.
        truncated: whether the response reached the limit of its length.
    """

    samples: list[Sample]
    rewards: list[float]
    truncated: list[bool]


@dataclass(frozen=True, slots=True)
class LearnerInfo:
    """Facts about a learner rank.

    Arguments:
        rank, world_size: of this process in the learner.
        settings: name -> value of every setting of the core.
        model: the rank's chunks of the model. Empty before they are built.
        optimizer, schedule: of Megatron. None before they are built.
        folder: of the run. None in a test.
    """

    rank: int
    world_size: int
    settings: Mapping[str, JsonValue]
    model: Sequence[torch.nn.Module] = ()
    optimizer: Optimizer | None = None
    schedule: Schedule | None = None
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class TrainStep:
    """One optimizer step.

    Arguments:
        rollout: number of the rollout.
        step: number of the step within the rollout, from 0.
        learner: this rank.
        metrics: after the step, its metrics without the prefix ``train/``: ``loss``, ``grad_norm``, ``lr`` and others.
            Empty before the step.
    """

    rollout: int
    step: int
    learner: LearnerInfo
    metrics: Mapping[str, float] = field(default_factory=dict)


class Tracker(Protocol):
    """Sends metrics somewhere. Its exceptions do not end the run; after three of them it is not called again."""

    def start(self, run: RunView) -> None:
        """Called once when the run starts or resumes (``run.resumed_step``), before any metrics. The folder exists."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of one step.

        Steps increase, except for evaluations during training: they are logged at their end, with the step whose
        weights they measured.
        """
        ...

    def close(self, error: BaseException | None) -> None:
        """Flush and close. Called once, also if the run failed.

        Arguments:
            error: the exception that ended the run. None after the last rollout.
        """
        ...


@runtime_checkable
class SampleTracker(Tracker, Protocol):
    """A tracker that also receives samples. The driver reads them only for trackers with this method."""

    def samples(self, kind: Literal["train", "eval"], step: int, rows: Iterable[SampleRecord]) -> None:
        """Record the samples of one rollout or evaluation.

        Called after :meth:`log` of the same step, or after an evaluation of the weights of ``step``. Iteration reads
        the rows from disk one by one. An evaluation has the rows of all its sets.
        """
        ...
