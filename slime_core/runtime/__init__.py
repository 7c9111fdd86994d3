"""Ray: the cluster of a run, its actors and every wait for them; nothing else asks Ray for machines.

    session.py    a Ray cluster for the length of a run: its own, or one that is running
    layout.py     what a run needs and how that is cut into bundles; plain arithmetic, no Ray
    asked.py      the device and the layout that the settings ask for, and what cannot be on that device
    machine.py    what this machine has left, before anything is started
    inspection.py whether every node has the driver's plugins
    placement.py  the one placement group, and which bundle is whose
    actors.py     one actor: started in a slot, watched, called by name
    group.py      several actors called as one
    waiting.py    every wait knows what it waits for, reports who is late, and ends
    lending.py    who may use the devices now
    failures.py   what a remote failure becomes on the driver
    stacks.py     what every thread and every task of this process is doing
    launch/       starts what a run needs, hands it to the loop and takes it down

The rule between them: nothing outside this room calls ``ray.get`` or ``ray.wait``. A started call is a
:class:`~.actors.Call` that knows its actor, and only :func:`~.waiting.wait` takes its result, so no wait is anonymous
and none is endless. ``layout``, ``lending``, ``machine`` and ``stacks`` import no Ray.
"""
