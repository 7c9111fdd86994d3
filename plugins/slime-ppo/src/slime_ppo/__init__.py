"""REINFORCE++ for slime: the advantage estimators ``reinforce_plus_plus`` and ``reinforce_plus_plus_baseline``.

``plugin`` declares both. ``reinforce_plus_plus`` computes the first on the learner's ranks with torch, token by token;
``advantage`` the second, one number a sample, with numpy.
"""
