"""Lower bounds of what a run needs of a machine without GPUs: memory, shared memory and core seconds.

Counted: weights, gradients and Adam's state of actor and critic, the reference, the engines' weights, and the processes
themselves. Left out: activations, the KV cache, buffers while weights are loaded or saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slime_core.config.model_config import start_weights
from slime_core.config.schema import RunConfig
from slime_core.errors import ConfigError, WeightSyncError
from slime_core.weights.specs import expected_specs, require_complete_files

GIB = 2**30
MIB = 2**20
KIB = 2**10

RUN_BYTES = int(0.9 * GIB)
RANK_BYTES = int(0.4 * GIB)
ENGINE_BYTES = int(0.5 * GIB)
"""Proportional set sizes (PSS) in the embedded run on two cores: driver, sampler, router and Ray 1.0 GB, a learner rank
before its first step 0.43 GB, an engine 0.73 GB; less a margin, because processes share what they import."""

START_SECONDS = 4.0
"""CPU time to start an engine or a learner rank, nearly all of it for imports. Measured: 6 s and 5 s."""

SEMAPHORE_BYTES = 24 * 2**10
"""All that a run of two steps put into a /dev/shm of 1 MiB."""

FLOAT32 = 4

OUTPUT_LAYER = "lm_head.weight"
"""A critic has no output layer; its head is one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The needs of one run.

    Example, a model of 1e9 parameters in float32, one rank and one engine: 16e9 bytes of learner (weights, gradients
    and two moments), 4e9 of engine, and those of the processes.

    Arguments:
        parameters: of the model.
        item: bytes of one weight in the run's dtype: 4, or 2 with bf16.
        ranks: learner processes; 0: nothing trains.
        copies: of the model that the ranks hold together.
        engines: inference servers.
        roles: weight sets in addition to the actor's that the ranks hold: reference, teacher, old actor.
        buffer: bytes of a bucket of weights that travels through shared memory, two at once; 0: they travel otherwise.
        critic_parameters: of the critic; 0: there is none.
        critic_ranks: processes of a separate critic; 0: it shares the learner's.
        critic_copies: of the critic that its ranks hold together.
        sizes: Hugging Face name -> parameters, of the model.
    """

    parameters: int
    item: int
    ranks: int
    copies: int
    engines: int
    roles: int
    buffer: int
    critic_parameters: int = 0
    critic_ranks: int = 0
    critic_copies: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, config: RunConfig, *, trains: bool, critic: bool = False) -> Needs:
        """The needs of a run; reads the headers of the start weights.

        Arguments:
            critic: the advantage estimator reads values.

        Raises:
            ConfigError: there are no weights, or they cannot be read.
        """
        trains = trains and config.debug.trains
        sizes = _sizes(start_weights(config), needed=trains)
        weights, parallel = config.weights, config.parallel
        has_critic = trains and critic
        return cls(
            parameters=sum(sizes.values()),
            item=2 if config.model.bf16 else FLOAT32,
            ranks=config.num_learner_ranks if trains else 0,
            copies=config.num_data_ranks * parallel.context_parallel_size if trains else 0,
            engines=sum(group.num_engines for group in (*config.engine_groups, *config.eval_groups)),
            roles=_roles(config) if trains else 0,
            buffer=weights.update_weight_buffer_size if config.transport == "tensor" and trains else 0,
            critic_parameters=sum(sizes.values()) - sizes.get(OUTPUT_LAYER, 0) if has_critic else 0,
            critic_ranks=config.num_critic_ranks if has_critic else 0,
            critic_copies=_critic_copies(config) if has_critic else 0,
            sizes=sizes,
        )

    @property
    def processes(self) -> str:
        """The number of processes as a sum, in words."""
        critic = f" + {self.critic_ranks} (critic ranks)" if self.critic_ranks else ""
        return f"{self.ranks} (learner ranks){critic} + {self.engines} (engines) = {self._started} processes"

    @property
    def start_core_seconds(self) -> float:
        """Seconds of one core until all processes have started."""
        return START_SECONDS * self._started

    @property
    def memory(self) -> int:
        """Bytes of memory that the whole run needs."""
        return self._learner + self._critic + self._engine + self._fixed

    @property
    def memory_sum(self) -> str:
        """The sum that gives :attr:`memory`, in GiB."""
        parts = {
            f"learner ({self.parameters:,} parameters x {self._learner_words})": self._learner,
            f"critic ({self.critic_parameters:,} parameters x {self._critic_words})": self._critic,
            f"engines ({self.engines} x {self.item} bytes)": self._engine,
            "processes": self._fixed,
        }
        listed = " + ".join(f"{size / GIB:.1f} {name}" for name, size in parts.items() if size)
        return f"{listed} = {self.memory / GIB:.1f}"

    @property
    def of_rank(self) -> int:
        """Bytes of weights, gradients and optimizer that one learner rank holds, if they are spread evenly."""
        shared = 0 if self.critic_ranks else self._critic
        return (self._learner + shared) // self.ranks if self.ranks else 0

    @property
    def of_critic_rank(self) -> int:
        """As :attr:`of_rank`, of a separate critic; 0: there is none."""
        return self._critic // self.critic_ranks if self.critic_ranks else 0

    @property
    def of_engine(self) -> int:
        """Bytes of weights that one engine holds, on all its devices together."""
        return self.parameters * self.item

    @property
    def shared_memory(self) -> int:
        """Bytes of /dev/shm: semaphores, and weights on their way. What has no room there, Ray keeps in /tmp."""
        return SEMAPHORE_BYTES + min(2 * self.buffer, self.parameters * self.item)

    @property
    def _learner(self) -> int:
        return self.parameters * self._learner_item

    @property
    def _critic(self) -> int:
        return self.critic_parameters * self._critic_item

    @property
    def _critic_item(self) -> int:
        """As :attr:`_learner_item`; a critic has no frozen copies (roles)."""
        return self.critic_copies * (self.item + FLOAT32) + self._shared_item

    @property
    def _critic_words(self) -> str:
        copies = f"{self.critic_copies} x ({self.item} weights + {FLOAT32} gradients)"
        return f"({copies} + {self._shared_item} optimizer) = {self._critic_item} bytes"

    @property
    def _learner_item(self) -> int:
        """Bytes a parameter takes in all ranks together.

        Weights and float32 gradients in each copy; once, because Megatron's distributed optimizer shards them over the
        copies, Adam's two moments and, for bfloat16, a float32 master.
        """
        if not self.copies:
            return 0
        per_copy = self.item * (1 + self.roles) + FLOAT32
        return self.copies * per_copy + self._shared_item

    @property
    def _shared_item(self) -> int:
        return 2 * FLOAT32 + (FLOAT32 if self.item < FLOAT32 else 0)

    @property
    def _learner_words(self) -> str:
        roles = f" + {self.roles} x {self.item} other roles" if self.roles else ""
        return (
            f"({self.copies} x ({self.item} weights{roles} + {FLOAT32} gradients) + {self._shared_item} "
            f"optimizer) = {self._learner_item} bytes"
        )

    @property
    def _engine(self) -> int:
        return self.engines * self.parameters * self.item

    @property
    def _fixed(self) -> int:
        return RUN_BYTES + (self.ranks + self.critic_ranks) * RANK_BYTES + self.engines * ENGINE_BYTES

    @property
    def _started(self) -> int:
        return self.ranks + self.critic_ranks + self.engines


def _roles(config: RunConfig) -> int:
    algorithm = config.algorithm
    return (algorithm.use_kl_loss or algorithm.kl_coef > 0) + algorithm.use_opd + algorithm.keep_old_actor


def _critic_copies(config: RunConfig) -> int:
    ranks, cut = config.num_critic_ranks, config.critic_parallel
    if not ranks:
        ranks, cut = config.num_learner_ranks, config.parallel
    return ranks // cut.model_size * cut.context_parallel_size


def _sizes(folder: Path, *, needed: bool) -> dict[str, int]:
    """Hugging Face name -> number of parameters."""
    if not needed and not any(folder.glob("*.safetensors")):
        return {}  # an engine also takes weights of other formats, a learner does not
    try:
        require_complete_files(folder)
        return {name: math.prod(spec.shape) for name, spec in expected_specs(folder).items()}
    except WeightSyncError as error:
        raise ConfigError(f"hf_checkpoint: {error}") from error
