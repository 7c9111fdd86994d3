"""Inference servers: started, found, watched, and asked.

    process.py       a server program as a child process: its log, its end, and what is left of it when it dies
    engine.py        one SGLang server; the only file that starts SGLang
    server_actor.py  a server program where Ray placed it: started, watched, stopped
    engine_actor.py  one SGLang server as such an actor
    router.py        one address for all servers
    router_actor.py  the router as such an actor
    remote_router.py a router that somebody else started
    external.py      engines that somebody else started
    fleet.py         all of them, started in parallel
    models.py        where the models beside the policy answer
    client.py        token ids in, token ids and log-probabilities out
    generation.py    what is asked of an engine, and what it answers
    targets.py       which address a request goes to
    ending.py        ends requests before their time
    speculation.py   the counters of speculative decoding

The rule between them: whatever talks to an engine goes through ``client`` (generation) or
``slime_core.weights.endpoints`` (control), and only token ids cross that border, never text.
"""
