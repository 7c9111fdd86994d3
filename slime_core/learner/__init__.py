"""Trains the actor with Megatron-core. Besides it, only modeling, weights and checkpoint import Megatron.

The way of a rollout, in reading order:

    actor             the ranks as Ray actors, and the driver's handle
    rank              one rank: ``Learner.train`` runs the steps below
    micro_batches     packs the samples of a shard into rows
    log_prob_pass     forward passes of the roles that something reads
    frozen_models     weights of reference, teacher and old actor, loaded into the actor's model for a pass
    loss/             advantages, objective, corrections, parity
    forward_backward  runs micro-batches through Megatron's schedule
    trained_model     chunks, DDP, optimizer and schedule; takes the step

Around it:

    components        builds the run's components that work on a rank, and checks them
    critic/           the critic, on the actor's ranks or on its own
    optimizer         Megatron's DDP, optimizer and learning-rate schedule
    routing_replay    replays the experts that a mixture chose
    freezing          which parameters train
    shared_prompts    whether the model can take rows in which responses share a prompt
    same_model        whether another folder's weights fit the actor's model
    checks            errors that end a run before a spoilt step is published
    offload           moves a rank's device memory to the host and back
    train_data        writes what a rank trained to a file
    settings, process, rendezvous    settings of a rank, joining the process group, its address

The rules between them: files see model chunks and packed micro-batches, never the name of a model family. What imports
Megatron is imported inside functions, after ``slime_core.cpu.megatron.install()``: what is imported before cannot be
patched any more.
"""
