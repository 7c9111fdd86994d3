"""Run state on disk, atomically.

    folder.py    where a checkpoint lies, which one is the newest whole one, and what makes it whole
    schedule.py  when a run saves, and which checkpoints it keeps
    sharded.py   model, optimizer and schedule in Megatron's torch_dist format

The rule between them: everything is written into a draft folder, which is renamed once all of it is there.
"""
