"""Trains a causal language model with the modelling code of transformers."""
