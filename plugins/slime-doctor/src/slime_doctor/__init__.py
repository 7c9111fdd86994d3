"""The command ``slime doctor`` checks whether this machine can run slime.

    command    arguments, output, exit code
    finding    result of one check: ok, warn or fail, and the next step
    software   versions, plugins, torch and GPUs, environment variables of Ray, NCCL and gloo
    machine    platform, memory, shared memory, limits, disk, ports
    probe      a program of its own: what torch has, and an all-reduce of two processes
    self_test  the all-reduce, and a run of two rollouts on real engines and learner ranks

Checks read and judge; only ``probe`` loads torch, in processes of its own, so that a torch that cannot be loaded is a
finding and not a traceback.
"""
