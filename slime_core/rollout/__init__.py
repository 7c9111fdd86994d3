"""From prompts to shards: inference servers, a router in front of them, and a sampler that keeps them busy.

In the order in which a prompt group passes through them:

    actor.py                  the sampler as a Ray actor, and the driver's handle
    sampler.py                collects one rollout, estimates advantages, packs shards; evaluates
    sampler_records.py        settings and results of the sampler
    sampler_components.py     tokenizer, client, components of a sampler, made from its settings
    component_factory.py      makes components by name
    component_router.py       the generate function or reward model that a row names, else the run's
    guard.py                  attributes errors of components to their plugins, and checks what they return
    group_source.py           where the groups of a rollout come from: one Protocol; rollout sources of plugins
    live_rollouts.py          the default source: generates groups now
    recorded_rollouts.py      the source of train-only runs: reads saved groups
    requeue_buffer.py         the data source, preceded by aborted groups that are resumed
    group_scheduler.py        groups in flight, for this rollout and later ones, within the bounds of the async policy
    group_collector.py        generates and rewards whole groups, with retries
    group_generator.py        generates the samples of one group
    lineage.py                maps the samples that a generate function returned to the samples it was given
    sampling_params.py        sampling parameters: of training, of an evaluation set, of a row
    truncated_sampling.py     top-p/top-k: which tokens stayed, and log-probs renormalized over them
    reward_dispatcher.py      calls reward models; a sample without a usable reward has failed
    buffered.py               the generate function of trajectories that the data source gives
    resumable_groups.py       resets or resumes the samples of an aborted group; groups as JSON, for checkpoints
    staleness.py              how many versions old the tokens of a sample are, and the bound on it
    transforms.py             the sample transforms of a run, in order
    collected_groups.py       the groups of one rollout: kept, dropped, stale, aborted or lost, with reasons
    prompt_ledger.py          accounts for every prompt group
    batch_plan.py             how samples are divided into optimizer steps, shards and micro-batches
    shards.py                 builds one shard a data-parallel rank
    evaluation.py             held-out prompts; eval_scores.py scores them
    concurrent_evaluation.py  evaluations that run while the learner trains
    run_all.py                awaits coroutines concurrently, cancels the rest on the first error
    engines/                  inference servers: start, find, supervise, call
    rewards/                  reward models, in processes that can be killed

The rule between them: nothing here knows Megatron, and only token ids cross the border to an engine, never text.
"""
