"""The reward of Search-R1 for slime: ``search_r1``, exact match of the answer that a response puts between tags.

``plugin`` declares it, ``reward`` computes it. That is all the package holds.
"""
