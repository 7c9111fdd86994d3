"""Group-relative advantages for slime: ``grpo``, ``dr_grpo`` and ``rloo``.

``plugin`` declares them, ``advantage`` computes them with numpy, ``options`` holds the settings ``--grpo.*``. Naming
the plugin makes ``grpo`` the run's advantage estimator.
"""
