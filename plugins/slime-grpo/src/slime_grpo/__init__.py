"""Group-relative advantages for slime (``grpo``, ``dr_grpo``, ``rloo``, ``gspo``, ``cispo``) and DAPO's transforms.

``plugin`` registers them, ``advantage`` computes advantages with numpy, ``losses`` the policy losses of gspo and cispo
with torch, ``transforms`` drops groups and masks or punishes long responses, ``options`` holds the settings
``--grpo.std-normalization`` and ``--overlong-...``. Naming the plugin makes ``grpo`` the run's advantage estimator.
"""
