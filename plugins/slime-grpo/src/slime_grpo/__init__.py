"""Group-relative advantages for slime: ``grpo``, ``dr_grpo``, ``rloo``, ``gspo`` and ``cispo``.

``plugin`` declares them, ``advantage`` computes advantages with numpy, ``losses`` the policy losses of gspo and cispo
with torch, ``options`` holds the settings ``--grpo.*``. Naming the plugin makes ``grpo`` the run's advantage estimator.
"""
