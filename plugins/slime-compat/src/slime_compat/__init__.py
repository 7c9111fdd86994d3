"""Runs functions written for slime, which ``[custom]`` names by path, as plugin components.

    plugin      one component or hook for each path setting
    options     the record that every adapter gets: the settings and the code that they name
    flags       the decision on each of slime's flags, for messages and docs/flags.md
    arguments   ``args``, from which such functions read every setting
    forms, training    accepted signatures of the functions of each setting, on either side
    signatures, check, reward_uses    checks from its text that a function accepts its arguments
    names, imports, outputs    slime's module names inside such files; checks that their imports exist
    calling     awaits a function or runs it in a thread; every failure names the function's flag

    data, filters, generate, reward, rollout, train_data    adapters of the rollout side
    conversation, inside    conversations of a custom generate function, and helpers that it may import
    advantage, columns, correction, loss, reducer, parts, model, megatron, weights    adapters of the training side
    batches     micro-batches as slime's functions see them

A function is called as slime calls it, and its result must follow a contract, like a plugin's.
"""

from slime_compat.inside import Answer, GenerateState, generate_single, get_model_url, post

__all__ = ["Answer", "GenerateState", "generate_single", "get_model_url", "post"]
