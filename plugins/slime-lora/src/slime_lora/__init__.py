"""Low-rank adapters (LoRA): the model stays frozen, and each linear layer learns a correction of low rank.

options     flags and the TOML table ``[lora]``
plugin      declares the options, and wraps the model
targets     which linear layers get adapters, with their names in Hugging Face's model
adapters    the adapter of one linear layer; the adapters of a rank
wrapping    adapters for a model's chunks; gathers them over ranks and merges them into weights
folder      reads and writes adapters in the format of peft
merge       merges adapters into weights; the command ``slime convert lora-merge``
"""
