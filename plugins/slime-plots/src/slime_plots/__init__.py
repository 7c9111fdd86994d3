"""Charts, samples and timelines of runs.

curves    reads metrics.jsonl and selects metrics: one chart a metric, one line a run
draw      plots charts as text (plotext) and as a picture (matplotlib)
tracker   plots a run's charts when it ends
command   ``slime plot RUN ...``
tokens    ``slime samples RUN``: tokens in a terminal
report    ``slime report RUN ...``: an HTML page
figures   the figures of the report (plotly): curves, shares of a step, the timeline, distributions
spans     reads RUN/timeline; computes waiting times and the trace for Perfetto
coloured  the samples of the report: tokens coloured by log-probability, advantage or weight version
profiler  torch's profiler around optimizer steps
options   settings of the profiler
"""
