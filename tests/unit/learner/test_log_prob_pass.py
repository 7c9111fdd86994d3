"""Which passes without gradient a run makes before its optimizer steps."""

from __future__ import annotations

from typing import Any

import pytest

from slime_core.builtin.losses import Clipped
from slime_core.config.learning import AlgorithmConfig
from slime_core.contracts import AdvantageSettings, LossParts
from slime_core.learner.advantages import TokenEstimation
from slime_core.learner.frozen_models import RequiredColumns
from slime_core.learner.objective import Corrections, NamedCorrection, Objective

OLD = frozenset({"old_log_probs"})
KL = {"use_kl_loss": True}


def columns(*, loss_reads: frozenset[str] = OLD, reads: set[str] | None = None, **settings: Any) -> RequiredColumns:
    """Of a run with these algorithm settings; ``reads``: of an estimator of scope token."""
    named: dict[str, Any] = {name: settings.pop(name) for name in ("of_logits", "correct") if name in settings}
    names = settings.pop("corrections", ())
    algorithm = AlgorithmConfig(**settings)
    corrections = Corrections([NamedCorrection(lambda terms: terms, name) for name in names])
    objective = Objective(Clipped(), algorithm, corrections=corrections, parts=LossParts(**named))
    estimation = None
    if reads is not None:
        unused: Any = None
        estimation = TokenEstimation(
            unused, label="it", reads=reads, settings=AdvantageSettings(), reduce=unused, context_group=None
        )
    return RequiredColumns(objective, estimation, loss_reads=loss_reads, distils=algorithm.use_opd)


@pytest.mark.parametrize(
    ("settings", "one_step", "two_steps"),
    [
        # GRPO without a divergence: the loss's own pass is the only one.
        ({}, [], ["actor"]),
        ({"loss_reads": frozenset()}, [], []),  # sft
        (KL, ["reference"], ["reference", "actor"]),
        ({"use_opd": True}, ["teacher"], ["teacher", "actor"]),
        ({**KL, "use_opd": True}, ["reference", "teacher"], ["reference", "teacher", "actor"]),
        ({"loss_reads": frozenset(), "use_opd": True}, ["teacher"], ["teacher", "actor"]),
        ({"corrections": ("tis",)}, [], ["actor"]),
        ({"loss_reads": frozenset(), "corrections": ("tis",)}, [], ["actor"]),
        ({"of_logits": print}, ["actor"], ["actor"]),
        ({"reads": {"rewards"}}, [], ["actor"]),
        ({"reads": {"log_probs"}}, ["actor"], ["actor"]),
        ({"reads": {"log_probs", "ref_log_probs"}}, ["reference", "actor"], ["reference", "actor"]),
    ],
)
def test_only_columns_that_are_read_cost_a_pass(settings, one_step, two_steps):
    assert columns(**settings).roles(1) == one_step
    assert columns(**settings).roles(2) == two_steps


@pytest.mark.parametrize("old_actor_differs", [False, True])
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (KL, []),
        ({"use_opd": True}, []),
        ({"of_logits": print}, []),
        ({**KL, "reads": {"values"}}, []),
        ({"of_logits": print, "reads": {"values", "log_probs"}}, ["actor"]),
        ({**KL, "use_opd": True, "reads": {"log_probs", "ref_log_probs"}}, ["reference", "actor"]),
        ({"use_rollout_logprobs": True, "reads": {"log_probs", "ref_log_probs"}}, ["reference"]),
    ],
)
def test_a_rollout_without_a_step_of_the_actor_has_what_the_estimator_reads(settings, expected, old_actor_differs):
    roles = ["old_actor" if old_actor_differs and role == "actor" else role for role in expected]
    assert columns(**settings).roles(0, old_actor_differs=old_actor_differs) == roles


@pytest.mark.parametrize("num_steps", [1, 2])
def test_an_actor_that_has_left_the_engines_needs_the_old_one(num_steps):
    assert columns().roles(num_steps, old_actor_differs=True) == ["old_actor"]
    assert columns(use_opd=True).roles(num_steps, old_actor_differs=True) == ["teacher", "old_actor"]
    assert columns(reads={"log_probs"}).roles(num_steps, old_actor_differs=True) == ["old_actor"]
    assert columns(loss_reads=frozenset()).roles(num_steps, old_actor_differs=True) == []
