"""Rewards: what judges a response runs where it can do no harm.

place.py     where each reward model runs: in a process that can be killed, or inside the sampler
pool.py      the processes, and who is asked again when one of them ends
process.py   one such process, as the sampler sees it
worker.py    the program in it
weighted.py  sums of several reward models
"""
