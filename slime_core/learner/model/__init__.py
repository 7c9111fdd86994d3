"""The model that :mod:`slime_core.modeling` has built, family by family the same.

    routing     hands routes to the routers of a mixture, and keeps what they chose
    freezing    which parameters train
    same_model  whether the weights of another folder may play in it
    sharing     whether it can take rows in which several responses continue one prompt

The rule between them: they see model chunks and a config, never a family's name.
"""
