"""The rules of routing replay: their texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load
from slime_core.config.schema import ARITHMETIC

MODEL = ARITHMETIC / "model" / "config.json"


def broken_rules(line: str) -> list[str]:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return [mistake.message for mistake in mistakes(config)]


HALVES = (
    "separate prefill and decode engines (prefill_num_servers, worker_type) cannot be combined with "
    "use_rollout_routing_replay, because its requests bypass the router, through which alone they answer. Leave one of "
    "the two out"
)


@pytest.mark.parametrize("name", ["use_routing_replay", "use_rollout_routing_replay"])
def test_a_model_without_experts_has_no_routes(name: str) -> None:
    assert broken_rules(f"--{name.replace('_', '-')}")[0] == (
        f"{name}: {MODEL} (hf_checkpoint) describes a model without experts; leave it out"
    )


def test_routes_come_from_engines_that_do_whole_requests(tmp_path: Path) -> None:
    config = {"architectures": ["X"], "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = f"--hf-checkpoint {tmp_path} --rollout-max-response-len 8"
    assert broken_rules(f"{line} --use-routing-replay") == []
    assert broken_rules(f"{line} --use-rollout-routing-replay") == []
    split = "--prefill-num-servers 1 --rollout-num-gpus 2"
    assert broken_rules(f"{line} --use-rollout-routing-replay {split}") == [HALVES]


def test_routes_that_no_pass_records_before_training_cannot_be_replayed(tmp_path: Path) -> None:
    config = {"architectures": ["X"], "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = f"--hf-checkpoint {tmp_path} --rollout-max-response-len 8 --use-routing-replay --use-rollout-logprobs"
    assert broken_rules(line) == [
        "use_routing_replay = true cannot be combined with use_rollout_logprobs = true, because the engine's log-probs "
        "replace the pass whose routes would be replayed. Leave --use-routing-replay or --use-rollout-logprobs out"
    ]
    # The backward pass is a later one where it runs layers again.
    assert (
        broken_rules(f"{line} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1") == []
    )
    assert broken_rules(f"{line} --recompute-activations") == []
