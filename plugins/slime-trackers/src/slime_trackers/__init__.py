"""Trackers: services that receive the metrics of a run, in addition to the run's own files.

weights_and_biases    plugin ``wandb``
mlflow                plugin ``mlflow``
prometheus            plugin ``prometheus``
tracked_run           the service's id of a run, stored in the run folder, and a check for missing client libraries
"""
