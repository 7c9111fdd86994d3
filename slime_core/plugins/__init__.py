"""How separately installed code takes part in a run.

What a plugin says:

    component, traits    what it declares, and what the core may know of it without importing it
    hooks       the calls through which it declares, and those of a run's life
    contracts   what the declared targets implement

From metadata to a registry:

    declared, discovery, requirements, bounds    installed metadata, read without importing a plugin
    claims, distributions    which plugin has what a run names; which of ours to install
    boundary    a plugin's failure leaves it as our error, with the plugin's name on it
    loading, validation, returned    one plugin's code, and the mistakes that pluggy would accept in silence
    fitting     holds a target to its contract
    registration, registry    the components of a run

In a run:

    conditions  whether every setting takes effect, and what plugins say of the settings
    selection, pairings, numbers    whether the components that a run names exist and go together
    formats     the prompt formats of a run, each made when the first file of it is opened
    refusals, asked    what a model spec refuses of a checkpoint; whether somebody is there whom a reward model asks
    functions    functions that options name by path
    construction    makes components, with their options and a view of the run
    lifecycle   calls the hooks of a run's life
    manifest, content, entries, differences, lock    the same code in every process, after a resume, and by a lock
    reference   ``docs/hooks.md``, read off the code

The one rule: only ``core``, the plugins that a run names, and those that claim what it names are imported.
"""
