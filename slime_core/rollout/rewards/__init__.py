"""Reward models, isolated from the sampler: one that hangs, crashes or eats memory fails only its own samples.

scoring.py     the reward of each sample: from the process pool, or from the sampler if the traits say so; weighted sums
pool.py        the pool of reward processes, and one process seen from the sampler
worker.py      the program of a reward process
"""
