"""From what a model says of a row to one number to minimise, and what is measured on the way.

    log_probs     log-probabilities and entropies of response tokens
    advantages    advantages token by token, over a whole shard; whitening over ranks
    distillation  the teacher's part of an advantage
    corrections   weights and masks for tokens that other weights drew
    objective     policy loss, divergence from the reference, entropy; their metrics
    mismatch      how far learner and engines stand apart, measured only
    parity        the gate that ends a run where they stand too far apart
    totals        sums over micro-batches and ranks
    returned      what a component returned, held to its contract

The rule between them: every divisor is inside a sample's loss weight, so everything here is a sum.
"""
