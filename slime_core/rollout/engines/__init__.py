"""Inference servers (SGLang) and their routers: started, found, watched, and queried.

    supervisor.py     the program between an actor and its server; it cleans up after the server
    keyed.py          runs a server with the key of the run, which no command line and no log shows
    server.py         a program that listens on a port, as a child process: its log, its health, its end
    engine.py         one SGLang server, and the router: the only file that starts SGLang; an external router
    actors.py         Ray actors that start and watch a server
    restarts.py       servers that died or hang are started again, in the same place
    external.py       engines that the user started: checked before the run, watched during it
    fleet.py          the engines and routers of all models: the policy, auxiliary models, engines that only evaluate;
                      the settings of a run as their arguments
    client.py         token ids in, token ids and log-probabilities out; retries and aborts
    room.py           the bound on requests in flight
    routes.py         the experts that an engine took, out of its answer
    progress.py       whether the engines of a request still compute, so that a long response may take its time
    truncated_sampling.py  top-p/top-k: which tokens stayed, and log-probs renormalized over them

Generation goes through ``client``, control calls (pause, memory, weights) through
``slime_core.weights.engine_control``. Only token ids are sent to an engine, never text.
"""
