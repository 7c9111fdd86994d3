"""Inference servers (SGLang) and their routers: started, found, watched, and queried.

    keyed.py          runs a server with the key of the run, which no command line and no log shows
    server.py         a program that listens on a port, as a child process: its log, its health, its end
    engine.py         one SGLang server, and the router: the only file that starts SGLang; the calls to any router
    actors.py         Ray actors that start and watch a server; those that died or hang are started again
    external.py       engines that the user started: checked before the run, watched during it
    fleet.py          the engines and routers of all models: the policy, auxiliary models, engines that only evaluate;
                      the settings of a run as their arguments
    client.py         sends token ids; retries and aborts, the bound on requests in flight, the progress of engines
    responses.py      reads answers: tokens, log-probabilities, routed experts, the mask of truncated sampling

Generation goes through ``client``, control calls (pause, memory, weights) through
``slime_core.weights.engine_control``. Only token ids are sent to an engine, never text.
"""
