"""Settings: frozen typed sections, read from defaults, plugin presets, a TOML file and flags.

Definitions:

    section     what every section is; numbers and texts within bounds
    options     annotations of a setting in addition to its type; loads without pydantic
    sampling, learning    the sections of a subject; sums of rewards
    engines     the SGLang servers, and the flags of Megatron and SGLang
    schema      all sections as one ``RunConfig``, and values computed from several settings, such as every
                evaluation set; the built-in demo's defaults
    secrets     records without secrets; the key that engines and routers of a run require

Reading:

    settings    one value, from a flag or from TOML; accepted values in words
    sources     a command line, a TOML file
    load        merges them; the components that settings name
    check       conditions of settings, from their annotations; calls the rules
    rules, layout_rules    rules between settings, and checks of files
    explain     settings for users: as a file, as help

Lookups:

    engine_flags    names that are not settings of the core
    other_names    settings under the names of other frameworks
    internals    the private parts of libraries that the core uses
    model_config    ``config.json`` of models

Nothing here imports more than pydantic, so every mistake is found before anything starts.
"""
