"""Trains the actor with Megatron-core. Of the other rooms only modeling, weights and checkpoint import Megatron.

The way of a rollout, in reading order:

    actor             the ranks of learner and critic as Ray actors, and the driver's handles
    rank              one rank: ``Learner.train`` runs the steps below; writes what it trained to a file
    micro_batches     packs the samples of a shard into rows
    columns           fills the columns that the steps read: log-probabilities, values, advantages; the parity gate
    frozen_models     weights of reference, teacher and old actor, loaded into the actor's model for a pass; which of
                      their columns the run reads
    trained_model     chunks in DDP; passes through Megatron's schedule, routing replay, the optimizer step
    objective         policy loss, KL divergence, entropy, corrections; every divisor is in a sample's loss weight, so
                      all of it is a sum
    metric_sums       metrics, summed over micro-batches and ranks

Around it:

    components        builds the run's components that work on a rank, and checks them
    critic            the critic's model: one number a token in place of its output layer; value loss and optimizer
    critic_rank       one process of a separate critic, on ranks of its own
    critic_reshard    shards of the actor's ranks divided for the critic's; per-token numbers on their way back
    optimizer         Megatron's DDP, optimizer and learning-rate schedule
    freezing          which parameters train
    checks            errors that end a run before a spoilt step is published; whether models fit
    settings, process    settings of a rank; joining the process group, moving device memory to the host and back

The rules between them: files see model chunks and packed micro-batches, never the name of a model family. What imports
Megatron is imported inside functions, after ``slime_core.cpu.megatron.install()``: what is imported before cannot be
patched any more.
"""
