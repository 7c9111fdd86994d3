"""The command ``slime``: the only room that prints or exits.

    main        finds the command, the core's or one of a distribution; errors that slime raises on purpose become
                a message and an exit code
    activation  what a command line means: its settings and its plugins; code that a run folder names is imported only
                if this user has run it before, or names it again
    run, evaluate, check, ledger    a command each: ``slime run`` (also whether a run restarts after a death), ``eval``,
                ``check`` (also which process would sit where) and ``ledger``
    plugins     ``slime plugins list``, ``show``, ``trace``, ``lock`` and ``verify``
    progress    what a person sees of a run
    preflight   what can be found wrong before the first process starts: prompts, weights, the machine
    memory      what a run needs of a machine and of each GPU; rows and recomputation that fit, where a run names none

The rule between them: a command imports what it needs when it is called, so that help and lists load nothing heavy.
"""
