"""Samples as the rows that a model reads: packed micro-batches, and attention over them.

    sequences  how samples stand in a row: each as a sequence of its own, or several behind the prompt that they share
    rows       the sequences of a row as padded batches, for attention
    shares     which tokens of a row each context-parallel rank holds, and what it needs of the others
    batches    a shard cut into micro-batches of such rows, as tensors, once a rollout
    inputs     what samples carry for the model beside tokens
    attention  core attention and rotary positions over a row, without a loop over sequences

The rule between them: every index is computed once, when a shard is cut; a pass only gathers.
"""
