"""``custom_advantage_function_path`` as an estimator of scope ``token``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slime_compat.advantage import CustomAdvantage
from slime_core import RunView
from slime_core.errors import PluginError
from slime_core.plugins.contracts import AdvantageSettings, ResponseTokens
from tests.function_paths import options_for

PATH = "custom_advantage_function_path"

PENALISED = """
def penalised(args, rollout_data):
    args.seen = rollout_data
    rollout_data["returns"] = rollout_data["advantages"] = [
        reward - args.kl_coef * kl for reward, kl in zip(rollout_data["rewards"], rollout_data["kl"])
    ]
"""


def tokens(**columns) -> ResponseTokens:
    """Two samples of 1 + 2 and 2 + 1 tokens."""
    values = {
        "mask_U": [1.0, 1.0, 0.0],
        "rewards_B": [1.0, -1.0],
        "log_probs_U": [-1.0, -2.0, -3.0],
        "rollout_log_probs_U": [-1.1, -2.1, -3.1],
        **columns,
    }
    return ResponseTokens(
        lengths_B=torch.tensor([2, 1]),
        samples_U=torch.tensor([0, 0, 1]),
        tokens_T=torch.tensor([5, 6, 7, 8, 9, 10]),
        total_lengths_B=torch.tensor([3, 3]),
        settings=AdvantageSettings(kl_coef=0.1),
        **{name: torch.tensor(column) for name, column in values.items()},
    )


def estimate(options, batch):
    return CustomAdvantage(options, RunView()).estimate(batch, reduce=None)


def test_a_function_sees_slimes_columns_and_sets_advantages(tmp_path):
    options = options_for(tmp_path, PENALISED, settings=("--kl-coef", "0.1"), **{PATH: "penalised"})
    found = estimate(options, tokens(ref_log_probs_U=[-1.5, -2.0, -3.0]))
    assert found.advantages_U.tolist() == pytest.approx([1.0 - 0.1 * 0.5, 1.0, -1.0])  # k1: -1.0 + 1.5
    assert found.returns_U is not None
    assert found.returns_U.tolist() == found.advantages_U.tolist()
    seen = options.arguments.seen
    assert [one.tolist() for one in seen["tokens"]] == [[5, 6, 7], [8, 9, 10]]
    assert (seen["total_lengths"], seen["response_lengths"], seen["rewards"]) == ([3, 3], [2, 1], [1.0, -1.0])
    assert [one.tolist() for one in seen["loss_masks"]] == [[1.0, 1.0], [0.0]]
    assert [len(one) for one in seen["rollout_log_probs"]] == [2, 1]


def test_without_a_reference_the_divergence_is_zero_and_its_column_is_missing(tmp_path):
    options = options_for(tmp_path, PENALISED, **{PATH: "penalised"})
    assert estimate(options, tokens()).advantages_U.tolist() == [1.0, 1.0, -1.0]
    assert "ref_log_probs" not in options.arguments.seen


def test_without_a_coefficient_the_divergence_is_zero(tmp_path):
    code = "def f(args, data):\n    data['advantages'] = data['returns'] = data['kl']\n"
    batch = replace(tokens(ref_log_probs_U=[-1.5, -2.0, -3.0]), settings=AdvantageSettings())
    assert estimate(options_for(tmp_path, code, **{PATH: "f"}), batch).advantages_U.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", "no advantages and no returns"),
        ("data['advantages'] = data['kl']", "set no returns"),
        ("data['advantages'] = data['returns'] = data['rewards']", "advantages has the shapes"),
        ("data['advantages'] = data['returns'] = 'high'", "advantages is a str"),
        ("data['nothing']", "KeyError: 'nothing'"),
    ],
)
def test_a_function_that_sets_no_advantages_is_refused(tmp_path, body, message):
    code = f"def f(args, data):\n    {body}\n"
    with pytest.raises(PluginError, match=message):
        estimate(options_for(tmp_path, code, **{PATH: "f"}), tokens())
