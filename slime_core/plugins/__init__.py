"""Finds, checks, activates and calls separately installed code.

What a plugin declares and implements:

    component   what it declares, and the traits that the core reads without importing it
    hooks       the calls through which it declares, and those of a run's life
    contracts   what the declared targets implement

From metadata to a registry:

    discovery   installed metadata, read without importing a plugin; versions that it accepts; which plugin claims what
    activation  which plugins a run needs, named or not, loaded together
    loading     imports a plugin, a target, or a function that an option names by path; turns a plugin's failure into
                our error, with the plugin's name in it
    neighbours  the modules next to such a function's file: found in its imports, importable for it alone
    validation  mistakes in hooks that pluggy accepts silently; what hooks return; whether a target can be built and
                called as its contract says
    registry    the components, presets, options and hooks of a run

In a run:

    selection   whether the components that a run names exist and fit together, and whether every setting takes effect
    construction    makes components, with their options and a view of the run
    lifecycle   calls the hooks of a run's life
    manifest    the same code in every process, after a resume, and by a lock

The one rule: only ``core``, the plugins that a run names, and those that claim what it names are imported.
"""
