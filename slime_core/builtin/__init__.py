"""Components that the core ships, as a plugin named ``core`` that registers them as any other plugin does.

    plugin      registers them
    losses      policy losses, and the advantage estimator of supervised fine-tuning
    rollout     the data source of prompt files; generate functions: one response, and the label as the response;
                rewards: exact match with the label, random, zero
    arithmetic  the built-in model and its prompts, made by ``examples/arithmetic``

These components use only what plugins can use.
"""
