"""The command ``slime``: the only room that prints or exits.

    main        finds the command; errors that slime raises on purpose become a message and an exit code
    commands    what installed distributions add: the entry points slime.commands
    run, evaluate, check, ledger    a command each: ``slime run``, ``eval``, ``check`` (also which process would sit
                where) and ``ledger``
    run_restarts    whether a run restarts after a death, and from which checkpoint
    progress    what a person sees of a run
    activation  what a command line means before its settings are read: its file and its plugins
    consent     code that a run folder names: imported only if this user has run it before, or names it again
    preflight   what can be found wrong before the first process starts: prompts, weights, the machine
    memory      what a run needs of a machine and of each GPU; rows and recomputation that fit, where a run names none

    plugins, describe    ``slime plugins list``, ``lock`` and ``verify``; ``show`` and ``trace``

The rule between them: a command imports what it needs when it is called, so that help and lists load nothing heavy.
"""
