"""Arguments about their run that components and hooks receive, and the contract of trackers.

RunPlan      what is known before anything starts; checks of settings get it
RunView      the plan, and what exists once processes start; every component is made with it
RunInfo, SamplerInfo, LearnerInfo, TrainStep, EvalSamples    what lifecycle hooks get
Tracker      sends metrics somewhere
SampleTracker    a tracker that also takes samples

Importing this loads no torch and no Megatron.
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
    """The methods of the checkpoint's tokenizer that a component may call; transformers' own have them all."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a response; None: the tokenizer has none."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        ...

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, JsonValue]],
        *,
        tools: Sequence[Mapping[str, JsonValue]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: Literal[False],
    ) -> str:
        """Text of chat messages by the tokenizer's template."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """The plan of a run, known before anything starts; without arguments, a run with every setting at its default.

    Example: ``RunPlan(seed=7, settings={"seed": 7, "grpo.std_normalization": False})``

    Arguments:
        seed: of initialisation, data order and sampling.
        device: where learner and engines compute; ``auto`` until the cluster has been looked at.
        rollout_batch_size: prompts of one rollout.
        n_samples_per_prompt: samples of one prompt group.
        max_prompt_len: tokens; None: no prompt is too long.
        max_response_len: tokens.
        temperature: of sampling in training.
        reward_key: which of several rewards trains; None: rewards are plain numbers.
        samples_per_step: of one optimizer step, over all ranks.
        steps_per_rollout: optimizer steps of one rollout.
        num_data_ranks: copies of the model that train, each on samples of its own.
        num_engines: inference servers of the policy, started by the run or by the user; 0 where rollouts are read.
        settings: read-only; every setting of the core by its name, and every option of the active plugins by its name
            in ``config.toml`` (``grpo.std_normalization``). Paths are text, and what holds a secret is left out.
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
        """The record as text; :meth:`from_json` reads it back."""
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _NOT_IN_JSON}
        return json.dumps(found, default=_plain)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the text that :meth:`to_json` wrote."""
        return cls(**json.loads(text))

    def __reduce__(self) -> tuple[Callable[[str], Self], tuple[str]]:
        # Ray and reward processes pickle it; a read-only mapping cannot be pickled, its JSON can.
        return type(self).from_json, (self.to_json(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView(RunPlan):
    """The argument with which a component is made: the plan, and facts of the started run. Crosses processes as JSON.

    Arguments:
        folder: of the run; None: there is none, as in a test of the component alone.
        resumed_step: training steps done when this start of the run began; 0: it does not resume.
        models: name -> URL of every auxiliary model; empty until their servers answer.
        model_folder: Hugging Face folder with the start weights and the tokenizer; None: as with ``folder``.
        prompts: the request to a data source; None for every other kind. It stays in its process.
    """

    folder: Path | None = None
    resumed_step: int = 0
    models: Mapping[str, str] = field(default_factory=dict)
    model_folder: Path | None = None
    prompts: PromptRequest | None = None

    def __post_init__(self) -> None:
        # Named: in a class with slots, super() without arguments means the class before slots were made.
        RunPlan.__post_init__(self)
        object.__setattr__(self, "models", MappingProxyType(dict(self.models)))
        for name in ("folder", "model_folder"):
            path: str | Path | None = getattr(self, name)
            object.__setattr__(self, name, None if path is None else Path(path))

    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, loaded at the first call, once a process; takes a second or two.

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
    """The place of a hook's call: the driver, the sampler's process, or every rank of the learner."""

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
    """The attributes of Megatron's optimizer (``megatron.core.optimizer.MegatronOptimizer``) that a hook may read."""

    @property
    def param_groups(self) -> list[dict[str, object]]:
        """Parameters with their settings, such as ``lr``, as torch's optimizers hold them."""
        ...

    def state_dict(self) -> Mapping[str, object]:
        """The optimizer's state."""
        ...


class Schedule(Protocol):
    """The attributes of Megatron's ``OptimizerParamScheduler`` that a hook may read."""

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
        model_urls: name -> URL of every model that is served in addition to the policy.
        trains: its rollouts are trained; False: it only evaluates.
        encoder: encodes training prompts, with the run's chat template; None: there is none, as in a test.
        folder: of the run, for files that a plugin writes; None: there is none, as in a test.
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
        rewards: those that count, one number per sample.
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
        folder: of the run; None: there is none, as in a test.
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
        learner: the rank that takes it.
        metrics: the step's metrics, once it is done; empty before. ``loss``, ``grad_norm``, ``lr`` and the
            other names of a run's metrics, without their ``train/``.
    """

    rollout: int
    step: int
    learner: LearnerInfo
    metrics: Mapping[str, float] = field(default_factory=dict)


class Tracker(Protocol):
    """Sends metrics somewhere: an observer, whose failure never ends a run; after three it is called no more."""

    def start(self, run: RunView) -> None:
        """The run starts, or resumes (``run.resumed_step``); its folder exists. Called once, before any metrics."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of one step.

        Steps rise, but for an evaluation that went on during training: it is logged when it has ended, under the step
        that it measured.
        """
        ...

    def close(self, error: BaseException | None) -> None:
        """Flush and let go; called once, also when the run failed.

        Arguments:
            error: what ended the run; None: it reached its last rollout.
        """
        ...


@runtime_checkable
class SampleTracker(Tracker, Protocol):
    """A tracker that also sees the samples; the driver reads them only for a tracker that has this method."""

    def samples(self, kind: Literal["train", "eval"], step: int, rows: Iterable[SampleRecord]) -> None:
        """The samples of one rollout or of one evaluation, as the run wrote them down.

        Called after :meth:`log` of the same step, or when an evaluation of the weights of ``step`` has ended. The rows
        are read from disk one at a time while they are iterated; an evaluation has those of all its sets.
        """
        ...
