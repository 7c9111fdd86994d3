"""Runs Megatron-core and SGLang on a machine without a GPU; a run chooses it with ``--device cpu``.

    plugin        what slime-cpu adds to slime
    device        the functions that slime calls: prepare processes that train, start engines
    megatron      an import hook for Megatron-core and mbridge, in processes that train
    serve         environment and arguments of an inference server; starts such a server by hand
    stand_ins/    packages that only such a server sees, through its PYTHONPATH

Importing these modules has no effects. ``megatron`` never changes torch or a third library, and the stand-ins are never
imported in a process that trains.
"""
