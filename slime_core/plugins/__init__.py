"""How separately installed code takes part in a run.

Parts, each importing only those above it: ``traits`` and ``component`` are what a plugin declares, ``hooks`` through
which calls it declares, ``contracts`` what the declared targets implement; ``boundary`` attributes a failure to a
plugin; ``discovery`` reads installed metadata and imports nothing; ``loading`` imports one plugin; ``validation``
refuses the mistakes that pluggy would accept in silence; ``fitting`` holds a target to its contract; ``registration``
collects the components into a registry; ``lifecycle`` calls the hooks of a run's life; ``manifest`` makes another
process load exactly the same code; ``registry`` activates what a run named.

The one rule: only what a run names, ``core``, and the plugin that claims the checkpoint's architecture are imported.
"""
