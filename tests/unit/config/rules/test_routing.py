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
    "use_rollout_routing_replay sends requests to engines directly, because sglang-router does not pass on "
    "return_routed_experts, but separate prefill and decode engines answer through the router only; leave one of the "
    "two out"
)


@pytest.mark.parametrize("name", ["use_routing_replay", "use_rollout_routing_replay"])
def test_a_model_without_experts_has_no_routes(name: str) -> None:
    assert broken_rules(f"--{name.replace('_', '-')}")[0] == (
        f"{name} replays the experts that each token takes, but {MODEL} (hf_checkpoint) describes a model without "
        "experts; leave it out"
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


def test_a_mixture_may_differ_more_on_average_than_a_dense_model(tmp_path: Path) -> None:
    line = f"--hf-checkpoint {tmp_path} --rollout-max-response-len 8 --parity-mean-tolerance"
    for experts, most in ((8, "0.05"), (0, "0.001")):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "num_experts": experts}))
        assert broken_rules(f"{line} {most}") == []
        (mistake,) = broken_rules(f"{line} 0.06")
        assert f"is above parity_max_tolerance = {most}" in mistake
