"""Samples as the rows that a model reads: packed micro-batches. Attention over them is in :mod:`slime_core.modeling`.

    sequences  how samples stand in a row: each as a sequence of its own, or several behind the prompt that they share
    batches    a shard cut into micro-batches of such rows, as tensors, once a rollout
    inputs     what samples carry for the model beside tokens

The rule between them: every index is computed once, when a shard is cut; a pass only gathers.
"""
