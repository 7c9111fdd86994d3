"""The command ``slime``: the only package of the core that prints or exits.

    main        finds the command, the core's or one of a plugin; errors that slime raises on purpose become a
                message and an exit code
    activation  reads the settings and the plugins of a command line; code that a run folder names is imported only
                if the command line names it again
    run, evaluate, check, ledger_command    one command each: ``slime run`` (also restarts of a run), ``eval``,
                ``check`` (also the placement of each process) and ``ledger``
    plugins     ``slime plugins list``, ``show`` and ``trace``
    progress    prints the progress of a run
    preflight   checks prompts, weights and the machine before the first process starts
    labels      scores labels against themselves before a run
    memory      estimates the memory that a run needs on a machine and on each GPU; defaults that fit into it

The rule between them: a command imports what it needs when it is called, so that help and lists load nothing heavy.
"""
