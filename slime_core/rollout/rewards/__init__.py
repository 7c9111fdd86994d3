"""Reward models, isolated from the sampler: one that hangs, crashes or eats memory fails only its own samples.

scorers.py     where each reward model runs: in the process pool, or in the sampler if its traits say so
pool.py        the pool of reward processes; retries the samples of a process that died
process.py     one reward process, seen from the sampler
worker.py      the program of a reward process
reward_sum.py  weighted sums of several reward models
"""
