"""Mathematics that knows nothing of engines, processes or files: torch and numpy only.

    log_probs   log-probabilities and entropies, from logits that may be split over ranks; truncated-sampling masks
    losses      the clipped surrogate, KL estimators, the loss of a critic: token by token
    groups      statistics of rewards over prompt groups; one weight a sample that holds every divisor of the loss
    whitening   mean 0 and variance 1 over the trained tokens of all ranks
    packing     which rank trains which sample, in which row
    prefixes    the same for samples that start with the same tokens, as a tree

The rule: a formula names its source, and gets tensors, arrays or numbers, never a record or a setting.
"""
