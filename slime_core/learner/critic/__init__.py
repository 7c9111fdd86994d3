"""The critic, on the actor's ranks or on ranks of its own (a separate critic).

    critic      the model, with one number a token in the place of its output layer; its value loss and its optimizer
    rank        one process of a separate critic
    actor       these ranks as Ray actors, and the driver's handle
    reshard     shards of the actor's ranks divided for the critic's, and per-token numbers on their way back

The rule between them: a critic sees samples and returns; nothing of the actor's model reaches it.
"""
