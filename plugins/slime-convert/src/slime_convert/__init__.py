"""The command ``slime convert``: checkpoints from Hugging Face to torch_dist, back, and compared.

    plugin        declares the command
    command       arguments, progress bar, output, exit code
    conversion    the conversions, and ``verify``
    model         the processes of a conversion; a model that allocates memory for only a few weights at a time; the
                  weights of a torch_dist folder by name
    formats       config and weights of a Hugging Face folder by name; differences of names and shapes

A target is written under a temporary name and renamed when it is complete. ``command`` prepares Megatron before it
imports the other modules.
"""
