"""Plugins: found, loaded, called through pluggy, and compared in every process.

registration   what a plugin adds: components with their traits, presets, options, commands
hooks          the hooks that a plugin may implement, stable and provisional
discovery      finds plugins in the metadata of distributions, in files and in modules; imports none
loading        imports a plugin, and the target of a component
registry       loaded plugins; their components, presets, options and commands by name
activation     which plugins take part in a run
lifecycle      calls hooks in one process, and names the plugin that fails
manifest       name, version and digest of each plugin that takes part; the same in every process and on resume
"""
