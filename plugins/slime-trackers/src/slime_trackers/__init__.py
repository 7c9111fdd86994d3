"""Trackers: where the metrics of a run go besides its own files.

weights_and_biases    plugin ``wandb``
mlflow                plugin ``mlflow``
prometheus            plugin ``prometheus``
tracked_run           the service's id of a run, kept in the run folder, and whether a client library is installed
"""
