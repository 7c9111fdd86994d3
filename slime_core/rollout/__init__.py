"""From prompts to shards: real inference servers, a router before them, and a sampler that keeps them busy.

    process.py       a server program as a child process: its log, its end, and what is left of it when it dies
    engine.py        one SGLang server; the only file that starts SGLang
    server_actor.py  a server program where Ray placed it: started, watched, stopped
    engine_actor.py  one SGLang server as such an actor
    router.py        one address for all servers
    router_actor.py  the router as such an actor
    client.py        token ids in, token ids and log-probabilities out
    production.py    prompt groups in flight, for the rollout that is asked for and those after it
    held.py          such groups as text, for checkpoints
    staleness.py     how old a sample is when it is trained, and what becomes of one that is too old
    collect.py       prompt groups become finished, rewarded groups
    generate.py      the default generate function
    rewarding.py     where each reward model runs
    reward_http.py   asks a service, with time limits and retries
    reward_models.py remote service, reward model beside the policy, judge
    weighted.py      sums of several reward models
    scores.py        what an evaluation measured
    shards.py        finished groups become one shard a data-parallel rank
    sampler.py       generate, reward, estimate, pack
    actor.py         the sampler as a Ray actor, and the driver's handle

The rule between them: whatever talks to an engine goes through ``client`` (generation) or
``slime_core.weights.endpoints`` (control), and only token ids cross that border, never text.
"""
