"""Runs Megatron-core and SGLang without a GPU."""
