"""The run folder, metrics, readable samples, and the accounting of prompts.

    track        the metrics logger of the loop: rows, timers, trackers, listeners, events
    tensorboard  the tracker that every run has
    record       the run folder: config, metrics.jsonl (a row is on disk when its step ends), logs, checkpoints
    samples      one file of readable samples per rollout or evaluation set
    timeline     the spans of each process
    failures     errors of observers
    ledger       prompt accounting: where every prompt group ended, from the files of the run folder

The rule: **row k of every tracker describes the weights of version k**, the weights after k training steps. So
``rollout/raw_reward`` and ``eval/<name>`` of the same row are about the same weights (rollouts of an asynchronous run
may be older, by at most its staleness bound):

    {"step": 0, "rollout/raw_reward": 0.33, "train/loss": ..., "perf/step_time": ..., "eval/arithmetic": 0.34}
    {"step": 1, "rollout/raw_reward": 0.41, ...}
    {"step": 2, "eval/arithmetic": 0.46}

An evaluation before training belongs to row 0. An evaluation after training step k measures version k + 1 and waits for
row k + 1; the evaluation after the last step gets a separate row. A row is written when its step has ended, so steps
are unique and rise. A concurrent evaluation is added to its row when it has ended, even if later rows exist by then.
:class:`~.track.EvalFinished` reports every evaluation at once.

Names: ``rollout/raw_reward``, ``rollout/response_len/mean``, ``rollout/truncated_ratio``, ``train/loss``,
``train/pg_loss``, ``train/grad_norm``, ``train/train_rollout_logprob_abs_diff``, ``perf/<phase>_time`` (seconds),
``perf/step_time``, ``perf/tokens_per_gpu_per_sec``, ``eval/<name>``.
"""
