"""Trains the actor with Megatron-core; the only room, with modeling, weights and checkpoint, that imports it.

    packed/      samples as rows: micro-batches
    model/       which parameters train, and which experts a mixture's routers take
    loss/        from log-probabilities to one number to minimise; corrections, metrics, the parity gate
    critic/      the model of values, on the actor's ranks or apart

    layout       Megatron's parallel state, as the model is cut over ranks
    passes       micro-batches through Megatron's schedule, forward only or with gradients
    optimizer    Megatron's DDP, optimizer and schedule
    trained      a model with both: what takes optimizer steps, is saved and is loaded
    columns      which columns of a rollout something reads; only those are computed
    annotator    fills them
    roles, cast  sets of weights that take turns in one model, and when in a run they do
    replay       whose passes keep the routes of a mixture
    components   the components of the run that work on a rank, built and held to their contracts
    refusals, finite    what ends a run before anything that it spoilt is published
    gradients    gradients under Hugging Face names, to compare layouts
    train_data   what a rank trained, on disk, to look into a run
    sleep        device memory given away and taken back
    settings, process, meeting    what a process is told, what it prepares, where the ranks meet
    rank         one process of the learner, with or without Ray
    actor        the ranks as Ray actors, and the driver's handle
    absent       the learner of a run that goes with one half alone, as the loop calls it

The rules between them: it sees model chunks and packed micro-batches, never a family's name. What
imports Megatron is imported inside functions, after ``slime_core.cpu.megatron.install()``; once it is imported, nothing
can be installed any more.
"""
