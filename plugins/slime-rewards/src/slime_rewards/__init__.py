"""Reward models by rules, and by services and models that a run asks.

plugin         what the plugin declares
answers        where the final answer stands in a response
mathematics    answers that are equal as mathematical expressions
texts          how many words are right, and which choice was taken
instructions   whether a response does what a program can check
services       rewards of a service, of a reward model and of a judge
options        the settings --rm-... of these
checks         what is wrong with such settings, and with rows that name a service
"""
