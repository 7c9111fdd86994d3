"""Reward models: rules, and calls to services and auxiliary models.

plugin         the hooks of the plugin
answers        extracts the final answer of a response
mathematics    compares answers as mathematical expressions
texts          word overlap and multiple choice
instructions   checks instructions that a program can verify
services       rewards from a service, a reward model and a judge
options        the settings --rm-... of ``services``
checks         checks these settings, and rows that name a service
"""
