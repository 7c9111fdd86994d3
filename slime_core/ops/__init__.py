"""Mathematics that knows nothing of engines, processes or files: torch and numpy only.

    log_probs   log-probabilities and entropies, from logits that may be split over ranks
    kept        sets of tokens that a distribution is cut to
    kl, policy, values    KL estimators, the clipped surrogate, the loss of a critic: token by token
    groups      statistics of rewards over prompt groups
    returns, whitening    discounted sums, advantages over values, mean 0 and variance 1
    packing, prompts    which rank trains which sample, in which row, and which samples share a prompt

The rule: a formula names its source, and gets tensors, arrays or numbers, never a record or a setting.
"""
