"""Off-policy corrections for slime: ``tis``, ``icepop``, ``mis``, ``veto`` and ``opsm``.

``plugin`` registers them, ``tokens`` corrects single tokens, ``sequences`` whole responses, and ``options`` defines
the settings ``--tis-clip``, ``--tis-clip-low``, ``--mis-...``, ``--veto-threshold`` and ``--opsm-delta``.
"""
