"""Trains the actor with Megatron-core. Of the other packages, modeling, weights and checkpoint import it.

The path of a rollout, in reading order:

    handle            all ranks, as the driver calls them
    actor             the ranks of learner and critic as Ray actors
    rank              one rank: ``LearnerRank.train`` runs the steps below, after the log-probabilities (a forward pass
                      for each role that the run reads) and the critic's values; writes training data to a file
    micro_batches     packs the samples of a shard into rows
    advantages        fills the advantages that the steps read
    parity            compares the log-probabilities of learner and engines, and ends the run if they differ
    frozen_models     weights of reference, teacher and old actor, loaded into the actor's model for a pass; the
                      columns that the run reads
    trained_model     chunks in DDP; passes through Megatron's schedule, the optimizer step
    objective         policy loss, KL divergence, entropy, corrections; every divisor is in a sample's loss weight, so
                      the loss is a sum; metrics, summed over micro-batches and ranks

Around it:

    freezing          selects the parameters that train
    routing_replay    records the experts of each token, and uses them in later passes
    background_save   checkpoints that the ranks write while they train
    components        builds the run's components that work on a rank, and checks them
    critic            the critic's model: a head with one number per token, value loss, optimizer; one process of a
                      separate critic, on ranks without the actor
    critic_reshard    divides the shards of the actor's ranks for the critic's; gathers per-token numbers
    optimizer         Megatron's DDP, optimizer and learning-rate schedule
    data_parallel     the exchange of gradients and weights during passes, in one order on every rank
    checks            errors that end a run before it publishes a wrong step; checks of the model
    rank_load         seconds and memory of a rank, its share of a GPU's peak; the slowest rank
    process           joins the process group; offloads device memory to the host and loads it again

:class:`LearnerSettings` are the settings of a rank. The driver writes them, so nothing heavy is imported here.

The rules between them: files see model chunks and packed micro-batches, never the name of a model family. Modules that
import Megatron are imported inside functions, after :func:`slime_core.modeling.prepare_megatron`, which can only patch
later imports.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slime_core.components.construction import ProcessSettings
from slime_core.modeling.layout import ParallelLayout


@dataclass(frozen=True, slots=True)
class LearnerSettings(ProcessSettings):
    """The settings of one rank of the learner or of a separate critic.

    Arguments:
        architecture: the checkpoint's architecture string, by which the model spec is chosen.
        policy_loss: name of the policy loss component.
        num_steps: optimizer steps of the whole run, for the schedule.
        rank, world_size: of the process among the learner's.
        address: ``host:port`` where rank 0 listens for the others.
        num_threads: threads of an operation on a CPU; 0: torch decides.
    """

    architecture: str
    policy_loss: str
    num_steps: int
    rank: int = 0
    world_size: int = 1
    address: str = "127.0.0.1:29500"
    num_threads: int = 0
    layout: ParallelLayout = field(default_factory=ParallelLayout)
