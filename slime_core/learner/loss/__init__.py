"""From log-probabilities to one number to minimise, with its metrics.

    objective     policy loss, KL divergence from the reference and the teacher, entropy; their metrics
    advantages    advantages token by token, over a whole shard; whitening over ranks
    corrections   weights and masks for tokens that other weights sampled
    parity        ends a run where learner and engines give the same tokens other log-probabilities
    metric_sums   sums over micro-batches and ranks

Every divisor is inside a sample's loss weight, so everything here is a sum.
"""
