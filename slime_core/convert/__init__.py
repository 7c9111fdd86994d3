"""Converts checkpoints between Hugging Face folders and torch_dist, both ways, and compares two of them.

    formats       what a folder holds; the weights of a Hugging Face folder by name; differences of names and shapes
    model         the processes of a conversion; a model that holds memory for a few of its weights at a time; the
                  weights of a torch_dist folder by name
    conversion    the conversions, and ``verify``

The rule between them: a target is written under a draft's name and renamed when it is complete. Import these after
``slime_core.cpu.megatron.install()``.
"""
