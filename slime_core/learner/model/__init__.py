"""The model behind :mod:`slime_core.learner.spec`, family by family the same.

    bridge      what mbridge is shown of a config, of weights and of layers
    norm        the norm of every layer
    routing     routers of a mixture that keep the experts they chose, or take those of the engine
    freezing    which parameters train
    same_model  whether the weights of another folder may play in it
    sharing     whether it can take rows in which several responses continue one prompt

The rule between them: they see model chunks and a config, never a family's name.
"""
