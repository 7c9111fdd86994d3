"""Settings: frozen typed sections, read from defaults, plugin presets, a TOML file and flags.

Parts: ``schema`` says what there is and ``embedded`` what the embedded run differs in; ``settings`` reads one value,
``flags`` a command line, ``document`` a TOML file; ``load`` lays them over each other, ``check`` holds the rules
between them, ``explain`` writes them for people. Every mistake is collected (``mistakes``); all are reported at once.
"""
