"""Trains the actor with Megatron-core; the only room, with weights and checkpoint, that imports it.

    layout.py      how the model is cut over ranks, and Megatron's parallel state
    spec.py        builds a model from a Hugging Face config and maps its weights both ways (public: model specs use it)
    unsupported.py what of a config.json spec.py does not build, found without torch (public, like spec.py)
    bridge.py      what mbridge is shown of a config, of weights and of layers
    attention.py   packed sequences: core attention and rotary positions without a loop over sequences
    norm.py        the norm of every layer
    rows.py        where the tokens of a packed row go: padded batches, and context-parallel ranks
    batches.py     a shard cut into packed micro-batches
    log_probs.py   log-probabilities and entropies of response tokens
    objective.py   policy loss, divergence from the reference, entropy: one number to minimise, and metrics
    passes.py      micro-batches through Megatron's schedule, forward only or with gradients
    gradients.py   gradients under Hugging Face names, to compare layouts
    optimizer.py   Megatron's DDP, optimizer and schedule
    roles.py       sets of weights that take turns in one model
    rank.py        one process of the learner, with or without Ray
    actor.py       the ranks as Ray actors, and the driver's handle

The rule between them: everything below ``spec.py`` sees model chunks and packed micro-batches, never a family's name.
"""
