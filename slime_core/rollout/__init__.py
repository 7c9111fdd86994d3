"""From prompts to shards: inference servers, a router in front of them, and a sampler that keeps them busy.

In the order in which a prompt group passes through them:

    actor.py              the sampler as a Ray actor, and the driver's handle; evaluations while the learner trains
    sampler.py            collects one rollout, estimates advantages, packs shards; other sources of groups: a plugin's
                          rollout source, saved files
    components.py         settings of a sampler; its tokenizer, client and components
    routing.py            chooses components by row, and attributes their errors to plugins
    transforms.py         calls sample transforms, and checks their results
    rollout_files.py      rollouts on disk: writes them, checks them before a run, reads them to train on them again
    group_scheduler.py    groups in flight, for this rollout and later ones, within the bound on staleness; aborted
                          groups that are resumed; groups as JSON, for checkpoints
    group_generator.py    generates and rewards whole groups, with retries; resets or resumes requeued groups; sampling
                          parameters
    collected_rollout.py  the groups of one rollout: kept, dropped, stale, aborted or lost
    shards.py             divides samples into optimizer steps and micro-batches; one shard a data-parallel rank
    evaluation.py         held-out prompts, and their scores
    engines/              inference servers: start, find, supervise, call
    reward_scoring.py     the reward of each sample: from the process pool, or from the sampler if the traits allow it
    reward_pool.py        reward processes that can be killed, as the sampler sees them
    reward_worker.py      the program of a reward process

The rule between them: nothing here imports Megatron, and only token ids are sent to an engine, never text.
"""
