"""The embedded task: a tiny model, its tokenizer and the sums it learns, all small enough to travel inside the wheel.

Parts: ``task`` makes the problems, the split, the data files and the tokenizer files; ``recipe`` makes the warm-up
that leaves the checkpoint in ``model/`` with a habit for reinforcement learning to break. Neither imports torch, and
neither reads a file the other wrote: the files next to them are what they yield, byte for byte.
"""
