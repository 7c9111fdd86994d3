"""``custom_advantage_function_path`` as an estimator of scope ``token``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime_compat.advantage import CustomAdvantage
from slime_compat.paths import PathOptions
from slime_core import AdvantageSettings, ResponseTokens, TokenAdvantages
from slime_core.errors import PluginError
from tests.function_paths import options_for

PENALISED = """
def f(args, rollout_data):
    args.seen = rollout_data
    rollout_data["returns"] = rollout_data["advantages"] = [
        reward - args.kl_coef * kl for reward, kl in zip(rollout_data["rewards"], rollout_data["kl"])
    ]
"""
KL = "def f(args, data): data['advantages'] = data['returns'] = data['kl']"


def estimate(options: PathOptions, *, kl_coef: float = 0.1, **columns: list[float]) -> TokenAdvantages:
    """Call the function with two samples of 1 + 2 and 2 + 1 tokens."""
    values = {
        "mask_U": [1.0, 1.0, 0.0],
        "rewards_B": [1.0, -1.0],
        "log_probs_U": [-1.0, -2.0, -3.0],
        "rollout_log_probs_U": [-1.1, -2.1, -3.1],
        **columns,
    }
    tensors: dict[str, Any] = {name: torch.tensor(column) for name, column in values.items()}
    batch = ResponseTokens(
        lengths_B=torch.tensor([2, 1]),
        samples_U=torch.tensor([0, 0, 1]),
        tokens_T=torch.tensor([5, 6, 7, 8, 9, 10]),
        total_lengths_B=torch.tensor([3, 3]),
        settings=AdvantageSettings(kl_coef=kl_coef),
        **tensors,
    )
    reduce: Any = None
    return CustomAdvantage(options).estimate(batch, reduce)


def options_of(folder: Path, code: str) -> PathOptions:
    return options_for(folder, code, settings=("--kl-coef", "0.1"), custom_advantage_function_path="f")


def test_a_function_sees_slimes_columns_and_sets_advantages(tmp_path: Path) -> None:
    options = options_of(tmp_path, PENALISED)
    advantages = estimate(options, ref_log_probs_U=[-1.5, -2.0, -3.0])
    assert advantages.advantages_U.tolist() == pytest.approx([1.0 - 0.1 * 0.5, 1.0, -1.0])  # k1: -1.0 + 1.5
    assert advantages.returns_U is not None
    assert advantages.returns_U.tolist() == advantages.advantages_U.tolist()
    seen = options.arguments.seen
    assert [one.tolist() for one in seen["tokens"]] == [[5, 6, 7], [8, 9, 10]]
    assert (seen["total_lengths"], seen["response_lengths"], seen["rewards"]) == ([3, 3], [2, 1], [1.0, -1.0])
    assert [one.tolist() for one in seen["loss_masks"]] == [[1.0, 1.0], [0.0]]
    assert [len(one) for one in seen["rollout_log_probs"]] == [2, 1]


def test_without_a_reference_or_a_coefficient_the_divergence_is_zero(tmp_path: Path) -> None:
    options = options_of(tmp_path, PENALISED)
    assert estimate(options).advantages_U.tolist() == [1.0, 1.0, -1.0]
    assert "ref_log_probs" not in options.arguments.seen
    without = estimate(options_of(tmp_path, KL), kl_coef=0.0, ref_log_probs_U=[-1.5, -2.0, -3.0])
    assert without.advantages_U.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("pass", "no advantages and no returns"),
        ("data['advantages'] = data['kl']", "no returns"),
        ("data['advantages'] = data['returns'] = data['rewards']", "advantages has the shapes"),
        ("data['advantages'] = data['returns'] = 'high'", "advantages is a str"),
        ("data['nothing']", "KeyError: 'nothing'"),
    ],
)
def test_a_function_that_sets_no_advantages_is_refused(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        estimate(options_of(tmp_path, f"def f(args, data):\n    {body}\n"))
