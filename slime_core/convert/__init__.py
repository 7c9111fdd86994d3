"""Converts checkpoints between Hugging Face folders and torch_dist, both ways, and compares two of them.

    formats       formats of folders; the weights of a Hugging Face folder by name; differences of names and shapes
    model         the processes of a conversion; a model that allocates memory for only a few weights at a time; the
                  weights of a torch_dist folder by name
    conversion    the conversions, and ``verify``

A target is written under a temporary name and renamed when it is complete. Import these modules after
``slime_core.cpu.megatron.install()``.
"""
