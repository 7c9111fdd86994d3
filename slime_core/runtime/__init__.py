"""Ray: the cluster of a run, its actors and every wait for them; nothing else asks Ray for machines.

    launch         starts the processes of a run, runs the loop, and stops them
    session        a Ray cluster for the length of a run: its own, or one that is running; whether its nodes have the
                   driver's plugins and inputs
    supervisor     the program between an actor and its server, which cleans up after it; processes that end with others
    layout         the devices that a run needs, divided into bundles; arithmetic, no Ray
    placement      the placement group, and the processes of its bundles
    actors         one actor, or several as one: started in a slot, called through the methods of their class; stacks
                   and errors of actors on the driver
    waiting        every wait has a name, reports late calls, and ends; SIGTERM, which ends some waits
    device_pool    which role holds the devices
    machine        free resources of this machine, before anything is started

The rule between them: nothing outside this package calls ``ray.get`` or ``ray.wait`` on a started call, a
:class:`~.actors.Call` that knows its actor. Only :func:`~.waiting.wait` takes its result, so every wait has a name and
a limit. ``device_pool``, ``layout`` and ``machine`` import no Ray.
"""
