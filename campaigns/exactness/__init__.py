"""One rollout, trained in every layout of the learner, must give what one rank gives, and one rank what torch gives.

    python -m campaigns.exactness                  every case in every layout; exit code 1 if a bound is broken
    python -m campaigns.exactness --small          some cases and mutants; with --no-mutants what `make test` runs
    python -m campaigns.exactness --mutants        the learner broken on purpose; exit code 1: one is missed

Parts, each knows those above it:

    models      the weights: dense, tied, a mixture of experts, trained
    rollout     the samples, the same for all
    cases       what is trained: loss, corrections, estimator, optimizer
    layouts     on how many ranks, cut in which way, and which cases run there
    outcome     what is recorded of a case, and how far two records are from each other
    plain       the case in plain torch and transformers, each sample alone
    rank        the case on one learner rank
    jobs        process groups: forked once a layout, for all of its cases
    mutants     ways to break the learner, each of which some case has to notice
    matrix      all of it in order
    report      tables

Both optimizer steps start from given weights, the same for all: what is compared is the layout, not how far a last bit
of the first step grows in the second.
"""
