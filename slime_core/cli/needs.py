"""What a run needs at least of a machine without GPUs: bytes, shared bytes and seconds of cores; lower bounds.

Counted: weights, gradients, Adam's state, the reference, the engines' weights, and the processes themselves. Left out:
activations, the KV cache, buffers while weights are loaded or saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from slime_core.config.described import start_weights
from slime_core.config.schema import RunConfig
from slime_core.errors import ConfigError, WeightSyncError
from slime_core.weights.specs import expected_specs
from slime_core.weights.whole import refuse_cut

__all__ = ["GIB", "KIB", "MIB", "Needs"]

GIB = 2**30
MIB = 2**20
KIB = 2**10

RUN_BYTES = int(0.9 * GIB)
RANK_BYTES = int(0.4 * GIB)
ENGINE_BYTES = int(0.5 * GIB)
"""Proportional set sizes (PSS) in the embedded run on two cores: driver, sampler, router and Ray 1.0 GB, a learner rank
before its first step 0.43 GB, an engine 0.73 GB; less a margin, because processes share what they import."""

START_SECONDS = 4.0
"""Of a core, for an engine or a learner rank; nearly all of it imports. Measured: 6 s and 5 s."""

SEMAPHORE_BYTES = 24 * 2**10
"""All that a run of two steps put into a /dev/shm of 1 MiB."""

FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a run needs.

    Example, a model of 1e9 parameters in float32, one rank and one engine: 16e9 bytes of learner (weights, gradients
    and two moments), 4e9 of engine, and those of the processes.

    Arguments:
        parameters: of the model.
        item: bytes of one weight in the run's dtype: 4, or 2 with bf16.
        ranks: learner processes; 0: nothing trains.
        copies: of the model that the ranks hold together.
        engines: inference servers.
        roles: weight sets beside the actor's that the ranks hold: reference, teacher, old actor.
        buffer: bytes of weights that travel through shared memory at once; 0: they travel otherwise.
    """

    parameters: int
    item: int
    ranks: int
    copies: int
    engines: int
    roles: int
    buffer: int

    @classmethod
    def of(cls, config: RunConfig, *, trains: bool) -> Needs:
        """Those of a run; reads the headers of the start weights.

        Raises:
            ConfigError: there are no weights, or they cannot be read.
        """
        trains = trains and config.debug.trains
        parameters = _parameters(start_weights(config), needed=trains)
        weights, parallel = config.weights, config.parallel
        return cls(
            parameters=parameters,
            item=2 if config.model.bf16 else FLOAT32,
            ranks=config.num_learner_ranks if trains else 0,
            copies=config.num_data_ranks * parallel.context_parallel_size if trains else 0,
            engines=config.num_engines,
            roles=_roles(config) if trains else 0,
            buffer=weights.update_weight_buffer_size if config.transport == "tensor" and trains else 0,
        )

    @property
    def processes(self) -> str:
        """How many, in words."""
        return f"{self.ranks} (learner ranks) + {self.engines} (engines) = {self.ranks + self.engines} processes"

    @property
    def start_core_seconds(self) -> float:
        """Seconds of one core until all processes have started."""
        return START_SECONDS * (self.ranks + self.engines)

    @property
    def memory(self) -> int:
        """Bytes."""
        return self._learner + self._engine + self._fixed

    @property
    def memory_sum(self) -> str:
        """The addition behind :attr:`memory`, in GiB."""
        parts = {
            f"learner ({self.parameters:,} parameters x {self._learner_words})": self._learner,
            f"engines ({self.engines} x {self.item} bytes)": self._engine,
            "processes": self._fixed,
        }
        listed = " + ".join(f"{size / GIB:.1f} {name}" for name, size in parts.items() if size)
        return f"{listed} = {self.memory / GIB:.1f}"

    @property
    def of_rank(self) -> int:
        """Bytes of weights, gradients and optimizer that one learner rank holds, if they are spread evenly."""
        return self._learner // self.ranks if self.ranks else 0

    @property
    def of_engine(self) -> int:
        """Bytes of weights that one engine holds, on all its devices together."""
        return self.parameters * self.item

    @property
    def shared_memory(self) -> int:
        """Bytes of /dev/shm: semaphores, and weights on their way. What has no room there, Ray keeps in /tmp."""
        return SEMAPHORE_BYTES + min(self.buffer, self.parameters * self.item)

    @property
    def _learner(self) -> int:
        return self.parameters * self._learner_item

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
        return RUN_BYTES + self.ranks * RANK_BYTES + self.engines * ENGINE_BYTES


def _roles(config: RunConfig) -> int:
    algorithm = config.algorithm
    return (algorithm.use_kl_loss or algorithm.kl_coef > 0) + algorithm.use_opd + algorithm.keep_old_actor


def _parameters(folder: Path, *, needed: bool) -> int:
    if not needed and not any(folder.glob("*.safetensors")):
        return 0  # an engine also takes weights of other formats, a learner does not
    try:
        refuse_cut(folder)
        return sum(math.prod(spec.shape) for spec in expected_specs(folder).values())
    except WeightSyncError as error:
        raise ConfigError(f"hf_checkpoint: {error}") from error
