"""Components that the core ships, as a plugin named ``core`` that registers through the same hooks as any other.

    plugin      the hooks
    advantages, losses, corrections, sequence_corrections, transforms    what is made of rewards and log-probabilities
    single_turn  the default generate function
    rewards, mathematics, texts, answers    rewards by rules, and where the answer stands in a response
    instructions    rewards for instructions that a program can check
    arithmetic  the embedded model, its task and its prompts

The rule: what stands here uses nothing that a plugin could not use.
"""
