"""Off-policy corrections for slime: ``tis``, ``icepop``, ``mis``, ``veto`` and ``opsm``.

``plugin`` declares them, ``tokens`` judges each token by itself, ``sequences`` whole responses, and ``options`` holds
the settings ``--tis-clip``, ``--tis-clip-low``, ``--mis-...``, ``--veto-threshold`` and ``--opsm-delta``.
"""
