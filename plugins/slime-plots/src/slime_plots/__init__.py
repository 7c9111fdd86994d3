"""Charts of the metrics of runs.

curves    reads metrics.jsonl and selects metrics: one chart a metric, one line a run
draw      plots charts as text (plotext) and as a picture (matplotlib)
tracker   plots a run's charts when it ends
command   ``slime plot RUN ...``
"""
