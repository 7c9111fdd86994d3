"""Ray: the cluster of a run, its actors and every wait for them; no other package asks Ray for machines.

    session        a Ray cluster for the length of a run: a new one, or one that is running; checks that its nodes have
                   the driver's plugins and inputs
    supervisor     the program between an actor and its server, which ends the server after the actor has died
    layout         the devices that a run needs, divided into bundles, and which process gets which bundle
    placement      the placement group, and the placement of each actor in it
    actors         one actor, or a group of actors: started at its placement, called through the methods of its class;
                   stacks and errors of actors on the driver
    progress       how far a call of an actor is
    waiting        waits for calls, each with a name and a limit; reports late calls; ends some waits on SIGTERM
    device_pool    which role holds the devices
    machine        free resources of this machine, before anything is started

The rule between them: nothing outside this package calls ``ray.get`` or ``ray.wait`` on a started call, a
:class:`~.actors.Call` that knows its actor. Only :func:`~.waiting.wait` takes its result, so every wait has a name and
a limit. ``device_pool``, ``layout``, ``machine`` and ``progress`` do not import Ray.
"""
