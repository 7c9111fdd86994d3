"""Trackers: services that receive the metrics of a run, in addition to the run's own files.

weights_and_biases    plugin ``wandb``
mlflow                plugin ``mlflow``
prometheus            plugin ``prometheus``; its tracker is in prometheus_server
options               settings of the three
tracked_run           the service's id of a run, stored in the run folder, and a check for missing client libraries
"""
