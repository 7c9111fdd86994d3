"""Components of a run: built from those of its plugins, and checked before the run starts.

construction   builds components, with their options and a view of the run
devices        devices other than GPUs, which plugins add
fit            whether a target has the methods of its contract
functions      functions that options name by path
selection      whether the components that a run uses fit together, and whether every setting takes effect
"""
