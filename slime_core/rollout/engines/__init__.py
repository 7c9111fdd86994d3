"""Inference servers: started, found, watched, and asked.

    keeper.py        the program between an actor and its engine, which clears up after it
    process.py       a program as a child process: its log, its end, and what is left of it when it dies
    server.py        such a program that listens: its port, its first answer
    engine.py        one SGLang server; the only file that starts SGLang
    router.py        one address for all engines of a model
    actors.py        engine and router where Ray placed them: watched
    remote_router.py a router that somebody else started
    external.py      engines that somebody else started
    external_watch.py  looks at these while the run lasts
    heads.py         reward models whose head SGLang would leave random
    asked.py         what a run's settings ask of each engine and router
    served.py        one model: its engines and its router, started in parallel
    fleet.py         all models: the policy, those beside it, the policy for evaluations
    client.py        token ids in, token ids and log-probabilities out
    generation.py    reads what an engine answers
    targets.py       which address a request goes to
    ending.py        ends requests before their time
    speculation.py   the counters of speculative decoding

The rule between them: whatever talks to an engine goes through ``client`` (generation) or
``slime_core.weights.endpoints`` (control), and only token ids cross that border, never text.
"""
