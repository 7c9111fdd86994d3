"""PPO and REINFORCE++ for slime: the estimators ``ppo``, ``reinforce_plus_plus`` and ``reinforce_plus_plus_baseline``.

``plugin`` registers them. ``ppo`` and ``reinforce_plus_plus`` compute token-level advantages with torch on the
learner's ranks, from the token-level rewards of ``rewards``; ``advantage`` computes one number per sample with numpy.
"""
