"""The rules of routing replay."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_core.config.schema import ARITHMETIC
from tests.unit.config.broken import blames, broken, described

MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3}


@pytest.mark.parametrize("name", ["use_routing_replay", "use_rollout_routing_replay"])
def test_a_model_without_experts_has_no_routes(name: str) -> None:
    blames(broken(f"--{name.replace('_', '-')}")[:1], name, f"{ARITHMETIC}/model/config.json", "hf_checkpoint")


def test_routes_come_from_engines_that_do_whole_requests(tmp_path: Path) -> None:
    line = described(tmp_path, **MIXTURE)
    assert broken(f"{line} --use-routing-replay") == []
    assert broken(f"{line} --use-rollout-routing-replay") == []
    found = broken(f"{line} --use-rollout-routing-replay --prefill-num-servers 1 --rollout-num-gpus 2")
    blames(found, "prefill_num_servers", "worker_type", "use_rollout_routing_replay")


def test_routes_that_no_pass_records_before_training_cannot_be_replayed(tmp_path: Path) -> None:
    line = f"{described(tmp_path, **MIXTURE)} --use-routing-replay --use-rollout-logprobs"
    blames(broken(line), "use_routing_replay", "use_rollout_logprobs")
    # The backward pass is a later one where it runs layers again.
    assert broken(f"{line} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1") == []
    assert broken(f"{line} --recompute-activations") == []
