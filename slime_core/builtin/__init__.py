"""Components that the core ships, as a plugin named ``core`` that registers through the same hooks as any other.

    plugin      the hooks
    losses      policy losses, and the advantage estimator of supervised fine-tuning
    prompts     the data source of prompt files
    responses   generate functions: one response, and the label as the response
    rewards     equal to the label, a coin, nothing
    arithmetic  the built-in model and its prompts, made by ``examples/arithmetic``

The rule: what stands here uses nothing that a plugin could not use.
"""
