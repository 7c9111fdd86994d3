"""Settings that go together break no rule."""

from __future__ import annotations

import pytest

from slime_core.config.schema import ARITHMETIC
from tests.unit.config.broken import broken

READ = "--load-debug-rollout-data r-{rollout_id}.jsonl"
LENGTHS = "--rollout-max-prompt-len 40 --rollout-max-response-len 24"
LINES = [
    "",
    # ahead of training
    "--async-buffer-size 1",
    "--async-buffer-size 1 --max-staleness 1",
    "--async-buffer-size 2 --max-staleness 3 --update-weights-interval 4",
    "--max-staleness 0",
    "--max-staleness 2 --update-weights-interval 0 --num-rollout 3",
    "--async-buffer-size 1 --max-staleness 1 --stale-samples correct --corrections tis",
    "--async-buffer-size 1 --max-staleness 1 --stale-samples correct --use-rollout-logprobs",
    "--async-buffer-size 3 --pause-generation-mode in_place",
    # batches
    "--loss-token-divisor 64",
    "--micro-batch-size 3",
    "--balance-by-flops",
    f"--hard-token-budget --max-tokens-per-gpu 64 {LENGTHS}",
    f"--hard-token-budget --max-tokens-per-gpu 32 {LENGTHS} --context-parallel-size 2 --actor-num-nodes 2",
    f"--hard-token-budget --max-tokens-per-gpu 32 {LENGTHS} --context-parallel-size 2 --actor-num-nodes 2 "
    "--critic-num-gpus 4 --critic-context-parallel-size 4",
    f"--hard-token-budget --max-tokens-per-gpu 192 --micro-batch-size 3 {LENGTHS}",
    # corrections
    "--use-kl-loss --kl-loss-coef 0 --kl-coef 0.1",
    "--use-kl-loss --use-unbiased-kl",
    "--use-rollout-logprobs --get-mismatch-metrics",
    "--true-on-policy-mode --get-mismatch-metrics",
    # critic
    "--num-rollout 5 --num-critic-only-steps 4 --critic-lr 1e-4 --min-lr 1e-4 --lr-warmup-init 1e-4",
    # The critic's steps are all of the run, the actor's those after the critic was alone.
    "--lr-decay-style WSD --lr-wsd-decay-iters 6 --num-rollout 4 --num-steps-per-rollout 2 --critic-lr-warmup-iters 2 "
    "--num-critic-only-steps 1 --lr-warmup-iters 0",
    "--critic-lr-warmup-iters 9 --lr-decay-iters 10",
    # data
    f"{LENGTHS} --num-data-workers 2",
    '--apply-chat-template --apply-chat-template-kwargs {"a":1} --multimodal-keys {"image":"images"}',
    # one half alone
    "--debug-rollout-only",
    READ,
    f"--debug-train-only {READ} --load-debug-rollout-data-subsample 0.5",
    "--load-debug-rollout-data r.jsonl --num-rollout 1",
    "--save-debug-rollout-data {rollout_id}/r.jsonl --save-debug-train-data t-{rollout_id}-{rank}.safetensors",
    f"{READ} --save-debug-train-data t-{{rollout_id}}.safetensors",
    f"{READ} --prompt-data missing.jsonl --rollout-max-response-len 8",
    # evaluations
    "--eval-num-gpus 2 --eval-num-gpus-per-engine 2",
    "--eval-num-gpus 1",
    "--eval-interleaved",
    "--eval-interleaved --colocate",
    "--eval-interleaved --async-buffer-size 1",
    "--eval-num-gpus 1 --skip-eval-before-train",
    # layouts
    "--tensor-model-parallel-size 2 --sequence-parallel true --actor-num-gpus-per-node 2",
    "--pipeline-model-parallel-size 3 --actor-num-gpus-per-node 3",
    "--context-parallel-size 2 --actor-num-gpus-per-node 4",
    "--colocate true --actor-num-gpus-per-node 2 --rollout-num-gpus 2",
    "--update-weight-transport tensor",
    "--update-weight-transport disk --update-weight-disk-dir somewhere",
    "--parity-mean-tolerance 0.01 --parity-max-tolerance 0.1",
    "--parity-mean-tolerance 0.5 --bf16 true",
    "--rollout-num-gpus 2 --rollout-num-gpus-per-engine 2",
    "--sglang-context-length 128",
    # over-sampling, and responses that go on
    "--rollout-batch-size 8 --over-sampling-batch-size 8",
    "--rollout-batch-size 8 --over-sampling-batch-size 20 --partial-rollout",
    "--async-buffer-size 1 --pause-generation-mode abort --partial-rollout --mask-offpolicy-in-partial-rollout",
    "--partial-rollout --generate-function mine",
    "--failed-samples retry --failed-sample-retries 5",
    "--over-sampling-batch-size 64 --max-staleness 0 --true-on-policy-mode --kl-loss-coef 0",
    # other roles, and the optimizer
    "--use-kl-loss --ref-update-interval 4",
    "--kl-coef 0.1 --ref-update-interval 4 --use-kl-loss",
    f"--use-opd --opd-kl-coef 0.5 --opd-teacher-load {ARITHMETIC / 'model'}",
    "--keep-old-actor --update-weights-interval 2",
    "--only-train-params-name-list mlp self_attention",
    "--lr-decay-style WSD --lr-wsd-decay-iters 4 --num-rollout 10",
    "--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-wsd-decay-style linear --min-lr 1e-7 --lr-decay-iters 60",
    "--lr-decay-style constant --min-lr 0 --lr-wsd-decay-style exponential",
    "--lr-decay-style inverse-square-root --lr 1e-5 --lr-warmup-iters 3 --lr-warmup-init 1e-6",
]


@pytest.mark.parametrize("line", LINES)
def test_valid_settings_break_no_rule(line: str) -> None:
    assert broken(line) == []
