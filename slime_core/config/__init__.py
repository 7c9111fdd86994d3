"""Settings: frozen typed sections, read from defaults, plugin presets, a TOML file and flags.

What there is:

    section     what every section is; numbers and texts within bounds
    options     what the annotation of a setting may say in addition to its type; loads without pydantic
    sampling, learning    the sections of a subject; sums of rewards
    engines     the SGLang servers, and the flags of Megatron and SGLang under their own names
    schema      all sections as one ``RunConfig``, and what follows from several of them, such as every
                evaluation set; the built-in demo's defaults
    secrets     what is written in the place of a secret; the key that engines and routers of a run require

How it is read:

    settings    one value, from a flag or from TOML; what a setting accepts, in words
    sources     a command line, a TOML file
    load        lays them over each other; the components that settings name
    check       what settings need and exclude, from their annotations; calls the rules
    rules, layout_rules    arithmetic on several settings, and whether files are there
    explain     settings for people: as a file, as help

What it is compared with:

    engine_flags    what a name means that is not a setting of the core
    other_names    settings under the names of other frameworks
    internals    the private parts of libraries that the core touches
    model_config    what a model's ``config.json`` says

The rule between them: nothing here is heavier than pydantic, so every mistake is found before anything starts.
"""
