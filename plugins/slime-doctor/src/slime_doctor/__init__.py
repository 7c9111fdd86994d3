"""The command ``slime doctor`` checks whether this machine can run slime.

    plugin     declares the command
    command    arguments, output, exit code
    finding    result of one check: ok, warn or fail, and the next step
    software   versions, plugins, torch and GPUs, environment variables of Ray, NCCL and gloo
    machine    platform, memory, shared memory, limits, disk, ports
    probe      a separate program: facts about torch, and an all-reduce of two processes
    self_test  the all-reduce, and a run of two rollouts on real engines and learner ranks

Only ``probe`` loads torch, in separate processes, so that a torch that cannot be loaded is a finding and not a
traceback.
"""
