"""PPO and REINFORCE++ for slime: the estimators ``ppo``, ``reinforce_plus_plus`` and ``reinforce_plus_plus_baseline``.

``plugin`` declares them. ``ppo`` and ``reinforce_plus_plus`` work on the learner's ranks with torch, token by token,
both on the ``rewards`` of single tokens; ``advantage`` gives one number a sample, with numpy.
"""
