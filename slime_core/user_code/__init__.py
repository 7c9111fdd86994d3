"""Runs code that is not slime's: turns its exceptions into errors of slime, and loads functions that options name.

failures     turns exceptions of plugins and user code into errors that name who failed, and where
limits       a time limit for code that runs in this thread
neighbours   the modules next to such a function's file, importable for it alone
"""
