"""Rules between settings, one file a subject; ``check`` calls them all.

Each finds its mistakes and says what was asked, what was found, what would be accepted and the next step. Quick, and
nothing heavy is imported: they run before anything starts.
"""
