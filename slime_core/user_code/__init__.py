"""Runs code that is not slime's: turns its exceptions into errors of slime, and loads functions that options name.

failures     turns exceptions of plugins and user code into errors that name who failed, and where
functions    finds and imports functions that options name by path
neighbours   the modules next to such a function's file, importable for it alone
"""
