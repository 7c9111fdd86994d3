"""The rules between functions that are named by path and the other settings: each broken once."""

from __future__ import annotations

import pytest

from slime_core.config.check import mistakes
from slime_core.config.load import load

CP2 = "--actor-num-gpus-per-node 2 --context-parallel-size 2"


def broken_rules(line: str) -> list[str]:
    config = load(["--advantage-estimator", "toy", *line.split()], check_rules=False).config
    return [mistake.message for mistake in mistakes(config)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            f"--custom-tis-function-path a.b {CP2}",
            "custom_tis_function_path = a.b works on whole responses, and context_parallel_size = 2 splits them over "
            "ranks; leave one of the two out",
        ),
        (f"--custom-loss-function-path a.b {CP2}", "custom_loss_function_path = a.b works on whole responses"),
        (f"--custom-pg-loss-reducer-function-path a.b {CP2}", "custom_pg_loss_reducer_function_path = a.b works on"),
        (f"--rollout-data-postprocess-path a.b {CP2}", "rollout_data_postprocess_path = a.b works on whole responses"),
        (
            "--rollout-data-postprocess-path a.b --critic-num-gpus 1",
            "rollout_data_postprocess_path = a.b changes what the actor's ranks train on, and critic_num_gpus = 1 has "
            "a critic on ranks of its own, which would not see the change; leave one of the two out",
        ),
        (
            "--custom-update-weight-post-write-path a.b",
            "custom_update_weight_post_write_path = a.b has no effect where weights travel by distributed, because no "
            "file is written; add --update-weight-transport disk, or leave it out",
        ),
        (
            "--custom-tis-function-path a.b --custom-loss-function-path c.d",
            "custom_tis_function_path = a.b changes the policy loss, which custom_loss_function_path = c.d replaces; "
            "leave one of the two out",
        ),
        (
            "--corrections tis --custom-loss-function-path c.d",
            "corrections = tis weigh the policy loss, which custom_loss_function_path = c.d replaces; leave one of the "
            "two out",
        ),
        (
            "--spec a.b c --custom-model-provider-path d.e",
            "spec = a.b c gives the layers of the model that custom_model_provider_path = d.e builds by itself; leave "
            "one of the two out",
        ),
        ("--spec a.b.c", "spec = a.b.c: accepted are a module and a function, --spec MODULE FUNCTION"),
    ],
)
def test_what_does_not_go_together_is_refused(line: str, message: str) -> None:
    (found,) = broken_rules(line)
    assert found.startswith(message)


@pytest.mark.parametrize(
    "line",
    [
        f"--custom-megatron-init-path a.b --spec a.b c {CP2}",
        "--custom-update-weight-post-write-path a.b --update-weight-transport disk",
        "--custom-tis-function-path a.b --custom-pg-loss-reducer-function-path c.d",
        "--rollout-data-postprocess-path e.f --custom-loss-function-path a.b",
    ],
)
def test_what_goes_together_is_accepted(line: str) -> None:
    assert broken_rules(line) == []
