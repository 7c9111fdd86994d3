"""REINFORCE++ with a group baseline for slime: the advantage estimator ``reinforce_plus_plus_baseline``.

``plugin`` declares it, ``advantage`` computes it with numpy. That is all the package holds.
"""
