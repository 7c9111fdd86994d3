"""Where a run writes down what happened.

    events.py       what listeners hear of: phases, steps, evaluations, warnings, the end
    metrics.py      the numbers of one step
    observers.py    who watches and may not end the run
    record.py       the run folder: config, metrics.jsonl, samples, logs, checkpoints
    jsonl.py        one JSON object a line, on disk when the step ends
    tensorboard.py  the same numbers as TensorBoard events, without torch
    track.py        what the loop holds
    ledger.py       where every prompt group ended, counted from what lies in the folder

The rule: **row k of every tracker holds what was measured with the weights of version k**, where version k is what k
training steps have made. So ``rollout/raw_reward`` and ``eval/<name>`` of the same row are about the same weights (an
asynchronous run's rollouts may be older, by at most its staleness bound):

    {"step": 0, "rollout/raw_reward": 0.33, "train/loss": ..., "perf/step_time": ..., "eval/arithmetic": 0.34}
    {"step": 1, "rollout/raw_reward": 0.41, ...}
    {"step": 2, "eval/arithmetic": 0.46}

An evaluation before training belongs to row 0. An evaluation after training step k measures version k + 1 and waits for
row k + 1; the one after the last step gets a row of its own at the end. A row is written when its step has ended, so
steps are unique and rise. An evaluation that went on beside training is added to its row when it has ended, however
many rows follow by then. Everybody who wants an evaluation at once hears :class:`~.events.EvalFinished`.

Names: ``rollout/raw_reward``, ``rollout/response_len/mean``, ``rollout/truncated_ratio``, ``train/loss``,
``train/pg_loss``, ``train/grad_norm``, ``train/train_rollout_logprob_abs_diff``, ``perf/<phase>_time`` (seconds),
``perf/step_time``, ``perf/tokens_per_gpu_per_sec``, ``eval/<name>``.
"""
