"""Functions of slime's users, as components: what ``[custom]`` names by path runs through the contracts of plugins.

    plugin      one component for each path setting; active where a run gives a path
    options     what every adapter is made with: the settings and the code that they name
    flags       what became of each of slime's flags, for messages and docs/flags.md
    arguments   ``args``, from which such functions read every setting
    forms, training    how the functions of each setting may be written, on either side
    signatures, check, reward_uses    whether a function takes what it will be passed, by its text
    names, imports, outputs    slime's module names inside such files; whether their imports lead somewhere
    calling     awaits it or runs it in a thread; every failure says whose it is

    data, filters, generate, reward, rollout, train_data    the rollout side, an adapter or more a file
    conversation, inside    conversations of a custom generate function, and what such a function may import
    advantage, columns, correction, loss, reducer, parts, model, megatron, weights    the training side
    batches     micro-batches as slime's functions see them

The rule between them: a function is called as slime calls it, and what it returns is held to a contract like a
plugin's.
"""

from slime_compat.inside import Answer, GenerateState, generate_single, get_model_url, post

__all__ = ["Answer", "GenerateState", "generate_single", "get_model_url", "post"]
