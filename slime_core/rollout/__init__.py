"""From prompts to shards: real inference servers, a router before them, and a sampler that keeps them busy.

    engines/         inference servers: started, found, watched, and asked
    rewards/         what judges a response, in processes that can be killed
    supply.py        prompts as the sampler takes them
    rollouts.py      where the groups of a rollout come from: one Protocol, and the rollout sources of plugins
    live.py          groups that are generated now, the default
    recorded.py      groups of a run that only trains: they are read
    eval_sampler.py  the sampler of one that only measures
    production.py    prompt groups in flight, for the rollout that is asked for and those after it
    pace.py          how far generation may run ahead of training
    collect.py       prompt groups become finished, rewarded groups
    making.py        the samples of one group, generated and rewarded
    scoring.py       whose reward counts, and what becomes of a sample without one
    together.py      work side by side, of which nothing goes on once a part of it has failed
    harvest.py       what a rollout has so far, and what was left out with which reason
    ledger.py        where every prompt group ended
    held.py          groups in flight as text, for checkpoints
    staleness.py     how old a sample is when it is trained, and what becomes of one that is too old
    generate.py      the default generate function
    buffered.py      the generate function of trajectories that the data source gives
    choice.py        which component a sample asks for
    sampling.py      how responses are sampled: for training, for an evaluation set, for a row
    lineage.py       whose samples those are that a generate function returned
    resuming.py      samples that were begun before
    stops.py         that a response has ended, where the engine was interrupted before it could say so
    nucleus.py       which tokens were left to draw from, and the log-probabilities over just those
    transforms.py    the sample transforms of a run, in order
    evaluation.py    held-out prompts; scores.py measures them
    plan.py          how samples are cut into optimizer steps, shards and micro-batches
    shards.py        finished groups become one shard a data-parallel rank; inputs.py and kept.py make columns of theirs
    components.py    the components of a run that a sampler works with, by name
    guard.py         what these raise names whose they are, and what they return is looked at
    parts.py         what a sampler generates and rewards with, made from its settings
    sampler.py       generate, reward, estimate, pack; sampled.py says what it is handed and hands out
    actor.py         the sampler as a Ray actor, and the driver's handle
    beside.py        evaluations that go on while training does

The rule between them: nothing here knows Megatron; only token ids cross the border to an engine, never text.
"""
