"""The GPU kit: measures slime on a machine that has torch, transformers and Python 3.12 (docs/gpu.md).

    kit          installs the wheels, runs each part in a process, writes the table; needs the standard library only
    report       rows of the table; times, peaks and differences
    machine      1: driver, compilers, shared memory, limits
    attention    2: attention over packed rows
    experts      3: the grouped product of a mixture
    numerics     4: fused AdamW; log-probabilities in chunks
    learner      5: steps of the learner, beside a loop of transformers
    mixture      6: a profile of a mixture's layers
    sharing      7: weights that another process reads; offloading
    collective   8: process groups of one rank

Without a GPU each part runs with small sizes and the nearest backend of a CPU.
"""
