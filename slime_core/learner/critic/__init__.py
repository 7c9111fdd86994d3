"""The critic, on the actor's ranks or on ranks of its own.

    value_head  one number a token in the place of the output layer
    critic      the model with that head, its value loss and its optimizer
    rank        one process of a critic apart
    actor       these ranks as Ray actors, and the driver's handle
    recut       a shard of the actor's ranks cut anew for the critic's, and its tokens on their way back

The rule between them: a critic sees samples and returns; nothing of the actor's model reaches it.
"""
